#!/usr/bin/env bash
# Patch the source of nvidia-fs 2.28.4 so that it builds on Linux 7.0, and still on 6.8 and
# 6.17. This script holds no code of nvidia-fs: it finds each place by a short anchor.
set -euo pipefail

# The folder of this script, also if it runs through a symlink, and independent of CDPATH.
HERE=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source=lib.sh
source "$HERE/lib.sh"

usage() {
    cat <<'TEXT'
Usage: nvfs_kernel7_patch.sh [--check | --apply | --revert] [OPTION]... --src DIR

Makes the source of nvidia-fs 2.28.4 in DIR build on Linux 7.0. nvidia-fs 2.29 and
later does so by itself and is left alone.

  --check     (default) say whether the source is mended; change nothing
  --apply     mend it: all four places, or none
  --revert    put the original files back, and leave no file behind

Options:
  --src DIR   the source: the folder of nvfs-vers.h, or the one above its src/
  --dry-run   with --apply or --revert: show what would change, change nothing
  --force     with --revert: put back files that were changed after --apply, too
  --json      say it as one JSON object
  -h, --help  this text

The four mends: nvfs-mmap.c reads vm_flags instead of the private member;
nvfs-dma.c takes the type of its iterator from struct blk_dma_iter; and
create_nv.symvers.sh unpacks nvidia.ko.zst without asking, and knows relative
CRCs by 'r' as by 'R'. The first original of a file is kept beside it as
FILE.before-kernel7 until --revert.

Exit: 0 done, already done or nothing to do; 2 wrong usage; 3 not applied;
4 unknown version or context, and nothing was changed.
TEXT
}

FILES=(nvfs-mmap.c nvfs-dma.c create_nv.symvers.sh)
KEPT=.before-kernel7
# Type of the iterator inside the block layer's own iterator: struct req_iterator up to
# Linux 6.17, struct blk_map_iter later. Neither name builds on both sides.
ITER_TYPE='__typeof__(((struct blk_dma_iter *)0)->iter)'
ITER_MACRO=HAVE_BLK_RQ_DMA_MAP_ITER_START
# The functions that use it, in the order of sort.
ITER_USERS='nvfs_advance_bvec nvfs_coalesce_gpu_pages nvfs_map_next_gpu_segment nvfs_peek_next_bvec'

# ---------------------------------------------------------------- arguments

ACTION='' SRC='' DRY=0 JSON=0 FORCE=0
parse_arguments() {
    while (($#)); do
        case $1 in
            -h | --help)
                usage
                exit 0
                ;;
            --check | --apply | --revert)
                [[ -z $ACTION || $ACTION == "${1#--}" ]] || usage_error "'--$ACTION' and '$1' cannot go together"
                ACTION=${1#--}
                ;;
            --dry-run) DRY=1 ;;
            --json) JSON=1 ;;
            --force) FORCE=1 ;;
            --src)
                need_value "$1" $#
                SRC=$2
                shift
                ;;
            --src=*) SRC=${1#--src=} ;;
            *) usage_error "unknown argument '$1'" ;;
        esac
        shift
    done
    ACTION=${ACTION:-check}
    [[ -n $SRC ]] || usage_error "no source given; add --src DIR, the folder that holds nvfs-vers.h"
    ((!FORCE)) || [[ $ACTION == revert ]] || usage_error "--force goes with --revert only"
    [[ -d $SRC ]] || usage_error "--src: there is no folder '$SRC'; give the source of nvidia-fs"
    # A name that starts with a dash is no option.
    [[ $SRC != -* ]] || SRC=./$SRC
    SRC=${SRC%/}
    if [[ ! -f ${SRC:-/}/nvfs-vers.h && -f $SRC/src/nvfs-vers.h ]]; then SRC=$SRC/src; fi
    [[ -f $SRC/nvfs-vers.h && -r $SRC/nvfs-vers.h ]] ||
        usage_error "--src: '$SRC' holds no readable nvfs-vers.h, so it is no source of nvidia-fs"
}

# ---------------------------------------------------------------- version

# From nvfs-vers.h, which the build uses; dkms.conf is known to lag behind.
read_version() {
    local line major='' minor='' patch=''
    while IFS= read -r line || [[ -n $line ]]; do
        [[ $line =~ ^[[:space:]]*#[[:space:]]*define[[:space:]]+NVFS_DRIVER_(MAJOR|MINOR|PATCH)_VERSION[[:space:]]+([0-9]+) ]] || continue
        case ${BASH_REMATCH[1]} in
            MAJOR) major=${BASH_REMATCH[2]} ;;
            MINOR) minor=${BASH_REMATCH[2]} ;;
            PATCH) patch=${BASH_REMATCH[2]} ;;
        esac
    done <"$SRC/nvfs-vers.h"
    [[ -n $major && -n $minor && -n $patch ]] || return 1
    VERSION=$((10#$major)).$((10#$minor)).$((10#$patch))
}

# ---------------------------------------------------------------- reading C

# The code of one line, without comments and the inside of strings, in CODE. IN_COMMENT
# carries a block comment from line to line.
IN_COMMENT=0
code_of() {
    # A character constant that is a quote opens no string.
    local rest=${1//\'\"\'/0}
    CODE=
    while [[ -n $rest ]]; do
        if ((IN_COMMENT)); then
            [[ $rest == *'*/'* ]] || return 0
            rest=${rest#*'*/'}
            IN_COMMENT=0
            CODE+=' '
            continue
        fi
        if [[ $rest != */[/\*]* && $rest != *\"* ]]; then
            CODE+=$rest
            return 0
        fi
        if [[ $rest =~ ^([^\"/]+)(.*)$ ]]; then
            CODE+=${BASH_REMATCH[1]}
            rest=${BASH_REMATCH[2]}
        elif [[ $rest == //* ]]; then
            return 0
        elif [[ $rest == '/*'* ]]; then
            rest=${rest:2}
            IN_COMMENT=1
        elif [[ $rest =~ ^\"([^\"\\]|\\.)*\"(.*)$ ]]; then
            CODE+='""'
            rest=${BASH_REMATCH[2]}
        else
            CODE+=${rest:0:1}
            rest=${rest:1}
        fi
    done
}

# ---------------------------------------------------------------- the mends
# mend_file FILE [PATH] looks at one file; where its text lies elsewhere, PATH says where.
# Each mend takes the lines of a file in LINES and leaves the mended ones in NEW. STATE is
# then mend, done or unknown, and DETAIL says it in words.

mend_file() {
    local file=$1 path=${2:-$SRC/$1}
    STATE=unknown DETAIL='' LINES=() NEW=()
    if [[ -L $path || ! -f $path || ! -r $path ]]; then
        DETAIL="no readable plain file"
        return 0
    fi
    mapfile LINES <"$path" 2>/dev/null
    # A file that does not survive the reading (NUL bytes) is none that we know.
    if ! printf '%s' ${LINES[@]+"${LINES[@]}"} | cmp -s - "$path"; then
        DETAIL="holds bytes that no source has"
        return 0
    fi
    case $file in
        nvfs-mmap.c) mend_mmap ;;
        nvfs-dma.c) mend_dma ;;
        create_nv.symvers.sh) mend_symvers ;;
    esac
}

# vm_area_struct lost its private member __vm_flags after 6.18; vm_flags can be read everywhere.
# The original reads it in one branch of an #if and vm_flags in the other, so that vm_flags
# alone says nothing: every assignment to the local vm_flags must be known.
mend_mmap() {
    local line rest before match name where reads=0 conditionals=0 unclear=''
    local -a branch=() assigned=()
    local private='(ACCESS_PRIVATE[[:space:]]*\([[:space:]]*([A-Za-z_][A-Za-z0-9_]*)[[:space:]]*,[[:space:]]*__vm_flags[[:space:]]*\)|([A-Za-z_][A-Za-z0-9_]*)->__vm_flags)'
    local public='[A-Za-z_][A-Za-z0-9_]*->vm_flags'
    local write='^[[:space:]]*(=[^=]|=$|[-+|&^*/%]=|<<=|>>=|\+\+|--)'
    IN_COMMENT=0
    for line in ${LINES[@]+"${LINES[@]}"}; do
        code_of "$line"
        if [[ $CODE =~ ^[[:space:]]*#[[:space:]]*(if|ifdef|ifndef|elif|else|endif)([^A-Za-z0-9_]|$) ]]; then
            which_branch "${BASH_REMATCH[1]}" || {
                DETAIL="has an #else or #endif too many"
                return 0
            }
        elif [[ $CODE =~ (^|[^A-Za-z0-9_.>])vm_flags[[:space:]]*=([^=].*|$) ]]; then
            where=${branch[*]: -1}
            assigned+=("${where:-always}")
            [[ ${BASH_REMATCH[2]} =~ ^[[:space:]]*($private|$public)[[:space:]]*\; ]] || unclear=1
        fi
        if [[ $CODE != *__vm_flags* ]]; then
            NEW+=("$line")
            continue
        fi
        rest=$line before=''
        while [[ $rest =~ $private ]]; do
            match=${BASH_REMATCH[1]} name=${BASH_REMATCH[2]}${BASH_REMATCH[3]}
            before+=${rest%%"$match"*}
            rest=${rest#*"$match"}
            if [[ $rest =~ $write || $before =~ (\&|\+\+|--)[[:space:]]*$ && ! $before =~ \&\&[[:space:]]*$ ]]; then
                DETAIL="writes __vm_flags, where a read was expected"
                return 0
            fi
            before+="$name->vm_flags"
            reads=$((reads + 1))
        done
        # What a comment at the end of the line says does not matter.
        match=${rest%%//*}
        if [[ ${match%%/\**} == *__vm_flags* ]]; then
            DETAIL="uses __vm_flags in an unknown way"
            return 0
        fi
        NEW+=("$before$rest")
    done
    # One assignment for every kernel, or one in each branch of the same #if.
    match=${assigned[*]:-none}
    if ((${#branch[@]})); then
        DETAIL="has an #if without #endif"
    elif [[ -n $unclear ]]; then
        DETAIL="sets vm_flags from neither __vm_flags nor vm_flags"
    elif [[ $match != always && ! $match =~ ^if([0-9]+)\ else([0-9]+)$ ]]; then
        DETAIL="sets vm_flags in ${#assigned[@]} places, where one in each branch of an #if was expected"
    elif [[ $match != always && ${BASH_REMATCH[1]} != "${BASH_REMATCH[2]}" ]]; then
        DETAIL="sets vm_flags under different conditions"
    elif ((reads)); then
        STATE=mend DETAIL="reads the private __vm_flags"
    else
        STATE='done' DETAIL="reads vm_flags"
    fi
}

# Keeps the stack of open conditionals in the caller's array 'branch', each with its number:
# if3, else3, or elif3, which is no alternative that stands for all other kernels.
which_branch() {
    local top=$((${#branch[@]} - 1))
    case $1 in
        if | ifdef | ifndef)
            conditionals=$((conditionals + 1))
            branch+=("if$conditionals")
            return 0
            ;;
    esac
    ((top >= 0)) || return 1
    case $1 in
        endif) unset "branch[top]" ;;
        else) [[ ${branch[top]} != if* ]] || branch[top]=else${branch[top]#if} ;;
        elif) branch[top]=elif${branch[top]##*[a-z]} ;;
    esac
}

# Inside the iterator path only: the older path above has a struct req_iterator of its own,
# which is right on every kernel.
mend_dma() {
    local line rest before i inside named=0 depth=0 head='' function='' found
    local -a branch=() users=()
    local pointer='struct[[:space:]]+(req_iterator|blk_map_iter)[[:space:]]*\*'
    local typed='typeof(__)?[[:space:]]*\(.*(->|\.)iter[[:space:]]*\)[[:space:]]*\*'
    IN_COMMENT=0
    for line in ${LINES[@]+"${LINES[@]}"}; do
        code_of "$line"
        if [[ $CODE =~ ^[[:space:]]*#[[:space:]]*(if|ifdef|ifndef|elif|else|endif)([^A-Za-z0-9_]|$) ]]; then
            preprocessor "${BASH_REMATCH[1]}" || {
                DETAIL="has an #else or #endif too many"
                return 0
            }
            NEW+=("$line")
            continue
        fi
        inside=0
        for i in ${branch[@]+"${branch[@]}"}; do [[ $i != iter ]] || inside=1; done
        if ((!inside)); then
            NEW+=("$line") depth=0 head='' function=''
            continue
        fi
        [[ ! $CODE =~ $typed ]] || users+=("$(function_name)")
        rest=$line before=''
        if [[ $CODE =~ $pointer ]]; then
            while [[ $rest =~ $pointer ]]; do
                before+="${rest%%"${BASH_REMATCH[0]}"*}$ITER_TYPE *"
                rest=${rest#*"${BASH_REMATCH[0]}"}
                named=$((named + 1))
                users+=("$(function_name)")
            done
        fi
        NEW+=("$before$rest")
        follow_braces
    done
    found=$(printf '%s\n' ${users[@]+"${users[@]}"} | sort | tr '\n' ' ')
    if ((${#branch[@]})); then
        DETAIL="has an #if without #endif"
    elif [[ $found != "$ITER_USERS " ]]; then
        DETAIL="names the iterator's type in ${found:-no function }under $ITER_MACRO, where once in each of $ITER_USERS was expected"
    elif ((named)); then
        STATE=mend DETAIL="names the iterator's type in $named of 4 places"
    else
        STATE='done' DETAIL="takes the iterator's type from struct blk_dma_iter"
    fi
}

# The function that the line in CODE belongs to; '?' outside of any.
function_name() {
    if ((depth)); then
        printf '%s' "${function:-?}"
    elif [[ "$head $CODE" =~ ([A-Za-z_][A-Za-z0-9_]*)[[:space:]]*\( ]]; then
        printf '%s' "${BASH_REMATCH[1]}"
    else
        printf '?'
    fi
}

# Follows the line in CODE: 'depth' counts open braces, 'head' is what stands before the
# first of them, and 'function' the name in it.
follow_braces() {
    local rest=$CODE
    [[ ! $rest =~ ^[[:space:]]*# ]] || return 0
    while [[ $rest =~ ^([^\{\}\;]*)([\{\}\;])(.*)$ ]]; do
        rest=${BASH_REMATCH[3]}
        ((depth)) || head+=" ${BASH_REMATCH[1]}"
        case ${BASH_REMATCH[2]} in
            '{')
                ((depth)) || { [[ $head =~ ([A-Za-z_][A-Za-z0-9_]*)[[:space:]]*\( ]] && function=${BASH_REMATCH[1]}; } || function=
                depth=$((depth + 1))
                ;;
            '}') depth=$((depth > 0 ? depth - 1 : 0)) ;;
        esac
        ((depth)) || [[ ${BASH_REMATCH[2]} == '{' ]] || head=''
    done
    ((depth)) || head+=" $rest"
}

# Keeps the stack of open conditionals in the caller's array 'branch': iter where the
# iterator path is compiled, old where it is not, other for any other condition.
preprocessor() {
    local top=$((${#branch[@]} - 1)) kind=other
    case $1 in
        if | ifdef | ifndef)
            if [[ $CODE =~ (^|[^A-Za-z0-9_])$ITER_MACRO([^A-Za-z0-9_]|$) ]]; then
                kind=iter
                if [[ $1 == ifndef || $CODE =~ ![[:space:]]*(defined[[:space:]]*)?\(?[[:space:]]*$ITER_MACRO ]]; then
                    kind=old
                fi
            fi
            branch+=("$kind")
            ;;
        elif | else)
            ((top >= 0)) || return 1
            case ${branch[top]} in
                iter) branch[top]=old ;;
                old) branch[top]=iter ;;
            esac
            ;;
        endif)
            ((top >= 0)) || return 1
            unset "branch[top]"
            ;;
    esac
}

# Adds -f to the unpacker of a line in LINE. Fails when the line has none.
force_unpack() {
    local tool=$1
    [[ $LINE =~ (^|[^A-Za-z0-9_./$\{-])($tool)([[:space:]]+-[^$'\n']*) ]] || return 1
    local match=${BASH_REMATCH[0]} lead=${BASH_REMATCH[1]} word=${BASH_REMATCH[2]} options=${BASH_REMATCH[3]}
    [[ $word == un* || $options =~ [[:space:]](-[a-zA-Z]*d[a-zA-Z]*|--(de|un)compress)([[:space:]]|$) ]] || return 1
    FORCED=1
    [[ ! $options =~ [[:space:]](-[a-zA-Z]*f[a-zA-Z]*|--force)([[:space:]]|$) ]] || return 0
    LINE=${LINE/"$match"/"$lead$word -f$options"}
    FORCED=0
}

mend_symvers() {
    local line i match either after=0 arm='' xz_arms=0 zst_arms=0 xz_done=0 zst_done=0 crc=0 changed=0 indent='' eol=$'\n'
    # By hand it may also be (R|r), in either dialect of grep.
    local both='(\[Rr\]|\[rR\]|\\?\((R\\?\|r|r\\?\|R)\\?\))'
    local space='(\\s|\[\[:space:\]\]|[[:space:]])'
    for ((i = 0; i < ${#LINES[@]}; i++)); do
        line=${LINES[i]}
        LINE=$line
        [[ ! $line =~ ^[[:space:]]*# ]] || {
            NEW+=("$line")
            continue
        }
        if [[ $line =~ ^([[:space:]]*)\(?[\"\']?\*[\"\']?\.?ko\.(xz|zst)[\"\']?\) ]]; then
            arm=${BASH_REMATCH[2]}
            if [[ $arm == xz ]]; then
                xz_arms=$((xz_arms + 1)) indent=${BASH_REMATCH[1]}
                [[ $line != *$'\r\n' ]] || eol=$'\r\n'
            else
                zst_arms=$((zst_arms + 1))
            fi
        fi
        FORCED=
        if [[ $arm == xz ]] && force_unpack 'xz|unxz'; then
            xz_done=$((xz_done + 1))
        elif [[ $arm == zst ]] && force_unpack 'zstd|unzstd'; then
            zst_done=$((zst_done + 1))
        fi
        [[ $FORCED != 0 ]] || changed=$((changed + 1))
        if [[ $LINE == *grep* && $LINE == *__crc* ]]; then
            if [[ $LINE =~ ${space}R${space} ]]; then
                crc=$((crc + 1))
                match=${BASH_REMATCH[0]} either="${BASH_REMATCH[1]}[Rr]${BASH_REMATCH[2]}"
                # grep -i already takes both cases.
                if [[ ! ${LINE%%"$match"*} =~ grep[[:space:]]([^|]*[[:space:]])?-[a-zA-Z]*i ]]; then
                    LINE=${LINE/"$match"/"$either"}
                    changed=$((changed + 1))
                fi
            elif [[ $LINE =~ $space$both$space ]]; then
                crc=$((crc + 1))
            fi
        fi
        NEW+=("$LINE")
        if [[ -n $arm && $line == *';;'* ]]; then
            [[ $arm != xz ]] || after=${#NEW[@]}
            arm=
        fi
    done
    if ((xz_arms != 1 || xz_done != 1)); then
        DETAIL="has no single '*ko.xz)' branch that unpacks"
    elif ((crc != 1)); then
        DETAIL="tests for relative CRCs in $crc places, where 1 was expected"
    elif ((zst_arms > 1 || zst_arms != zst_done)) || [[ -n $arm ]]; then
        DETAIL="has a '*ko.zst)' branch of an unknown kind"
    else
        if ((zst_arms == 0)); then
            add_zst_branch "$after" "$indent" "$eol" || return 0
            changed=$((changed + 1))
        fi
        STATE='done' DETAIL="unpacks .zst, never asks, knows 'r'"
        ((!changed)) || STATE=mend DETAIL="$changed places: .ko.zst, forced unpacking, relative CRCs"
    fi
}

# The variable that the case statement looks at is taken from the statement itself.
add_zst_branch() {
    local after=$1 indent=$2 eol=$3 name='' i text
    for ((i = 0; i < after; i++)); do
        [[ ! ${NEW[i]} =~ (^|[[:space:]])case[[:space:]]+\"?\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?\"?[[:space:]]+in ]] || name=${BASH_REMATCH[2]}
    done
    if [[ -z $name ]]; then
        STATE=unknown DETAIL="has no 'case \"\$NAME\" in' above its '*ko.xz)' branch"
        return 1
    fi
    local -a branch=("$indent*ko.zst)"
        "$indent	cp -f -- \"\$$name\" ."
        "$indent	$name=\$(basename \"\$$name\" .zst)"
        "$indent	zstd -d -f -q --rm \"\$$name.zst\""
        "$indent	;;")
    text=
    for i in "${branch[@]}"; do text+=$i$eol; done
    NEW=("${NEW[@]:0:after}" "$text" "${NEW[@]:after}")
}

# ---------------------------------------------------------------- writing

TEMPS=() MADE=()
# Whatever happens, no temporary file stays, and an original that is not needed goes.
clean_up() {
    local f
    for f in ${TEMPS[@]+"${TEMPS[@]}"} ${MADE[@]+"${MADE[@]}"}; do rm -f -- "$f"; done
    TEMPS=() MADE=()
}

not_applied() {
    finish 3 not-applied "$1; nothing was changed"
}

# Two runs at once would take each other's files. The lock is on the folder itself, so it
# leaves nothing behind, and ends with this process.
lock() {
    command -v flock >/dev/null || return 0
    { exec {LOCK}<"$SRC"; } 2>/dev/null || not_applied "cannot read '$SRC'"
    local status=0
    # Any other failure is a file system that cannot lock a folder (NFS): go on without.
    flock -n -E 75 "$LOCK" 2>/dev/null || status=$?
    ((status != 75)) ||
        finish 3 not-applied "another run is at work in '$SRC'; nothing was changed. Wait for it, and run this again"
}

# What a killed run left. Only names that this script makes.
sweep() {
    local file temp
    for file in "${FILES[@]}"; do
        for temp in "$SRC/.$file.kernel7."??????; do
            [[ ! -f $temp ]] || rm -f -- "$temp"
        done
    done
}

# Puts the mended text of the files in TODO in place: first every new file and every
# original is written, then all are renamed, which cannot fill a disk.
write_all() {
    local file temp i
    sweep
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    for file in "${TODO[@]}"; do
        temp=$(mktemp -- "$SRC/.$file.kernel7.XXXXXX" 2>/dev/null) || not_applied "cannot write in '$SRC'"
        TEMPS+=("$temp")
        # shellcheck disable=SC2094 # the file read and the file written differ
        printf '%s' "${MENDED[$file]}" 2>/dev/null >"$temp" || not_applied "cannot write '$temp' (is the disk full?)"
        printf '%s' "${MENDED[$file]}" | cmp -s - "$temp" || not_applied "cannot write '$temp' (is the disk full?)"
        # Mode and owner come last: a mode without 'w' would forbid the writing.
        cp --attributes-only --preserve=mode,ownership -- "$SRC/$file" "$temp" 2>/dev/null ||
            not_applied "cannot give '$temp' the mode and owner of '$file'"
    done
    for file in "${TODO[@]}"; do
        # The first original is the one to go back to; a later run must not replace it.
        [[ ! -e $SRC/$file$KEPT && ! -L $SRC/$file$KEPT ]] || continue
        # Under its name only when it is whole: a run that is killed half-way leaves no
        # half original for a later one to trust.
        temp=$(mktemp -- "$SRC/.$file.kernel7.XXXXXX" 2>/dev/null) || not_applied "cannot write in '$SRC'"
        TEMPS+=("$temp")
        if ! cp -p -- "$SRC/$file" "$temp" 2>/dev/null || ! cmp -s -- "$SRC/$file" "$temp"; then
            not_applied "cannot keep the original of '$SRC/$file' (is the disk full?)"
        fi
        MADE+=("$SRC/$file$KEPT")
        mv -fT -- "$temp" "$SRC/$file$KEPT" 2>/dev/null || not_applied "cannot keep the original of '$SRC/$file'"
    done
    trap '' INT TERM HUP
    for i in "${!TODO[@]}"; do
        if ! mv -fT -- "${TEMPS[i]}" "$SRC/${TODO[i]}" 2>/dev/null; then
            while ((i > 0)); do
                i=$((i - 1))
                cp -p -- "$SRC/${TODO[i]}$KEPT" "$SRC/${TODO[i]}"
            done
            not_applied "cannot replace '$SRC/${TODO[i]}'"
        fi
    done
    TEMPS=() MADE=()
    trap - EXIT INT TERM HUP
}

# ---------------------------------------------------------------- actions

declare -A MENDED=() STATES=() DETAILS=()
TODO=()
examine() {
    local file
    UNKNOWN=
    for file in "${FILES[@]}"; do
        mend_file "$file"
        STATES[$file]=$STATE
        DETAILS[$file]=$DETAIL
        if [[ $STATE == mend ]]; then
            TODO+=("$file")
            printf -v "MENDED[$file]" '%s' ${NEW[@]+"${NEW[@]}"}
        elif [[ $STATE == unknown ]]; then
            UNKNOWN+="${UNKNOWN:+, }$file ($DETAIL)"
        fi
    done
    [[ -z $UNKNOWN ]] || finish 4 unknown "unknown context in $UNKNOWN; nothing was changed. Use nvidia-fs 2.29 or later, or the original source of 2.28.4"
}

show_changes() {
    local file
    ((!JSON)) || return 0
    for file in "${TODO[@]}"; do
        printf '%s' "${MENDED[$file]}" | diff -u --label "$file" --label "$file (mended)" -- "$SRC/$file" - || true
    done
}

check_only() {
    examine
    ((${#TODO[@]})) || finish 0 already "already applied: this source builds on Linux 7.0"
    finish 3 not-applied "not applied: ${TODO[*]} can be mended; run with --apply"
}

apply() {
    examine
    ((${#TODO[@]})) || finish 0 already "already applied: this source builds on Linux 7.0"
    if ((DRY)); then
        show_changes
        finish 0 dry-run "would mend ${TODO[*]}; nothing was changed"
    fi
    write_all
    finish 0 applied "mended ${TODO[*]}; the originals are kept as *$KEPT"
}

# A file that differs from what --apply writes was changed since: its text would be lost.
revert() {
    local file temp
    local -a kept=() changed=()
    for file in "${FILES[@]}"; do
        [[ -f $SRC/$file$KEPT ]] || continue
        kept+=("$file")
        STATES[$file]=revert DETAILS[$file]="goes back to its original"
        temp=$(mend_text_of_original "$file")
        [[ ! -e $SRC/$file || $temp == same ]] || changed+=("$file")
    done
    ((${#kept[@]})) || finish 0 nothing "nothing to revert: no *$KEPT beside the source"
    if ((${#changed[@]} && !FORCE)); then
        finish 4 unknown "${changed[*]} changed after --apply, and reverting would lose that; nothing was changed. Move the change away, or add --force"
    fi
    ((!DRY)) || finish 0 dry-run "would put back ${kept[*]}; nothing was changed"
    sweep
    trap '' INT TERM HUP
    for file in "${kept[@]}"; do
        # A rename keeps content, mode, owner and time, and needs no room.
        mv -fT -- "$SRC/$file$KEPT" "$SRC/$file" 2>/dev/null ||
            finish 3 not-applied "cannot put back '$SRC/$file'; run --revert again as a user who may write in '$SRC'"
    done
    finish 0 reverted "put back ${kept[*]}"
}

# Prints same when the file is its original, or that original mended. Runs in a subshell.
mend_text_of_original() {
    local file=$1
    if cmp -s -- "$SRC/$file" "$SRC/$file$KEPT"; then
        printf same
        return 0
    fi
    mend_file "$file" "$SRC/$file$KEPT"
    if [[ $STATE == mend ]] && printf '%s' "${NEW[@]}" | cmp -s - "$SRC/$file"; then printf same; fi
    return 0
}

# finish CODE RESULT TEXT
finish() {
    local code=$1 result=$2 text=$3 file rows='' q_src q_text row
    if ((JSON)); then
        for file in "${FILES[@]}"; do
            json_str "$file" && row="\"file\": $REPLY"
            json_str "${STATES[$file]:-untouched}" && row+=", \"state\": $REPLY"
            json_str "${DETAILS[$file]:-}" && row+=", \"detail\": $REPLY"
            rows+="${rows:+, }{$row}"
        done
        json_str "$SRC" && q_src=$REPLY
        json_str "$text" && q_text=$REPLY
        printf '{"tool": "nvfs_kernel7_patch", "src": %s, "version": "%s", "action": "%s", "dry_run": %s, "result": "%s", "exit_code": %d, "message": %s, "files": [%s]}\n' \
            "$q_src" "${VERSION:-}" "$ACTION" "$( ((DRY)) && printf true || printf false)" "$result" "$code" "$q_text" "$rows"
    elif ((code == 0)); then
        printf '%s\n' "$text"
    else
        printf '%s: %s\n' "$PROG" "$text" >&2
    fi
    exit "$code"
}

main() {
    parse_arguments "$@"
    VERSION=
    read_version || finish 4 unknown "'$SRC/nvfs-vers.h' does not say the version in a known way; nothing was changed"
    if version_ge "$VERSION" 2.29; then
        finish 0 not-needed "not needed: nvidia-fs $VERSION supports Linux 7.0 itself; nothing was changed"
    fi
    [[ $VERSION == 2.28.4 ]] ||
        finish 4 unknown "this is nvidia-fs $VERSION, and the mends are for 2.28.4; nothing was changed. Use 2.28.4, or 2.29 or later"
    ((DRY)) || [[ $ACTION == check ]] || lock
    case $ACTION in
        check) check_only ;;
        apply) apply ;;
        revert) revert ;;
    esac
}

main "$@"
