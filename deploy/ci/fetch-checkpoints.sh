#!/usr/bin/env bash
# Fetch the checkpoints of checkpoints.txt into checkpoints/.
#   fetch-checkpoints.sh [UNITS]         UNITS, as --only of plansmith takes them: only the models of these
#   fetch-checkpoints.sh --key [UNITS]   fetch nothing, print a name for a cache of what would be there
# What is there at the same commit is left alone. On a machine of your own let CHECKPOINTS_DIR name a folder that stays:
# checkpoints/ becomes a link to it, and neither downloads nor fingerprints are made twice.
set -euo pipefail
key=
if [[ ${1:-} == --key ]]; then
  key=yes
  shift
fi
units=${1:-}

wanted=()
while read -r model repository commit rest; do
  [[ -z $model || $model == \#* ]] && continue
  if [[ ! $commit =~ ^[0-9a-f]{40}$ || -n $rest ]]; then
    echo "checkpoints.txt: $model has '$commit $rest', wanted a commit of 40 hexadecimal digits and no more" >&2
    exit 1
  fi
  [[ -n $units && ,$units != *,"$model"/* ]] || wanted+=("$model $repository $commit")
done <checkpoints.txt

if [[ -n $key ]]; then
  printf '%s\n' "${wanted[@]}" | sha256sum | cut -c 1-40
  exit
fi

# A cache may have brought a folder, or another machine's link.
if [[ -L checkpoints || -n ${CHECKPOINTS_DIR:-} ]]; then
  rm -rf checkpoints
fi
if [[ -n ${CHECKPOINTS_DIR:-} ]]; then
  mkdir -p "$CHECKPOINTS_DIR"
  ln -s "$CHECKPOINTS_DIR" checkpoints
fi
mkdir -p checkpoints

for line in "${wanted[@]}"; do
  read -r model repository commit <<<"$line"
  folder=checkpoints/$model
  if [[ -f $folder.commit && $(<"$folder.commit") == "$repository $commit" ]]; then
    continue
  fi
  rm -rf "$folder" "$folder.commit"
  # Nothing of subfolders, where repositories keep the same model in other forms.
  hf download "$repository" --revision "$commit" --local-dir "$folder" --exclude '*/*' \
    --include '*.safetensors' --include '*.json' --include '*.txt' --include '*.model' --include '*.jinja'
  echo "$repository $commit" >"$folder.commit"
done
