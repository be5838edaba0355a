#!/usr/bin/env bash
# Print the Module.symvers lines for the nvidia_p2p_* exports of a built nvidia module.
set -euo pipefail

# The folder of this script, also if it runs through a symlink, and independent of CDPATH.
HERE=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source=lib.sh
source "$HERE/lib.sh"

usage() {
    cat <<'TEXT'
Usage: nvfs_symvers.sh [--json] KO...

Prints Module.symvers lines for the nvidia_p2p_* exports of each KO, an nvidia.ko
as it is or packed as .xz, .zst or .gz. nvidia-fs needs them to be built against a
driver whose own Module.symvers is gone. It asks nothing, and leaves no file.

  nvfs_symvers.sh /lib/modules/$(uname -r)/updates/dkms/nvidia.ko.zst > nv.symvers

Options:
  --json      the same as one JSON object
  -h, --help  this text

A checksum is either the value of its __crc_ symbol (absolute), or the four bytes
that the symbol points at in __kcrctab* (relative, 'R' or 'r' in nm). Whatever else
the symbol is, a line would hold an offset instead of a checksum, and the module
would not load; then nothing is printed at all.

Needs readelf (binutils), and xz, zstd or gzip for a packed module.

Exit: 0 printed, 2 wrong usage, 4 refused: no checksum can be told for certain.
TEXT
}

refuse() {
    die 4 "'$KO': $*; nothing was printed"
}

# ---------------------------------------------------------------- unpacking

# A program that the reading needs. $1 is its name, $2 its package.
need() {
    command -v "$1" >/dev/null || refuse "this needs '$1', which is not here; install the package $2"
}

cannot_unpack() {
    refuse "$1 cannot unpack it; is the file complete, and is there room in '${TMPDIR:-/tmp}'?"
}

# Sets ELF to a plain ELF file of KO. The content tells the packing, not the name.
unpack() {
    local magic
    magic=$(od -An -v -N6 -tx1 -- "$KO" | tr -d ' \n')
    ELF=$WORK/module.ko
    case $magic in
        7f454c46*) ELF=$KO ;;
        fd377a585a00)
            need xz xz-utils
            xz -dc -- "$KO" >"$ELF" 2>/dev/null </dev/null || cannot_unpack xz
            ;;
        28b52ffd*)
            need zstd zstd
            zstd -dcq -- "$KO" >"$ELF" 2>/dev/null </dev/null || cannot_unpack zstd
            ;;
        1f8b*)
            need gzip gzip
            gzip -dc <"$KO" >"$ELF" 2>/dev/null || cannot_unpack gzip
            ;;
        '') refuse "it is empty" ;;
        *) refuse "it is neither a kernel module nor one packed with xz, zstd or gzip" ;;
    esac
    [[ $(od -An -v -N4 -tx1 -- "$ELF" | tr -d ' \n') == 7f454c46 ]] || refuse "it holds no ELF file"
}

# ---------------------------------------------------------------- ELF

# Sections by number: S_NAME, S_TYPE, S_OFF, S_SIZE, S_FLAGS, S_INFO; and BIG_ENDIAN, WORD (4 or 8).
read_sections() {
    local line header
    local re='^[[:space:]]*\[[[:space:]]*([0-9]+)\][[:space:]]+([^[:space:]]+)[[:space:]]+([A-Z0-9_]+)[[:space:]]+[0-9a-f]+[[:space:]]+([0-9a-f]+)[[:space:]]+([0-9a-f]+)[[:space:]]+[0-9a-f]+[[:space:]]+([A-Za-z]*)[[:space:]]+[0-9]+[[:space:]]+([0-9]+)[[:space:]]'
    S_NAME=() S_TYPE=() S_OFF=() S_SIZE=() S_FLAGS=() S_INFO=()
    RELOCATED=() RELOCATIONS_READ=()
    header=$(readelf -hW -- "$ELF" 2>/dev/null) || refuse "readelf cannot read it"
    # Only in a relocatable file is a symbol's value its place in the section.
    [[ $header =~ Type:[[:space:]]+REL ]] || refuse "it is no relocatable object, so no kernel module"
    BIG_ENDIAN=0 WORD=8
    [[ ! $header =~ 'big endian' ]] || BIG_ENDIAN=1
    [[ ! $header =~ Class:[[:space:]]+ELF32 ]] || WORD=4
    while IFS= read -r line; do
        [[ $line =~ $re ]] || continue
        local n=$((10#${BASH_REMATCH[1]}))
        S_NAME[n]=${BASH_REMATCH[2]} S_TYPE[n]=${BASH_REMATCH[3]}
        S_OFF[n]=$((16#${BASH_REMATCH[4]})) S_SIZE[n]=$((16#${BASH_REMATCH[5]}))
        S_FLAGS[n]=${BASH_REMATCH[6]} S_INFO[n]=$((10#${BASH_REMATCH[7]}))
    done < <(readelf -SW -- "$ELF" 2>/dev/null)
    ((${#S_NAME[@]})) || refuse "it has no sections that readelf can name"
}

# Bytes OFFSET COUNT of the file as numbers, in REPLY.
bytes_at() {
    REPLY=$(od -An -v -j "$1" -N "$2" -tu1 -- "$ELF" 2>/dev/null | tr '\n' ' ') || REPLY=
}

# Four bytes as 0xXXXXXXXX in REPLY, in the byte order of the file.
word_at() {
    local -a b
    bytes_at "$1" 4
    read -r -a b <<<"$REPLY"
    ((${#b[@]} == 4)) || refuse "a checksum lies beyond the end of the file"
    if ((BIG_ENDIAN)); then
        printf -v REPLY '0x%02x%02x%02x%02x' "${b[0]}" "${b[1]}" "${b[2]}" "${b[3]}"
    else
        printf -v REPLY '0x%02x%02x%02x%02x' "${b[3]}" "${b[2]}" "${b[1]}" "${b[0]}"
    fi
}

# The places in a section that a relocation completes, as RELOCATED[SECTION:PLACE]. Read once
# for each section: that of .rodata may have a hundred thousand entries.
declare -A RELOCATED=() RELOCATIONS_READ=()
read_relocations() {
    local section=$1 n width order=little place
    [[ -z ${RELOCATIONS_READ[$section]:-} ]] || return 0
    RELOCATIONS_READ[$section]=1
    ((!BIG_ENDIAN)) || order=big
    for n in "${!S_NAME[@]}"; do
        case ${S_TYPE[n]} in
            RELA) width=$((3 * WORD)) ;;
            REL) width=$((2 * WORD)) ;;
            *) continue ;;
        esac
        ((S_INFO[n] == section)) || continue
        while read -r place _; do
            [[ $place =~ ^[0-9a-f]+$ ]] || refuse "its relocations of '${S_NAME[section]}' cannot be read"
            RELOCATED[$section:$((16#$place))]=1
        done < <(od -An -v --endian="$order" -w"$width" -tx"$WORD" -j "${S_OFF[n]}" -N "${S_SIZE[n]}" -- "$ELF" 2>/dev/null || printf 'failed\n')
    done
}

# Does a relocation touch bytes VALUE..VALUE+3 of a section? Then they hold a part of an
# address, which the loader would complete, and no checksum.
is_relocated() {
    local section=$1 value=$2 place
    read_relocations "$section"
    for ((place = value - 7; place < value + 4; place++)); do
        [[ -z ${RELOCATED[$section:$place]:-} ]] || return 0
    done
    return 1
}

# ---------------------------------------------------------------- checksums

# One checksum: SYMBOL VALUE SECTION; sets CRC and FORM.
checksum() {
    local symbol=$1 value=$((16#$2)) section=$3 bind=$4
    case $section in
        ABS)
            ((value >= 0 && value <= 0xffffffff)) || refuse "__crc_$symbol is an absolute value of more than 32 bits"
            printf -v CRC '0x%08x' "$value"
            FORM=absolute
            return 0
            ;;
        UND) refuse "__crc_$symbol is not defined in it" ;;
        COM) refuse "__crc_$symbol is a common symbol, which holds no checksum" ;;
    esac
    [[ $section =~ ^[0-9]+$ && -n ${S_NAME[section]:-} ]] || refuse "__crc_$symbol lies in the unknown section '$section'"
    local name=${S_NAME[section]}
    # genksyms -R of Linux 4.10 to 5.18 put the checksums into .rodata, as read-only words.
    case $name in
        __kcrctab* | ___kcrctab* | .rodata | .rodata.*) ;;
        *) refuse "__crc_$symbol points into '$name' and not into __kcrctab, so it may be an offset" ;;
    esac
    [[ ${S_TYPE[section]} == PROGBITS && ${S_FLAGS[section]} == *A* && ${S_FLAGS[section]} != *[WX]* ]] ||
        refuse "__crc_$symbol points into '$name', which holds no constants"
    ((value % 4 == 0 && value + 4 <= S_SIZE[section])) || refuse "__crc_$symbol points outside of the words of '$name'"
    ! is_relocated "$section" "$value" || refuse "__crc_$symbol points at an address in '$name', and not at a checksum"
    word_at $((S_OFF[section] + value))
    CRC=$REPLY
    FORM=relative-$bind
}

# All exports of KO. Symbols: number value size type bind visibility section name.
read_exports() {
    local line number value bind section name symbol module count=0 seen=' ' export_kind n
    local -A ksymtab=()
    local -a crcs=()
    while read -r number value _ _ bind _ section name _; do
        [[ $number =~ ^[0-9]+:$ ]] || continue
        case $name in
            __crc_nvidia_p2p_*) crcs+=("${name#__crc_} $value $section $bind") ;;
            __ksymtab_nvidia_p2p_*) ksymtab[${name#__ksymtab_}]=$section ;;
        esac
    done < <(readelf -sW -- "$ELF" 2>/dev/null)
    module=${KO##*/}
    module=${module%%.ko*}
    for line in ${crcs[@]+"${crcs[@]}"}; do
        read -r symbol value section bind <<<"$line"
        # A module has one checksum for a name; two that differ would be a guess.
        [[ $seen != *" $symbol "* ]] || refuse "it has two symbols __crc_$symbol"
        seen+="$symbol "
        checksum "$symbol" "$value" "$section" "${bind,,}"
        export_kind=EXPORT_SYMBOL
        for n in "${ksymtab[$symbol]:-}" "$section"; do
            if [[ $n =~ ^[0-9]+$ && ${S_NAME[n]:-} == *_gpl* ]]; then export_kind=EXPORT_SYMBOL_GPL; fi
        done
        OUT_LINES+=("$CRC"$'\t'"$symbol"$'\t'"$module"$'\t'"$export_kind"$'\t')
        OUT_FORMS+=("$FORM")
        count=$((count + 1))
    done
    ((count)) || refuse "it has no __crc_nvidia_p2p_ symbol: not the nvidia module, or built without CONFIG_MODVERSIONS"
}

print_json() {
    local i crc symbol module kind rows='' q_module
    for i in "${!OUT_LINES[@]}"; do
        IFS=$'\t' read -r crc symbol module kind _ <<<"${OUT_LINES[i]}"
        json_str "$module" && q_module=$REPLY
        rows+="${rows:+, }{\"crc\": \"$crc\", \"symbol\": \"$symbol\", \"module\": $q_module, \"export\": \"$kind\", \"form\": \"${OUT_FORMS[i]}\"}"
    done
    printf '{"tool": "nvfs_symvers", "exit_code": 0, "symbols": [%s]}\n' "$rows"
}

main() {
    local json=0
    local -a kos=()
    while (($#)); do
        case $1 in
            -h | --help)
                usage
                exit 0
                ;;
            --json) json=1 ;;
            --)
                shift
                kos+=("$@")
                break
                ;;
            -*) usage_error "unknown option '$1'" ;;
            *) kos+=("$1") ;;
        esac
        shift
    done
    ((${#kos[@]})) || usage_error "no module given; give the path of nvidia.ko, .ko.xz, .ko.zst or .ko.gz"
    for KO in "${kos[@]}"; do
        [[ -e $KO ]] || usage_error "there is no file '$KO'; 'modinfo -n nvidia' prints where the module is"
        [[ -f $KO && -r $KO ]] || usage_error "'$KO' is no file that can be read; give a module file"
    done
    # Absolute names, so that no tool takes one for an option.
    WORK=
    trap '[[ -z $WORK ]] || rm -rf -- "$WORK"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    WORK=$(mktemp -d 2>/dev/null) || die 4 "no temporary folder can be made in '${TMPDIR:-/tmp}'; set TMPDIR to one with room"
    OUT_LINES=() OUT_FORMS=()
    for KO in "${kos[@]}"; do
        [[ $KO == /* ]] || KO=$PWD/$KO
        need readelf binutils
        unpack
        read_sections
        read_exports
    done
    if ((json)); then print_json; else printf '%s\n' "${OUT_LINES[@]}"; fi
}

main "$@"
