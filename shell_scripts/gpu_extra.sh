#!/usr/bin/env bash
# Print the extra whose CUDA packages fit this machine's driver: cuda12 or cuda13. Exit 1 where there is no GPU.
set -euo pipefail

command -v nvidia-smi >/dev/null || exit 1
nvidia-smi --list-gpus 2>/dev/null | grep -q '^GPU ' || exit 1
major=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\)\..*/\1/p' | head -n 1)
case "$major" in
    12) echo cuda12 ;;
    '' | [0-9] | 1[01])
        echo "the NVIDIA driver is too old for CUDA 12 (it offers '${major:-nothing}'): update it to use the GPU" >&2
        exit 1
        ;;
    *) echo cuda13 ;;
esac
