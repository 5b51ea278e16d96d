# Runs a program as the deployment files would have it: another user without capabilities, / read-only, what is
# writable a new tmpfs. Inside `unshare --mount`, as root.
#   KEEP=DIR[:DIR...] locked_up.sh MODELS PROGRAM [ARGUMENT...]
# MODELS is read at /mnt/models. KEEP: folders under $HOME or /tmp that the program needs, such as its interpreter's;
# a home may be closed to others, and /tmp is a new one.
set -eu
models=$1
shift
IFS=:
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/models /mnt/keep
mount --bind "$models" /mnt/models
mount -o remount,bind,ro /mnt/models
number=0
for folder in $KEEP; do
  number=$((number + 1))
  mkdir "/mnt/keep/$number"
  mount --bind "$folder" "/mnt/keep/$number"
done
[ "$HOME" = / ] || mount -t tmpfs -o mode=755 tmpfs "$HOME"
mount -t tmpfs -o mode=1777,size=256m tmpfs /tmp
number=0
for folder in $KEEP; do
  number=$((number + 1))
  mkdir -p "$folder"
  mount --bind "/mnt/keep/$number" "$folder"
  mount -o remount,bind,ro "$folder"
  umount "/mnt/keep/$number"
done
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -m 755 /run/plansmith
chown 10001:10001 /run/plansmith
mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm
[ "$HOME" = / ] || mount -o remount,bind,ro "$HOME"
mount -o remount,bind,ro /mnt
mount -o remount,bind,ro /
cd /tmp
exec env HOME=/tmp TMPDIR=/tmp PYTHONDONTWRITEBYTECODE=1 \
  setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
