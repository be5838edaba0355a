# shellcheck shell=bash
# Functions that the scripts of this folder share: they read the state of a machine, and format it.
#
# This file is sourced, never run. It only reads; nothing here writes outside a
# script's own temporary files. Functions that return text put it in REPLY, so
# that a script of several hundred look-ups does not start several hundred
# subshells.
#
# shellcheck disable=SC2034 # what is set here is read by the scripts

# Byte semantics everywhere: a path is bytes, and the text of /proc is ASCII.
export LC_ALL=C

# What an admin exports for the own shell (SHELLOPTS, BASHOPTS) changes nothing here.
set +o noclobber +o noglob +o posix
shopt -u failglob nullglob nocasematch nocaseglob dotglob

# Every look at /proc, /sys, /etc, /run, /boot, /dev, /lib and /usr goes through
# this prefix. Empty means the machine itself.
ROOT=${GDS_SYSROOT:-}
while [[ $ROOT == */ ]]; do ROOT=${ROOT%/}; done
[[ -z $ROOT || $ROOT == /* ]] || ROOT=$PWD/$ROOT

PROG=${0##*/}

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
    printf '%s: bash %s is too old; this needs bash 4.4 or later\n' "$PROG" "$BASH_VERSION" >&2
    exit 2
fi

# ---------------------------------------------------------------- messages

# One clear line, then leave. $1 is the exit code.
die() {
    local code=$1
    shift
    printf '%s: %s\n' "$PROG" "$*" >&2
    exit "$code"
}

usage_error() {
    die 2 "$* (try '$PROG --help')"
}

require_sysroot() {
    [[ -z $ROOT || -d $ROOT ]] ||
        usage_error "GDS_SYSROOT is '$ROOT', which is not a folder; unset it, or point it at a tree that holds proc/, sys/ and etc/"
}

# need_value OPTION COUNT: an option that takes a value has one.
need_value() {
    (($2 >= 2)) || usage_error "$1 needs a value"
}

# ---------------------------------------------------------------- small readers

# First line of a file, without a carriage return. Fails when it cannot be read.
first_line() {
    REPLY=
    [[ -f $1 && -r $1 ]] || return 1
    IFS= read -r REPLY <"$1" 2>/dev/null || [[ -n $REPLY ]] || return 1
    REPLY=${REPLY%$'\r'}
}

# Whole file, without carriage returns. Fails when it cannot be read.
slurp() {
    REPLY=
    [[ -f $1 && -r $1 ]] || return 1
    REPLY=$(tr -d '\000\r' <"$1" 2>/dev/null) || return 1
}

# version_ge A B: dotted numbers, missing parts are 0; text after a number is dropped.
version_ge() {
    local -a a b
    local i x y
    IFS=. read -r -a a <<<"$1"
    IFS=. read -r -a b <<<"$2"
    for ((i = 0; i < 4; i++)); do
        x=${a[i]:-0} y=${b[i]:-0}
        x=${x%%[!0-9]*} y=${y%%[!0-9]*}
        x=$((10#${x:-0})) y=$((10#${y:-0}))
        ((x > y)) && return 0
        ((x < y)) && return 1
    done
    return 0
}

# Running kernel, e.g. 6.17.0-14-generic. Empty when it cannot be read.
kernel_release() {
    first_line "$ROOT/proc/sys/kernel/osrelease" || REPLY=
}

# x86_64, aarch64, ... or empty.
machine_arch() {
    first_line "$ROOT/proc/sys/kernel/arch" && return 0
    REPLY=
    slurp "$ROOT/proc/driver/nvidia/version" || return 0
    case $REPLY in
        *x86_64*) REPLY=x86_64 ;;
        *aarch64*) REPLY=aarch64 ;;
        *) REPLY= ;;
    esac
}

is_wsl() {
    kernel_release
    [[ ${REPLY,,} == *microsoft* || ${REPLY,,} == *wsl2* ]] && return 0
    first_line "$ROOT/proc/version" || return 1
    [[ ${REPLY,,} == *microsoft* ]]
}

# Where are we: sets CONTAINER to a word, or to nothing on a plain machine.
find_container() {
    CONTAINER=
    if [[ -e $ROOT/.dockerenv ]]; then
        CONTAINER=docker
    elif [[ -e $ROOT/run/.containerenv ]]; then
        CONTAINER=podman
    elif first_line "$ROOT/run/systemd/container"; then
        CONTAINER=$REPLY
    fi
}

# ---------------------------------------------------------------- JSON out

# Text as a JSON string in REPLY. Bytes that are not UTF-8 become \udcXX, which is
# what Python's surrogateescape makes of such a file name, so the name survives.
json_str() {
    local s=$1
    if [[ $s != *[!\ -~]* && $s != *[\"\\]* ]]; then
        REPLY="\"$s\""
        return 0
    fi
    local -a b
    local i=0 n c out='' len code
    mapfile -t b < <(printf '%s' "$s" | od -An -v -w1 -tu1)
    n=${#b[@]}
    while ((i < n)); do
        c=$((b[i]))
        if ((c < 128)); then
            case $c in
                34) out+='\"' ;;
                92) out+="\\\\" ;;
                10) out+='\n' ;;
                13) out+='\r' ;;
                9) out+='\t' ;;
                *)
                    if ((c < 32 || c == 127)); then
                        printf -v code '\\u%04x' "$c"
                        out+=$code
                    else
                        out+=${s:i:1}
                    fi
                    ;;
            esac
            i=$((i + 1))
            continue
        fi
        utf8_length "$c" "${b[i + 1]:-0}" "${b[i + 2]:-0}" "${b[i + 3]:-0}"
        len=$REPLY
        if ((len > 0)); then
            out+=${s:i:len}
            i=$((i + len))
        else
            printf -v code '\\udc%02x' "$c"
            out+=$code
            i=$((i + 1))
        fi
    done
    REPLY="\"$out\""
}

# Length of the UTF-8 sequence that starts with these bytes, 0 when it is none.
utf8_length() {
    local c=$1 x=$2 y=$3 z=$4 low=128 high=191
    REPLY=0
    if ((c >= 194 && c <= 223)); then
        ((x >= 128 && x <= 191)) && REPLY=2
    elif ((c >= 224 && c <= 239)); then
        ((c == 224)) && low=160
        ((c == 237)) && high=159
        ((x >= low && x <= high && y >= 128 && y <= 191)) && REPLY=3
    elif ((c >= 240 && c <= 244)); then
        ((c == 240)) && low=144
        ((c == 244)) && high=143
        ((x >= low && x <= high && y >= 128 && y <= 191 && z >= 128 && z <= 191)) && REPLY=4
    fi
    return 0
}

# json_list ITEM...: a JSON array of strings in REPLY.
json_list() {
    local out='' item
    for item in "$@"; do
        json_str "$item"
        out+="${out:+, }$REPLY"
    done
    REPLY="[$out]"
}

# json_object KEY VALUE ...: values are taken as they are, so quote text with json_str.
json_object() {
    local out=''
    while (($#)); do
        json_str "$1"
        out+="${out:+, }$REPLY: $2"
        shift 2
    done
    REPLY="{$out}"
}

# ---------------------------------------------------------------- JSON in (cufile.json)

# Flattens a JSON file with // and /* */ comments into the associative array CFG:
# CFG[properties.use_pci_p2pdma]=true, and CFG_STRING[...] where the value is a string.
# A dot inside a key is written \056, so that it cannot pass for a level. Fails and sets CFG_ERROR when it is no JSON.
# Written in bash because cuFile's configuration has comments, which JSON tools
# refuse, and because a bare server need not have a JSON tool at all.
declare -A CFG=() CFG_STRING=()
CFG_ERROR=
read_cufile_json() {
    local file=$1 line rest number=0 in_comment=0
    CFG=() CFG_STRING=() CFG_ERROR=
    J_TYPES=() J_KEYS=() J_WANT=value
    local string_re='^"(([^"\\]|\\.)*)"' literal_re='^(true|false|null|-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?)'
    [[ -f $file && -r $file ]] || {
        CFG_ERROR="cannot be read"
        return 1
    }
    while IFS= read -r line || [[ -n $line ]]; do
        number=$((number + 1))
        ((number == 1)) && line=${line#$'\xef\xbb\xbf'}
        rest=${line%$'\r'}
        while :; do
            if ((in_comment)); then
                [[ $rest == *'*/'* ]] || break
                rest=${rest#*'*/'}
                in_comment=0
            fi
            rest=${rest#"${rest%%[![:space:]]*}"}
            [[ -n $rest && $rest != //* ]] || break
            if [[ $rest == '/*'* ]]; then
                rest=${rest:2}
                in_comment=1
            elif [[ $rest =~ $string_re ]]; then
                rest=${rest:${#BASH_REMATCH[0]}}
                json_token string "${BASH_REMATCH[1]}" || break 2
            elif [[ $rest =~ $literal_re ]]; then
                rest=${rest:${#BASH_REMATCH[0]}}
                json_token literal "${BASH_REMATCH[1]}" || break 2
            elif [[ $rest == [][{},:]* ]]; then
                line=${rest:0:1}
                rest=${rest:1}
                json_token mark "$line" || break 2
            else
                J_WANT=error
                break 2
            fi
        done
    done <"$file"
    [[ $J_WANT == 'done' ]] && return 0
    CFG_ERROR="no valid JSON at line $number"
    return 1
}

# One token of the grammar. J_TYPES is the stack of open containers, J_KEYS the key
# (or index) in each, J_WANT what may come next.
json_token() {
    local kind=$1 text=$2 top=$((${#J_TYPES[@]} - 1))
    case $J_WANT:$kind:$text in
        value:mark:'{' | value_or_end:mark:'{')
            J_TYPES+=(o) J_KEYS+=('')
            J_WANT=key_or_end
            ;;
        value:mark:'[' | value_or_end:mark:'[')
            J_TYPES+=(a) J_KEYS+=(0)
            J_WANT=value_or_end
            ;;
        value:string:* | value:literal:* | value_or_end:string:* | value_or_end:literal:*)
            json_store "$kind" "$text"
            json_closed
            ;;
        key_or_end:string:* | key:string:*)
            J_KEYS[top]=${text//./\\056}
            J_WANT='colon'
            ;;
        colon:mark::) J_WANT=value ;;
        comma_or_end:mark:,)
            if [[ ${J_TYPES[top]} == o ]]; then
                J_WANT=key
            else
                J_KEYS[top]=$((J_KEYS[top] + 1))
                J_WANT=value
            fi
            ;;
        key_or_end:mark:'}' | comma_or_end:mark:'}')
            [[ ${J_TYPES[top]} == o ]] || {
                J_WANT=error
                return 1
            }
            json_pop
            ;;
        value_or_end:mark:']' | comma_or_end:mark:']')
            [[ ${J_TYPES[top]} == a ]] || {
                J_WANT=error
                return 1
            }
            json_pop
            ;;
        *)
            J_WANT=error
            return 1
            ;;
    esac
}

json_store() {
    local IFS=. key
    key=${J_KEYS[*]:-.}
    CFG[$key]=$2
    # A key may be written twice; the last one counts.
    CFG_STRING[$key]=
    [[ $1 != string ]] || CFG_STRING[$key]=1
}

json_pop() {
    local top=$((${#J_TYPES[@]} - 1))
    unset "J_TYPES[top]" "J_KEYS[top]"
    json_closed
}

json_closed() {
    if ((${#J_TYPES[@]})); then J_WANT=comma_or_end; else J_WANT='done'; fi
}

# ---------------------------------------------------------------- DIR and its mount

# Finds the folder that the user named. Sets DIR_REAL (where this process can reach
# it) and DIR_PATH (its name on the machine that is examined). With GDS_SYSROOT set,
# a folder below it is taken first.
locate_dir() {
    local dir=$1
    [[ -n $dir ]] || usage_error "the folder is empty; give the folder whose data the GPU should read"
    if [[ -n $ROOT && $dir == /* && -d $ROOT$dir ]]; then
        DIR_REAL=$ROOT$dir
    elif [[ -d $dir ]]; then
        DIR_REAL=$dir
    elif [[ -e $dir ]]; then
        usage_error "'$dir' is not a folder; give the folder that holds the data"
    else
        usage_error "there is no folder '$dir'; give one that exists"
    fi
    # A trailing newline in the name would be lost by $(...), hence the dot.
    DIR_REAL=$(realpath -e -z -- "$DIR_REAL" 2>/dev/null | tr -d '\000' && printf .) ||
        usage_error "'$dir' cannot be reached; check the permissions of the folders above it"
    DIR_REAL=${DIR_REAL%.}
    DIR_PATH=$DIR_REAL
    REAL_ROOT=
    if [[ -n $ROOT ]]; then
        REAL_ROOT=$(realpath -e -- "$ROOT")
        if [[ $DIR_REAL == "$REAL_ROOT"/* ]]; then
            DIR_PATH=${DIR_REAL#"$REAL_ROOT"}
        fi
    fi
}

# /proc/self/mountinfo into the M_* arrays. Fails when it cannot be read or is empty.
load_mounts() {
    M_ID=() M_PARENT=() M_DEV=() M_ROOT=() M_POINT=() M_OPT=() M_FS=() M_SRC=() M_SUPER=()
    local file=$ROOT/proc/self/mountinfo line dash i
    local -a f
    [[ -f $file && -r $file ]] || return 1
    while IFS= read -r line || [[ -n $line ]]; do
        line=${line%$'\r'}
        IFS=' ' read -r -a f <<<"$line"
        dash=0
        for ((i = 6; i < ${#f[@]}; i++)); do
            [[ ${f[i]} == - ]] && dash=$i && break
        done
        ((dash > 0 && ${#f[@]} >= dash + 3)) || continue
        M_ID+=("${f[0]}") M_PARENT+=("${f[1]}") M_DEV+=("${f[2]}")
        unescape "${f[3]}" && M_ROOT+=("$REPLY")
        unescape "${f[4]}" && M_POINT+=("$REPLY")
        M_OPT+=("${f[5]}") M_FS+=("${f[dash + 1]}")
        unescape "${f[dash + 2]}" && M_SRC+=("$REPLY")
        M_SUPER+=("${f[dash + 3]:-}")
    done <"$file"
    ((${#M_ID[@]} > 0))
}

# The kernel writes space, tab, newline and backslash in mountinfo as \040 and so on.
# Each is three octal digits, whatever follows: in '/my\0401disk' the 1 belongs to the name.
unescape() {
    local rest=$1 out='' char
    while [[ $rest =~ ^([^\\]*)\\([0-3][0-7][0-7])(.*)$ ]]; do
        printf -v char '%b' "\\0${BASH_REMATCH[2]}"
        out+=${BASH_REMATCH[1]}$char
        rest=${BASH_REMATCH[3]}
    done
    REPLY=$out$rest
}

covers() {
    [[ $1 == / || $2 == "$1" || $2 == "${1%/}"/* ]]
}

# Index in M_* of the mount that holds the path, in MOUNT; fails when there is none.
# Follows the tree as the kernel walks a path, so that a mount that a later one hides
# is not taken. Where the tree is cut (a chroot), the longest mount point wins.
find_mount() {
    local path=$1 i best=-1 current=-1 next
    MOUNT=-1
    for i in "${!M_ID[@]}"; do
        covers "${M_POINT[i]}" "$path" || continue
        if ((best < 0)) || ((${#M_POINT[i]} >= ${#M_POINT[best]})); then best=$i; fi
        if [[ ${M_POINT[i]} == / ]] && ! is_mount_id "${M_PARENT[i]}" "$i"; then current=$i; fi
    done
    ((best >= 0)) || return 1
    MOUNT=$best
    ((current >= 0)) || return 0
    reaches "$best" "$current" || return 0
    while :; do
        next=-1
        for i in "${!M_ID[@]}"; do
            [[ ${M_PARENT[i]} == "${M_ID[current]}" && $i != "$current" ]] || continue
            covers "${M_POINT[i]}" "$path" || continue
            if ((next < 0)) || ((${#M_POINT[i]} < ${#M_POINT[next]})); then next=$i; fi
        done
        ((next >= 0)) || break
        current=$next
    done
    MOUNT=$current
}

is_mount_id() {
    local id=$1 self=$2 i
    for i in "${!M_ID[@]}"; do
        [[ ${M_ID[i]} == "$id" && $i != "$self" ]] && return 0
    done
    return 1
}

# reaches A B: B is A or an ancestor of A.
reaches() {
    local i=$1 goal=$2 j steps=0 parent
    while ((i != goal)); do
        steps=$((steps + 1))
        ((steps < 128)) || return 1
        parent=-1
        for j in "${!M_ID[@]}"; do
            [[ ${M_ID[j]} == "${M_PARENT[i]}" && $j != "$i" ]] && parent=$j
        done
        ((parent >= 0)) || return 1
        i=$parent
    done
}

# option_value LIST NAME: value of NAME=value in a comma list, in REPLY.
option_value() {
    local item
    local -a items
    REPLY=
    IFS=, read -r -a items <<<"$1"
    for item in "${items[@]}"; do
        if [[ $item == "$2="* ]]; then
            REPLY=${item#*=}
            return 0
        fi
    done
    return 1
}

# ---------------------------------------------------------------- block layers

# Sets DIR_FS, DIR_POINT, DIR_SOURCE, DIR_OPTIONS, DIR_SUBROOT, DIR_DEV and, for a
# block file system, the layers below it (see walk_block). Fails, with
# STORAGE_ERROR set, when the mount or the device cannot be told.
resolve_storage() {
    STORAGE_ERROR='' DIR_FS='' DIR_POINT='' DIR_SOURCE='' DIR_OPTIONS='' DIR_SUBROOT='' DIR_DEV=''
    LAYERS=() LEAVES=() TRANSPORTS=() BLOCK=''
    HAS_MD='' HAS_CRYPT='' HAS_DM='' HAS_MPATH='' HAS_OTHER='' HAS_INTEGRITY='' MULTI_PATHS=0
    if ! load_mounts; then
        STORAGE_ERROR="/proc/self/mountinfo cannot be read"
        return 1
    fi
    local found=0
    # A tree below GDS_SYSROOT may carry its mounts under their full names.
    if [[ -n $ROOT && $DIR_REAL != "$DIR_PATH" ]] && find_mount "$DIR_REAL" &&
        ((${#M_POINT[MOUNT]} > ${#REAL_ROOT})); then
        found=1
    elif find_mount "$DIR_PATH"; then
        found=1
    fi
    if ((!found)); then
        STORAGE_ERROR="no mount in /proc/self/mountinfo holds $DIR_PATH"
        return 1
    fi
    DIR_FS=${M_FS[MOUNT]} DIR_POINT=${M_POINT[MOUNT]} DIR_SOURCE=${M_SRC[MOUNT]}
    DIR_SUBROOT=${M_ROOT[MOUNT]} DIR_DEV=${M_DEV[MOUNT]}
    DIR_OPTIONS=${M_OPT[MOUNT]}
    [[ -z ${M_SUPER[MOUNT]} ]] || DIR_OPTIONS+=,${M_SUPER[MOUNT]}
    is_network_fs "$DIR_FS" && return 0
    block_name || {
        # Overlay, tmpfs and the like have no device, and need none to be judged.
        [[ $DIR_DEV == 0:* ]] && return 0
        STORAGE_ERROR="block device $DIR_DEV is not in /sys/dev/block"
        return 1
    }
    BLOCK=$REPLY
    walk_block "$BLOCK" 0
}

is_network_fs() {
    case $1 in
        nfs | nfs4 | lustre | beegfs | gpfs | wekafs | cifs | smb3 | ceph | 9p | virtiofs | fuse | fuse.*) return 0 ;;
        *) return 1 ;;
    esac
}

# Kernel name of the device under the mount, in REPLY.
block_name() {
    local link=$ROOT/sys/dev/block/$DIR_DEV d source
    if [[ $DIR_DEV != 0:* ]]; then
        if [[ -e $link ]]; then
            REPLY=$(basename -- "$(readlink -f -- "$link")")
            [[ -d $ROOT/sys/class/block/$REPLY ]] && return 0
        fi
        for d in "$ROOT"/sys/class/block/*; do
            first_line "$d/dev" && [[ $REPLY == "$DIR_DEV" ]] && REPLY=${d##*/} && return 0
        done
        return 1
    fi
    # btrfs mounts carry an anonymous device number; the source names a real device.
    [[ $DIR_SOURCE == /dev/* ]] || return 1
    source=${DIR_SOURCE##*/}
    if [[ -d $ROOT/sys/class/block/$source ]]; then
        REPLY=$source
        return 0
    fi
    for d in "$ROOT"/sys/class/block/dm-*; do
        first_line "$d/dm/name" && [[ $REPLY == "$source" ]] && REPLY=${d##*/} && return 0
    done
    return 1
}

# Goes down from one block device to the disks. Fills LAYERS with "kind name detail"
# and LEAVES with the disks, and sets the HAS_* flags.
walk_block() {
    local name=$1 depth=$2 dir=$ROOT/sys/class/block/$1 parent uuid level kind slave slaves=0
    ((depth < 24)) || return 0
    if [[ ! -d $dir ]]; then
        HAS_OTHER+="${HAS_OTHER:+ }$name"
        LAYERS+=("unknown $name not in /sys/class/block")
        return 0
    fi
    if [[ -f $dir/partition ]]; then
        parent_disk "$name"
        parent=$REPLY
        LAYERS+=("partition $name of $parent")
        walk_block "$parent" $((depth + 1))
        return 0
    fi
    if [[ -d $dir/dm ]]; then
        first_line "$dir/dm/uuid" || REPLY=
        uuid=$REPLY
        first_line "$dir/dm/name" || REPLY='?'
        case $uuid in
            CRYPT-*) kind=dm-crypt HAS_CRYPT+="${HAS_CRYPT:+ }$name" ;;
            LVM-*) kind=lvm HAS_DM+="${HAS_DM:+ }$name" ;;
            mpath-*) kind=dm-multipath HAS_MPATH+="${HAS_MPATH:+ }$name" ;;
            part*) kind=dm-partition HAS_DM+="${HAS_DM:+ }$name" ;;
            *) kind='device-mapper' HAS_DM+="${HAS_DM:+ }$name" ;;
        esac
        LAYERS+=("$kind $name $REPLY")
    elif [[ -d $dir/md ]]; then
        first_line "$dir/md/level" || REPLY='?'
        level=$REPLY
        HAS_MD+="${HAS_MD:+ }$level"
        LAYERS+=("md $name $level")
    else
        walk_disk "$name"
        return 0
    fi
    for slave in "$dir"/slaves/*; do
        [[ -e $slave || -L $slave ]] || continue
        slaves=$((slaves + 1))
        walk_block "${slave##*/}" $((depth + 1))
    done
    if ((slaves == 0)); then
        HAS_OTHER+="${HAS_OTHER:+ }$name"
        LAYERS+=("unknown $name has no slaves in sysfs")
    fi
}

parent_disk() {
    local dir
    dir=$(readlink -f -- "$ROOT/sys/class/block/$1")
    REPLY=$(basename -- "$(dirname -- "$dir")")
    [[ -d $ROOT/sys/class/block/$REPLY && $1 == "$REPLY"* ]] && return 0
    if [[ $1 =~ ^(.*[0-9])p[0-9]+$ ]]; then
        REPLY=${BASH_REMATCH[1]}
    else
        REPLY=${1%%[0-9]*}
    fi
}

# A whole disk: NVMe with its transport, or something else.
walk_disk() {
    local name=$1 dir=$ROOT/sys/class/block/$1 seen='' file count=0
    LEAVES+=("$name")
    if [[ ! $name =~ ^nvme([0-9]+)(c([0-9]+))?n[0-9]+$ ]]; then
        HAS_OTHER+="${HAS_OTHER:+ }$name"
        LAYERS+=("disk $name no NVMe disk")
        return 0
    fi
    local number=${BASH_REMATCH[3]:-${BASH_REMATCH[1]}}
    if first_line "$dir/integrity/format" && [[ $REPLY != none && $REPLY != nop && -n $REPLY ]]; then
        HAS_INTEGRITY+="${HAS_INTEGRITY:+ }$name:$REPLY"
    fi
    # The device of a plain namespace is its controller; that of a multipath head is
    # the subsystem, which links to every controller that reaches it.
    for file in "$dir/device/transport" "$dir"/device/nvme*/transport; do
        first_line "$file" || continue
        count=$((count + 1))
        [[ " $seen " == *" $REPLY "* ]] || seen+="${seen:+ }$REPLY"
    done
    if [[ -z $seen ]] && first_line "$ROOT/sys/class/nvme/nvme$number/transport"; then
        seen=$REPLY count=1
    fi
    ((count <= MULTI_PATHS)) || MULTI_PATHS=$count
    if [[ -z $seen ]]; then
        TRANSPORTS+=(unknown)
        LAYERS+=("nvme $name transport unknown")
        return 0
    fi
    # shellcheck disable=SC2206 # words: a transport has no spaces
    TRANSPORTS+=($seen)
    LAYERS+=("nvme $name $seen")
}

# One word for the whole stack in REPLY: pcie, tcp, rdma, fc, loop, mixed, none, unknown.
transport_word() {
    local t
    REPLY=none
    for t in "${TRANSPORTS[@]:-}"; do
        [[ -n $t ]] || continue
        if [[ $REPLY == none || $REPLY == "$t" ]]; then REPLY=$t; else REPLY=mixed; fi
    done
    return 0
}

# nvme_core.multipath in REPLY: N, Y, absent (kernel built without it) or empty (unknown).
nvme_multipath() {
    if first_line "$ROOT/sys/module/nvme_core/parameters/multipath"; then
        REPLY=${REPLY^^}
    elif [[ -d $ROOT/sys/module/nvme_core ]]; then
        REPLY=absent
    else
        REPLY=
    fi
}

layers_line() {
    local IFS=';'
    REPLY=${LAYERS[*]:-no block device}
    REPLY=${REPLY//;/; }
}

# ---------------------------------------------------------------- driver and GPUs

# Sets DRIVER_KIND (open, proprietary, none, unknown) and DRIVER_VERSION.
read_driver() {
    DRIVER_KIND=none DRIVER_VERSION=
    if ! slurp "$ROOT/proc/driver/nvidia/version"; then
        if [[ -e $ROOT/proc/driver/nvidia/version ]]; then DRIVER_KIND=unknown; fi
        if first_line "$ROOT/sys/module/nvidia/version"; then
            DRIVER_KIND=unknown DRIVER_VERSION=$REPLY
        fi
        return 0
    fi
    local text=${REPLY%%$'\n'*}
    DRIVER_KIND=unknown
    case $text in
        *'Open Kernel Module'*) DRIVER_KIND=open ;;
        *'Kernel Module'*) DRIVER_KIND=proprietary ;;
    esac
    if [[ $text =~ [[:space:]]([0-9]+\.[0-9]+(\.[0-9]+)?)([[:space:]]|$) ]]; then
        DRIVER_VERSION=${BASH_REMATCH[1]}
    fi
}

# Fills GPUS with the PCI addresses of the NVIDIA GPUs, in bus order.
list_gpus() {
    GPUS=()
    local d class
    for d in "$ROOT"/proc/driver/nvidia/gpus/*; do
        [[ -d $d ]] && GPUS+=("${d##*/}")
    done
    ((${#GPUS[@]} == 0)) || return 0
    for d in "$ROOT"/sys/bus/pci/devices/*; do
        first_line "$d/vendor" || continue
        [[ $REPLY == 0x10de ]] || continue
        first_line "$d/class" || continue
        class=$REPLY
        [[ $class == 0x0300* || $class == 0x0302* ]] && GPUS+=("${d##*/}")
    done
    return 0
}

# Marketing name of a GPU in REPLY, or nothing.
gpu_model() {
    local line file=$ROOT/proc/driver/nvidia/gpus/$1/information
    REPLY=
    [[ -f $file && -r $file ]] || return 1
    while IFS= read -r line || [[ -n $line ]]; do
        if [[ $line == Model:* ]]; then
            line=${line#Model:}
            line=${line%$'\r'}
            line=${line#"${line%%[![:space:]]*}"}
            REPLY=${line%"${line##*[![:space:]]}"}
            return 0
        fi
    done <"$file"
    return 1
}

# Picks the GPUs to judge: $1 is empty (all), an index in bus order, or a PCI address.
select_gpus() {
    local want=${1,,} gpu
    list_gpus
    [[ -n $want ]] || return 0
    if [[ $want =~ ^[0-9]{1,3}$ ]]; then
        want=$((10#$want))
        ((want < ${#GPUS[@]})) ||
            usage_error "--gpu $1: this machine shows ${#GPUS[@]} NVIDIA GPU(s), counted from 0"
        GPUS=("${GPUS[want]}")
        return 0
    fi
    [[ $want =~ ^(([0-9a-f]{4}|[0-9a-f]{8}):)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$ ]] ||
        usage_error "--gpu '$1' is neither an index nor a PCI address such as 0000:65:00.0"
    # nvidia-smi writes the domain with eight digits, the kernel with four.
    [[ $want =~ ^[0-9a-f]{4}([0-9a-f]{4}:.*)$ ]] && want=${BASH_REMATCH[1]}
    [[ $want =~ ^[0-9a-f]{2}: ]] && want=0000:$want
    for gpu in "${GPUS[@]:-}"; do
        if [[ ${gpu,,} == "$want" ]]; then
            GPUS=("$gpu")
            return 0
        fi
    done
    usage_error "--gpu $1: there is no NVIDIA GPU at $want; found: ${GPUS[*]:-none}"
}

# State of the IOMMU for one GPU in REPLY: off, passthrough, translated or unknown.
iommu_state() {
    local gpu=$1 d groups=0 cmdline=''
    first_line "$ROOT/proc/cmdline" && cmdline=" $REPLY "
    if first_line "$ROOT/sys/bus/pci/devices/$gpu/iommu_group/type"; then
        case $REPLY in
            identity) REPLY=passthrough ;;
            *) REPLY=translated ;;
        esac
        return 0
    fi
    for d in "$ROOT"/sys/class/iommu/*; do
        [[ -e $d || -L $d ]] && groups=1
    done
    if ((groups)); then
        if [[ $cmdline == *' iommu=pt '* || $cmdline == *' iommu.passthrough=1 '* ]]; then
            REPLY=passthrough
        else
            REPLY=translated
        fi
    elif [[ -d $ROOT/sys/class/iommu || $cmdline == *' iommu=off '* || $cmdline == *' intel_iommu=off '* ||
        $cmdline == *' amd_iommu=off '* ]]; then
        REPLY=off
    else
        REPLY=unknown
    fi
}

# CONFIG_PCI_P2PDMA of the running kernel in REPLY: y, n or unknown; KCONFIG_SOURCE says where.
kernel_p2pdma() {
    local release=$1 file text
    KCONFIG_SOURCE=
    for file in "/boot/config-$release" "/lib/modules/$release/build/.config" "/lib/modules/$release/config"; do
        [[ -f $ROOT$file && -r $ROOT$file ]] || continue
        KCONFIG_SOURCE=$file
        if grep -q '^CONFIG_PCI_P2PDMA=y' "$ROOT$file"; then REPLY=y; else REPLY=n; fi
        return 0
    done
    if [[ -f $ROOT/proc/config.gz && -r $ROOT/proc/config.gz ]] && command -v gzip >/dev/null; then
        if text=$(gzip -dc <"$ROOT/proc/config.gz" 2>/dev/null); then
            KCONFIG_SOURCE=/proc/config.gz
            if grep -q '^CONFIG_PCI_P2PDMA=y' <<<"$text"; then REPLY=y; else REPLY=n; fi
            return 0
        fi
    fi
    if [[ -f $ROOT/proc/kallsyms && -r $ROOT/proc/kallsyms && -s $ROOT/proc/kallsyms ]]; then
        KCONFIG_SOURCE=/proc/kallsyms
        # The first is data, which a kernel without CONFIG_KALLSYMS_ALL does not list.
        if grep -qE '[[:space:]](p2pdma_pgmap_ops|pci_p2pdma_add_resource)([[:space:]]|$)' "$ROOT/proc/kallsyms"; then
            REPLY=y
        else
            REPLY=n
        fi
        return 0
    fi
    KCONFIG_SOURCE="/boot/config-$release, /proc/config.gz, /proc/kallsyms"
    REPLY=unknown
}

# Does the kernel's nvme driver offer the hook that nvidia-fs needs? y, n or unknown.
nvme_hook() {
    REPLY=unknown
    [[ -f $ROOT/proc/kallsyms && -r $ROOT/proc/kallsyms && -s $ROOT/proc/kallsyms ]] || return 0
    if grep -qE '[[:space:]]nvme_v[0-9]+_register_nvfs_dma_ops([[:space:]]|$)' "$ROOT/proc/kallsyms"; then
        REPLY=y
    else
        REPLY=n
    fi
}

# A path as one word of a shell command line, in REPLY.
shell_word() {
    if [[ $1 =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]]; then
        REPLY=$1
    else
        printf -v REPLY '%q' "$1"
    fi
}
