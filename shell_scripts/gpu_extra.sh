#!/usr/bin/env bash
# Print the extra whose CUDA packages fit this machine's driver: cuda12 or cuda13. Exit 1 where there is no GPU.
set -euo pipefail

command -v nvidia-smi >/dev/null || exit 1
# Read to the end before searching: in a pipe, `grep -q` ends early, nvidia-smi dies of SIGPIPE, and pipefail reports
# that as a machine without a GPU. nvidia-smi also fails where one of several GPUs does, and lists the others.
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
