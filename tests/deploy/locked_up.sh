# Runs a program as the deployment files would have it: another user without capabilities, / read-only, what is
# writable a new tmpfs. Inside `unshare --mount`, as root.
#   locked_up.sh MODELS PROGRAM [ARGUMENT...]      MODELS is read at /mnt/models
set -eu
models=$1
shift
home=$HOME # its owner alone may look into it, and interpreters may lie there
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/models /mnt/home
mount --bind "$models" /mnt/models
mount -o remount,bind,ro /mnt/models
mount --bind "$home" /mnt/home
mount -t tmpfs -o mode=755 tmpfs "$home"
for folder in .pyenv .local; do
  [ -d "/mnt/home/$folder" ] || continue
  mkdir "$home/$folder"
  mount --bind "/mnt/home/$folder" "$home/$folder"
done
umount /mnt/home
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -m 755 /run/plansmith
chown 10001:10001 /run/plansmith
mount -t tmpfs -o mode=1777,size=256m tmpfs /tmp
mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm
mount -o remount,bind,ro "$home"
mount -o remount,bind,ro /mnt
mount -o remount,bind,ro /
cd /tmp
exec env HOME=/tmp TMPDIR=/tmp PYTHONDONTWRITEBYTECODE=1 \
  setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
