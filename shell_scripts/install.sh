#!/usr/bin/env bash
# Make a virtual environment if it does not exist, and install linumpy into it.
#
#   PYTHON=python3 VENV=.venv shell_scripts/install.sh base|test|lint|docs
#   INSTALLER=uv shell_scripts/install.sh test,lint    # several parts at once; uv takes a sixth of pip's processor time
#   VENV=.venv shell_scripts/install.sh clean
#
# If nvidia-smi finds a GPU, the CUDA packages that fit the driver are installed, too. `clean` removes the virtual
# environment if this script made it.
set -euo pipefail

part=${1:?which parts: base, test, lint, docs; or clean}
python=${PYTHON:-python3}
venv=${VENV:-.venv}
# A name that begins with a dash must not be read as an option.
[[ $venv != -* ]] || venv=./$venv
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# A file in each virtual environment that this script made. Only such folders are ever removed.
mark=.made-by-linumpy

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

# Whether a path exists, as a file, a folder, or a link, even a broken link.
exists() {
    [[ -e $1 || -L $1 ]]
}

remove_unfinished() {
    [[ -z ${made:-} ]] || rm -rf -- "$made"
}

make_venv() {
    if exists "$venv"; then
        fail "VENV='$venv' exists, and is not a virtual environment (it has no bin/python): it was not changed." \
            "Name another folder, VENV=…, or remove this folder yourself."
    fi
    mkdir -p -- "$(dirname -- "$venv")"
    # mkdir fails if another process has just made the folder: only a folder of this run may be removed on failure.
    mkdir -- "$venv" || fail "the folder VENV='$venv' cannot be made."
    made=$venv
    trap remove_unfinished EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    "$python" -m venv "$venv" || fail "'$python -m venv' failed. On Debian and Ubuntu: apt install python3-venv"
    : >"$venv/$mark"
    made=
    trap - EXIT INT TERM HUP
}

if [[ $part == clean ]]; then
    if [[ -f $venv/$mark ]]; then
        rm -rf -- "$venv"
    elif exists "$venv"; then
        echo "'$venv' was not removed, since this script did not make it: remove it yourself if you do not need it" >&2
    fi
    exit 0
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    fail "linumpy needs Python 3.11 or later, and '$python' is $("$python" --version 2>&1 || true)." \
        "Name another Python: make PYTHON=python3.12 …"
fi
[[ -x $venv/bin/python ]] || make_venv
"$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
    fail "the virtual environment VENV='$venv' has no pip: add it ('$venv/bin/python' -m ensurepip), or name another" \
        "virtual environment."

extras=()
if gpu=$("$here/shell_scripts/gpu_extra.sh"); then
    extras+=("$gpu")
fi
if [[ $part != base ]]; then
    extras+=("$part")
fi
list=$(IFS=,; echo "${extras[*]-}")
wanted="$here${list:+[$list]}"
install_by_pip() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}
# uv does not read pip's configuration (indexes, local wheels). If uv finds no packages, pip installs.
install_by_uv() {
    [[ ${INSTALLER:-pip} == uv ]] && install_by_pip uv &&
        UV_NATIVE_TLS=1 "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --editable "$wanted"
}
echo "installing linumpy${list:+ with $list} into $venv …"
if ! install_by_uv && ! install_by_pip --editable "$wanted"; then
    [[ ${LINUMPY_NATIVE:-} != require ]] || command -v "${CXX:-c++}" >/dev/null ||
        fail "LINUMPY_NATIVE=require: the native core needs a compiler: apt install g++ libzstd-dev liblz4-dev zlib1g-dev"
    fail "linumpy was not installed: pip's message above has the reason."
fi
"$venv/bin/python" -c 'from linumpy.core import native; why = native.why_no_core(); why and print("note:", why)'
for one in base ${part//,/ }; do touch "$venv/.has-$one"; done
