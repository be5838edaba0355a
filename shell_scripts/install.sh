#!/usr/bin/env bash
# Make a virtual environment if it does not exist, and install linumpy into it.
#
#   PYTHON=python3 VENV=.venv shell_scripts/install.sh base|test|lint|docs
#   INSTALLER=uv shell_scripts/install.sh test,lint    # several parts at once; uv takes a sixth of pip's processor time
#   VENV=.venv shell_scripts/install.sh clean
#   VENV=.venv shell_scripts/install.sh cured    # prints a line if the core is missing and a compiler has appeared
#
# If nvidia-smi finds a GPU, the CUDA packages that fit the driver are installed, too. The native core is built by $CXX,
# c++, g++ or clang++; if none of them compiles C++20, by zig, which is installed from the package index.
# LINUMPY_NATIVE=require fails if the core is not built, LINUMPY_NATIVE=off does not build it. `clean` removes the virtual
# environment if this script made it.
set -euo pipefail

part=${1:?which parts: base, test, lint, docs; or clean, cured}
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
# The compiler by which the core was not built, or an empty line; the file is missing if the core is there.
no_core=$venv/.no-core

# Whether a compiler compiles and links what the core needs: C++20 of GCC 11.
compiles() {
    local folder failed=0
    folder=$(mktemp -d) || fail "no folder for temporary files can be made: set TMPDIR to one that can be written."
    printf '#include <bit>\n#include <span>\n#include <string>\n%s\n%s\n' \
        'unsigned f(float x) { return std::bit_cast<unsigned>(x); }' \
        'std::string g(std::span<const char> x) { return {x.begin(), x.end()}; }' >"$folder/probe.cpp"
    "$@" -std=c++20 -fPIC -shared "$folder/probe.cpp" -o "$folder/probe.so" >"$folder/log" 2>&1 || failed=1
    rm -rf -- "$folder"
    return "$failed"
}

# Set `compiler` to one that this machine has; to nothing if it has none.
find_compiler() {
    local words
    if [[ -n ${CXX:-} ]]; then
        # As CMake reads CXX: a program, or a program with arguments.
        words=("$CXX")
        command -v -- "$CXX" >/dev/null || read -ra words <<<"$CXX"
        compiler=$CXX
        compiles "${words[@]}" && return
        echo "CXX='$CXX' does not compile C++20: looking for another compiler" >&2
    fi
    for compiler in c++ g++ clang++; do
        compiles "$compiler" && return
    done
    compiler=
}

if [[ $part == cured ]]; then
    [[ ${LINUMPY_NATIVE:-} != off && -f $no_core ]] || exit 0
    find_compiler 2>/dev/null
    [[ -z $compiler || $compiler == "$(<"$no_core")" ]] || echo again
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
# Zig is a compiler with its own C++ library. -I: the index's build environments hide the packages of this one.
bring_zig() {
    local folder
    folder=$(cd -P "$venv/bin" && pwd)
    # Its caches belong to the build, not to the user's home.
    export ZIG_GLOBAL_CACHE_DIR=$here/build/zig ZIG_LOCAL_CACHE_DIR=$here/build/zig
    echo "no compiler for C++20: installing zig, to build the native core (2 minutes) …"
    install_by_pip 'ziglang>=0.17.1' >/dev/null 2>&1 || return
    compiler=$folder/zig-c++
    # Instructions of this machine's processor may be missing on others that share the environment. Intrinsics of SSE 4.2,
    # which functions of the core choose at run time, need crc32, which the compiler never uses by itself.
    cat >"$compiler" <<'END'
#!/bin/sh
cpu=baseline
[ "$(uname -m)" != x86_64 ] || cpu=baseline+crc32
exec "${0%/*}/python" -I -m ziglang c++ -mcpu="$cpu" "$@"
END
    chmod +x "$compiler"
    compiles "$compiler"
}

if [[ ${LINUMPY_NATIVE:-} != off ]]; then
    find_compiler
    if [[ -z $compiler ]] && ! bring_zig; then
        compiler=
        [[ ${LINUMPY_NATIVE:-} != require ]] ||
            fail "LINUMPY_NATIVE=require: the native core needs a compiler for C++20, and zig could not be installed" \
                "instead. On Debian and Ubuntu: apt install g++"
    fi
    if [[ -n $compiler ]]; then export CXX=$compiler; else export LINUMPY_NATIVE=off; fi
fi
echo "installing linumpy${list:+ with $list} into $venv …"
if ! install_by_uv && ! install_by_pip --editable "$wanted"; then
    fail "linumpy was not installed: pip's message above has the reason."
fi
if LINUMPY_CORE=1 "$venv/bin/python" -c 'import sys; from linumpy.core import native; sys.exit(bool(native.why_no_core()))'
then
    rm -f -- "$no_core"
else
    echo "${compiler:-}" >"$no_core"
    [[ ${LINUMPY_NATIVE:-} == off && -z ${compiler-unset} ]] &&
        echo "note: no compiler for C++20, and zig could not be installed: zarr-python reads, slowly" >&2
    [[ -z ${compiler:-} ]] ||
        echo "note: the native core was not built by $compiler: zarr-python reads, slowly ('pip install -v .' says why)" >&2
fi
for one in base ${part//,/ }; do touch "$venv/.has-$one"; done
