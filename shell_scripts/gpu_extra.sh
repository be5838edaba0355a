#!/usr/bin/env bash
# Print the extra whose CUDA packages fit this machine's driver: cuda12 or cuda13. Exit 1 where there is no GPU.
set -euo pipefail

command -v nvidia-smi >/dev/null || exit 1
# The whole list is read before it is searched. In a pipe, `grep -q` would end early, nvidia-smi would die of SIGPIPE,
# and with pipefail that would look like a machine without a GPU. If one of several GPUs fails, nvidia-smi lists the
# other GPUs and fails: its exit status is ignored.
gpus=$(nvidia-smi --list-gpus 2>/dev/null) || true
[[ $'\n'$gpus == *$'\n''GPU '* ]] || exit 1
table=$(nvidia-smi 2>/dev/null) || true
major=
if [[ $table =~ CUDA[A-Za-z\ ]*Version:\ *([0-9]+)\. ]]; then major=${BASH_REMATCH[1]}; fi
case "$major" in
    12) echo cuda12 ;;
    '' | [0-9] | 1[01])
        echo "the NVIDIA driver is too old for CUDA 12 (it offers '${major:-nothing}'): update it to use the GPU" >&2
        exit 1
        ;;
    *) echo cuda13 ;;
esac
