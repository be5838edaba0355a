#!/usr/bin/env bash
# Make the virtual environment if it is not there, and install linumpy into it.
#
#   PYTHON=python3 VENV=.venv shell_scripts/install.sh base|test|lint
#
# With the CUDA packages that fit the driver, where nvidia-smi finds a GPU.
set -euo pipefail

part=${1:?which part: base, test or lint}
python=${PYTHON:-python3}
venv=${VENV:-.venv}
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "linumpy needs Python 3.11 or later, and '$python' is $("$python" --version 2>&1 || true)." >&2
    echo "Name another one: make PYTHON=python3.12 …" >&2
    exit 1
fi
if [ ! -x "$venv/bin/python" ] && ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    echo "'$python -m venv' failed. On Debian and Ubuntu: apt install python3-venv" >&2
    exit 1
fi

extras=()
if gpu=$("$here/shell_scripts/gpu_extra.sh"); then
    extras+=("$gpu")
fi
if [ "$part" != base ]; then
    extras+=("$part")
fi
list=$(IFS=,; echo "${extras[*]-}")
echo "installing linumpy${list:+ with $list} into $venv …"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$here${list:+[$list]}"
"$venv/bin/python" -c 'from linumpy.core import native; why = native.why_no_core(); why and print("note:", why)'
touch "$venv/.has-$part"
