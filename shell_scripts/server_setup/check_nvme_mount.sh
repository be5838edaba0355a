#!/usr/bin/env bash
# Check whether GPUDirect Storage can natively read the file system of a folder.
set -euo pipefail

# The folder of this script, also if it runs through a symlink, and independent of CDPATH.
HERE=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source=lib.sh
source "$HERE/lib.sh"

usage() {
    cat <<'TEXT'
Usage: check_nvme_mount.sh [--json] DIR

Shows the file system, mount options and disks below DIR, as far as they matter to
GPUDirect Storage, and prints the line that it recommends for /etc/fstab. It edits
nothing and mounts nothing.

Options:
  --json      the same as one JSON object
  -h, --help  this text

Exit: 0 nothing to change, 3 something to change, 1 the disk cannot be told,
2 wrong usage.
TEXT
}

PROBLEMS=() NOTES=()

# A field of fstab cannot hold a blank as it is.
fstab_field() {
    local s=$1
    s=${s//\\/\\134}
    s=${s// /\\040}
    s=${s//$'\t'/\\011}
    s=${s//$'\n'/\\012}
    s=${s//\#/\\043}
    REPLY=$s
}

# UUID of the mounted device in REPLY, or nothing: from /dev/disk/by-uuid, or from udev.
device_uuid() {
    local link line file=$ROOT/run/udev/data/b$DIR_DEV
    for link in "$ROOT"/dev/disk/by-uuid/*; do
        [[ -L $link ]] || continue
        if [[ $(basename -- "$(readlink -- "$link")") == "$BLOCK" ]]; then
            REPLY=${link##*/}
            return 0
        fi
    done
    REPLY=
    [[ -f $file && -r $file ]] || return 0
    while IFS= read -r line || [[ -n $line ]]; do
        if [[ $line == E:ID_FS_UUID=* ]]; then
            REPLY=${line#E:ID_FS_UUID=}
            return 0
        fi
    done <"$file"
}

# The options that the mount has now, without those that the kernel adds or that would
# contradict data=ordered. Only options that an admin would write are kept.
kept_options() {
    local item out=defaults
    local -a items
    IFS=, read -r -a items <<<"$DIR_OPTIONS"
    for item in "${items[@]}"; do
        case $item in
            noatime | nodiratime | nosuid | nodev | noexec | ro | discard | lazytime | nobarrier | largeio | inode64 | prjquota | usrquota | grpquota)
                [[ ",$out," == *",$item,"* ]] || out+=,$item
                ;;
        esac
    done
    [[ ",$out," == *,noatime,* ]] || out+=,noatime
    REPLY=$out
}

# The line that /etc/fstab has for this mount point: its options in REPLY, and its last two
# fields in FSTAB_REST. Options such as nofail stand only there; the kernel does not know them.
fstab_options() {
    local line point options='' item
    local -a f items
    REPLY='' FSTAB_REST=
    [[ -f $ROOT/etc/fstab && -r $ROOT/etc/fstab ]] || return 1
    while IFS= read -r line || [[ -n $line ]]; do
        read -r -a f <<<"${line%$'\r'}"
        [[ ${#f[@]} -ge 4 && ${f[0]} != '#'* ]] || continue
        unescape "${f[1]}"
        point=$REPLY
        [[ $point == / ]] || point=${point%/}
        [[ $point == "$DIR_POINT" && (${f[2]} == "$DIR_FS" || ${f[2]} == auto) ]] || continue
        options=${f[3]} FSTAB_REST="${f[4]:-0} ${f[5]:-0}"
    done <"$ROOT/etc/fstab"
    REPLY=
    [[ -n $options ]] || return 1
    IFS=, read -r -a items <<<"$options"
    for item in ${items[@]+"${items[@]}"}; do
        [[ $item == data=* ]] || REPLY+=${REPLY:+,}$item
    done
    REPLY=${REPLY:-defaults}
}

# Sets FSTAB to the recommended line, or to nothing where none would help.
recommend() {
    local spec point options rest pass=2
    FSTAB=
    [[ $DIR_FS == ext4 || $DIR_FS == xfs ]] || return 0
    device_uuid
    if [[ -n $REPLY ]]; then
        spec=UUID=$REPLY
    else
        fstab_field "$DIR_SOURCE"
        spec=$REPLY
        NOTES+=("no UUID is known for $BLOCK, so the line names $spec; a name such as nvme0n1 can change from boot to boot")
    fi
    if [[ $DIR_FS == xfs ]]; then pass=0; elif [[ $DIR_POINT == / ]]; then pass=1; fi
    if fstab_options; then
        options=$REPLY rest=$FSTAB_REST
    else
        kept_options
        options=$REPLY rest="0 $pass"
    fi
    [[ $DIR_FS != ext4 ]] || options+=,data=ordered
    fstab_field "$DIR_POINT"
    point=$REPLY
    FSTAB="$spec $point $DIR_FS $options $rest"
    if [[ $DIR_SUBROOT != / ]]; then
        NOTES+=("$DIR_POINT shows only the folder $DIR_SUBROOT of its file system (a bind mount or subvolume): the line belongs to the mount point of the whole file system")
    fi
}

judge_file_system() {
    local data=
    case $DIR_FS in
        xfs) ;;
        ext4)
            option_value "$DIR_OPTIONS" data && data=$REPLY
            if [[ $data != ordered ]]; then
                PROBLEMS+=("ext4 is mounted ${data:+with data=$data}${data:-without an explicit data=ordered}, and cuFile wants data=ordered written out")
                [[ $DIR_POINT != / ]] ||
                    NOTES+=("the root file system is mounted before /etc/fstab is read: rather keep the data on a file system of its own")
            fi
            ;;
        overlay) PROBLEMS+=("$DIR_FS: this is the inside of a container; mount a folder of the host into it") ;;
        *) PROBLEMS+=("${DIR_FS:-no file system}: a native read needs xfs, or ext4 with data=ordered, on a local NVMe disk") ;;
    esac
}

judge_disks() {
    transport_word
    # Where no disk is seen, that no fault is seen says nothing.
    [[ $REPLY != none || -n $HAS_OTHER ]] || STORAGE_ERROR="no disk below $DIR_POINT is known to /sys"
    ((${#LAYERS[@]})) || return 0
    case $REPLY in
        pcie) ;;
        rdma) NOTES+=("NVMe over RDMA: open to nvidia-fs only, not to P2PDMA") ;;
        none) ;;
        unknown) NOTES+=("the transport of the NVMe disk cannot be read") ;;
        *) PROBLEMS+=("the NVMe transport is $REPLY; a native read needs pcie (or rdma, with nvidia-fs)") ;;
    esac
    [[ -z $HAS_OTHER ]] || PROBLEMS+=("no NVMe disk: $HAS_OTHER")
    [[ -z $HAS_CRYPT ]] || PROBLEMS+=("dm-crypt ($HAS_CRYPT): the CPU must decrypt each block")
    [[ -z $HAS_MPATH ]] || PROBLEMS+=("a multipath map ($HAS_MPATH)")
    [[ -z $HAS_DM ]] || NOTES+=("a device-mapper volume ($HAS_DM): closed to P2PDMA, and NVIDIA says nothing of nvidia-fs")
    [[ -z $HAS_INTEGRITY ]] || PROBLEMS+=("the namespace carries protection information ($HAS_INTEGRITY)")
    if [[ -n $HAS_MD ]]; then
        case " $HAS_MD " in
            *' raid4 '* | *' raid5 '* | *' raid6 '*) PROBLEMS+=("RAID with parity ($HAS_MD)") ;;
            *' ? '*) STORAGE_ERROR="the level of an md array cannot be read" ;;
            *) NOTES+=("md $HAS_MD: open to nvidia-fs only, not to P2PDMA") ;;
        esac
    fi
    nvme_multipath
    MULTIPATH=$REPLY
    if [[ $MULTIPATH == Y ]]; then
        NOTES+=("NVMe multipath is on: P2PDMA needs it off (options nvme_core multipath=N in /etc/modprobe.d/)")
    fi
}

print_text() {
    local i
    printf 'folder:      %s\n' "$DIR_PATH"
    printf 'file system: %s on %s\n' "${DIR_FS:-unknown}" "${DIR_POINT:-unknown}"
    printf 'options:     %s\n' "$DIR_OPTIONS"
    layers_line
    printf 'disks:       %s\n' "$REPLY"
    transport_word
    printf 'transport:   %s\n' "$REPLY"
    printf 'multipath:   %s\n' "${MULTIPATH:-unknown}"
    printf 'RAID:        %s\n' "${HAS_MD:-none}"
    printf 'dm-crypt:    %s\n' "${HAS_CRYPT:-none}"
    for i in ${PROBLEMS[@]+"${PROBLEMS[@]}"}; do printf 'change: %s\n' "$i"; done
    for i in ${NOTES[@]+"${NOTES[@]}"}; do printf 'note: %s\n' "$i"; done
    [[ -z $FSTAB ]] || printf 'fstab: %s\n' "$FSTAB"
    [[ -z $STORAGE_ERROR ]] || printf 'unknown: %s\n' "$STORAGE_ERROR"
}

print_json() {
    local q_dir q_fs q_point q_opt q_layers q_word q_problems q_notes q_fstab q_error q_multipath q_raid q_crypt
    json_str "$DIR_PATH" && q_dir=$REPLY
    json_str "$DIR_FS" && q_fs=$REPLY
    json_str "$DIR_POINT" && q_point=$REPLY
    json_str "$DIR_OPTIONS" && q_opt=$REPLY
    json_list ${LAYERS[@]+"${LAYERS[@]}"} && q_layers=$REPLY
    transport_word && json_str "$REPLY" && q_word=$REPLY
    json_list ${PROBLEMS[@]+"${PROBLEMS[@]}"} && q_problems=$REPLY
    json_list ${NOTES[@]+"${NOTES[@]}"} && q_notes=$REPLY
    json_str "$FSTAB" && q_fstab=$REPLY
    json_str "$STORAGE_ERROR" && q_error=$REPLY
    json_str "${MULTIPATH:-unknown}" && q_multipath=$REPLY
    json_str "$HAS_MD" && q_raid=$REPLY
    json_str "$HAS_CRYPT" && q_crypt=$REPLY
    printf '{"tool": "check_nvme_mount", "exit_code": %d, "dir": %s, "file_system": %s, "mount_point": %s, "options": %s, "layers": %s, "transport": %s, "multipath": %s, "raid": %s, "dm_crypt": %s, "change": %s, "notes": %s, "fstab": %s, "error": %s}\n' \
        "$1" "$q_dir" "$q_fs" "$q_point" "$q_opt" "$q_layers" "$q_word" "$q_multipath" "$q_raid" "$q_crypt" \
        "$q_problems" "$q_notes" "$q_fstab" "$q_error"
}

main() {
    local json=0 dir='' have_dir=0 code=0
    while (($#)); do
        case $1 in
            -h | --help)
                usage
                exit 0
                ;;
            --json) json=1 ;;
            --)
                shift
                (($# == 1 && !have_dir)) || usage_error "one folder at a time"
                dir=$1 have_dir=1
                ;;
            -*) usage_error "unknown option '$1'" ;;
            *)
                ((!have_dir)) || usage_error "one folder at a time; got '$dir' and '$1'"
                dir=$1 have_dir=1
                ;;
        esac
        shift
    done
    ((have_dir)) || usage_error "no folder given; say which folder the data is in"
    require_sysroot
    locate_dir "$dir"
    FSTAB='' MULTIPATH=''
    if resolve_storage; then
        judge_file_system
        judge_disks
        recommend
        ((${#PROBLEMS[@]} == 0)) || code=3
        transport_word
        [[ $code != 0 || ($REPLY != unknown && -z $STORAGE_ERROR) ]] || code=1
    else
        code=1
    fi
    if ((json)); then print_json "$code"; else print_text; fi
    exit "$code"
}

main "$@"
