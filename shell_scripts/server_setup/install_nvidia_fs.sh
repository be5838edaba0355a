#!/usr/bin/env bash
# Plan how to install nvidia-fs on this server: print commands to read and run.
set -euo pipefail

# The folder of this script, also if it runs through a symlink, and independent of CDPATH.
HERE=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source=lib.sh
source "$HERE/lib.sh"

usage() {
    cat <<'TEXT'
Usage: install_nvidia_fs.sh [--plan | --yes] [OPTION]...

Looks at the distribution, the kernel, the NVIDIA driver, the headers and Secure
Boot, and prints the way to nvidia-fs that it recommends. In order of preference:

  distribution-package   the distribution's own signed module for this kernel
  nvidia-package         nvidia-fs 2.29 or later (or 2.28 on Linux before 6.18)
  patched-source         nvidia-fs 2.28.4, mended by nvfs_kernel7_patch.sh

Options:
  --plan      (default) print the commands; run nothing
  --yes       run the package manager's commands of the plan, and nothing else;
              needs root (start the script as root: it never calls sudo)
  --dry-run   with --yes: print what would be run, run nothing
  --json      the plan as one JSON object
  -h, --help  this text

Loading the module, building it and rebooting are always left to you.

Exit: 0 planned or done, 1 the package manager failed, 2 wrong usage, 3 refused:
a precondition is missing, and the reason is printed.
TEXT
}

# ---------------------------------------------------------------- what is here

# Sets OS_ID, OS_NAME and FAMILY (apt, dnf, zypper or nothing).
read_distribution() {
    local file line key value like=''
    OS_ID='' OS_NAME='' FAMILY=''
    file=$ROOT/etc/os-release
    [[ -r $file ]] || file=$ROOT/usr/lib/os-release
    [[ -f $file && -r $file ]] || return 0
    while IFS= read -r line || [[ -n $line ]]; do
        line=${line%$'\r'}
        [[ $line == *=* ]] || continue
        key=${line%%=*} value=${line#*=}
        value=${value%[\"\']}
        value=${value#[\"\']}
        case $key in
            ID) OS_ID=$value ;;
            PRETTY_NAME) OS_NAME=$value ;;
            ID_LIKE) like=$value ;;
        esac
    done <"$file"
    case " $OS_ID $like " in
        *' ubuntu '* | *' debian '*) FAMILY=apt ;;
        *' rhel '* | *' fedora '* | *' centos '*) FAMILY=dnf ;;
        *' suse '* | *' sles '* | *' opensuse '*) FAMILY=zypper ;;
    esac
}

# generic, nvidia, aws, ... : what follows the numbers of an Ubuntu kernel.
kernel_flavour() {
    FLAVOUR=
    if [[ $KERNEL =~ ^[0-9]+\.[0-9]+\.[0-9]+-[0-9]+-([A-Za-z0-9._+-]+)$ ]]; then FLAVOUR=${BASH_REMATCH[1]}; fi
}

# on, off or unknown.
secure_boot() {
    local file bytes
    SECURE_BOOT=unknown
    if [[ ! -d $ROOT/sys/firmware/efi ]]; then
        SECURE_BOOT=off
        return 0
    fi
    for file in "$ROOT"/sys/firmware/efi/efivars/SecureBoot-*; do
        [[ -r $file ]] || continue
        # Four bytes of attributes, then the value.
        bytes=$(od -An -v -j4 -N1 -tu1 -- "$file" 2>/dev/null | tr -d ' \n') || bytes=
        case $bytes in
            1) SECURE_BOOT=on ;;
            0) SECURE_BOOT=off ;;
        esac
    done
}

# The key with which DKMS signs, if there is one.
find_mok() {
    local file
    MOK=
    for file in /var/lib/shim-signed/mok/MOK.der /var/lib/dkms/mok.pub /var/lib/dkms/mok.der; do
        [[ ! -e $ROOT$file ]] || MOK=$file
    done
}

# Is NVIDIA's repository configured and switched on, in a file that this family's package
# manager reads? In REPOSITORY.
find_repository() {
    local file
    REPOSITORY=0
    case $FAMILY in
        apt)
            read_one_line_sources "$ROOT/etc/apt/sources.list"
            for file in "$ROOT"/etc/apt/sources.list.d/*.list; do read_one_line_sources "$file"; done
            for file in "$ROOT"/etc/apt/sources.list.d/*.sources; do read_stanzas "$file"; done
            ;;
        dnf) for file in "$ROOT"/etc/yum.repos.d/*.repo; do read_sections "$file"; done ;;
        zypper) for file in "$ROOT"/etc/zypp/repos.d/*.repo; do read_sections "$file"; done ;;
    esac
}

# apt, one line each: deb [option=value …] URI suite component …, and comments from # on.
read_one_line_sources() {
    local line entry='^[[:space:]]*deb[[:space:]]+(\[[^]]*\][[:space:]]*)?[^[:space:]]*compute/cuda/repos'
    slurp "$1" || return 0
    while IFS= read -r line; do
        if [[ ${line%%#*} =~ $entry ]]; then REPOSITORY=1; fi
    done <<<"$REPLY"
}

# apt, deb822: stanzas of fields, whose values go on in lines that begin with a blank. A
# stanza counts unless it says "Enabled: no", or offers sources only.
read_stanzas() {
    local line key='' types='' uris='' enabled=''
    slurp "$1" || return 0
    while IFS= read -r line; do
        [[ $line != '#'* ]] || continue
        if [[ ! $line =~ [^[:space:]] ]]; then
            count_repository "$enabled" "$types" "$uris"
            key='' types='' uris='' enabled=''
        else
            if [[ $line =~ ^([^[:space:]:]+)[[:space:]]*:(.*)$ ]]; then
                key=${BASH_REMATCH[1],,} line=${BASH_REMATCH[2]}
            fi
            case $key in
                types) types+=" $line " ;;
                uris) uris+=" $line" ;;
                enabled) enabled+=" $line" ;;
            esac
        fi
    done <<<"$REPLY"$'\n'
    count_repository "$enabled" "$types" "$uris"
}

# dnf and zypper: sections of key=value. One counts unless it says enabled=0.
read_sections() {
    local line key='' uris='' enabled=''
    slurp "$1" || return 0
    while IFS= read -r line; do
        [[ ! $line =~ ^[[:space:]]*[#\;] ]] || continue
        if [[ $line == '['* ]]; then
            count_repository "$enabled" ' deb ' "$uris"
            key='' uris='' enabled=''
        else
            if [[ $line =~ ^([A-Za-z_]+)[[:space:]]*=(.*)$ ]]; then
                key=${BASH_REMATCH[1],,} line=${BASH_REMATCH[2]}
            fi
            case $key in
                baseurl | mirrorlist | metalink) uris+=" $line" ;;
                enabled) enabled=$line ;;
            esac
        fi
    done <<<"$REPLY"
    count_repository "$enabled" ' deb ' "$uris"
}

# count_repository ENABLED TYPES URIS: of one stanza or section.
count_repository() {
    local enabled=${1//[[:space:]]/}
    case ${enabled,,} in
        0 | no | false | off | without | disable) return 0 ;;
    esac
    # A field may be parted by tabs, too.
    [[ ${2//[[:space:]]/ } == *' deb '* && $3 == *compute/cuda/repos* ]] || return 0
    REPOSITORY=1
}

# The package lists of apt in LISTS: plain ones, and those that it keeps compressed
# (Acquire::GzipIndexes). Lists of NVIDIA's repository that are left from before it was
# switched off offer nothing.
find_lists() {
    local list
    LISTS=()
    for list in "$ROOT"/var/lib/apt/lists/*Packages "$ROOT"/var/lib/apt/lists/*Packages.{gz,xz,lzma,lz4,zst,bz2}; do
        [[ -f $list && -r $list ]] || continue
        if ((!REPOSITORY)) && [[ ${list##*/} == *compute_cuda_repos* ]]; then
            NOTES+=("the package list ${list##*/} is left from a repository that is not configured now")
        elif unpacker "$list"; then
            LISTS+=("$list")
        else
            NOTES+=("the package list ${list##*/} cannot be read: $REPLY is not here to unpack it")
        fi
    done
}

# The command that writes a package list to its output, in REPLY; where it is not here, its
# name, and a failure. apt's own helper takes every kind.
unpacker() {
    case $1 in
        *Packages) REPLY='cat' ;;
        *.gz) REPLY='gzip -dcq' ;;
        *.xz | *.lzma) REPLY='xz -dcq' ;;
        *.lz4) REPLY='lz4 -dcq' ;;
        *.zst) REPLY='zstd -dcq' ;;
        *.bz2) REPLY='bzip2 -dcq' ;;
    esac
    command -v "${REPLY%% *}" >/dev/null && return 0
    [[ ! -x $APT_HELPER ]] || {
        REPLY="$APT_HELPER cat-file"
        return 0
    }
    REPLY=${REPLY%% *}
    return 1
}
APT_HELPER=/usr/lib/apt/apt-helper

unpack_list() {
    local -a command
    unpacker "$1"
    read -r -a command <<<"$REPLY"
    if [[ $REPLY == *cat-file ]]; then
        "${command[@]}" "$1" 2>/dev/null
    else
        "${command[@]}" <"$1" 2>/dev/null
    fi
}

# Is the distribution's signed module offered? The nvidia flavour is built with it; for
# the others the package lists on disk tell.
find_signed_package() {
    SIGNED=
    [[ $OS_ID == ubuntu && -n $KERNEL ]] || return 0
    local name=linux-modules-nvidia-fs-$KERNEL list
    if [[ $FLAVOUR == nvidia || $FLAVOUR == nvidia-* ]]; then
        SIGNED=$name
        return 0
    fi
    for list in ${LISTS[@]+"${LISTS[@]}"}; do
        # Not a pipe, whose writer would die of SIGPIPE and take the answer with it.
        if grep -qxF "Package: $name" < <(unpack_list "$list"); then
            SIGNED=$name
            return 0
        fi
    done
}

# Newest nvidia-fs that a package list offers, in OFFERED.
find_offered() {
    local list line version inside
    OFFERED=
    for list in ${LISTS[@]+"${LISTS[@]}"}; do
        inside=0
        while IFS= read -r line; do
            case $line in
                'Package: nvidia-fs-dkms') inside=1 ;;
                Package:* | '' | --) inside=0 ;;
            esac
            [[ $inside == 1 && $line == Version:* ]] || continue
            version=${line#Version: }
            version=${version#*:}
            version=${version%%-*}
            if [[ -z $OFFERED ]] || version_ge "$version" "$OFFERED"; then OFFERED=$version; fi
        done < <(grep -A 20 -x 'Package: nvidia-fs-dkms' < <(unpack_list "$list"))
    done
}

# Newest source tree below /usr/src: SOURCE and SOURCE_VERSION, from nvfs-vers.h.
find_source() {
    local file dir line version major minor patch
    SOURCE='' SOURCE_VERSION=''
    for file in "$ROOT"/usr/src/nvidia-fs-*/nvfs-vers.h "$ROOT"/usr/src/nvidia-fs-*/src/nvfs-vers.h; do
        [[ -f $file && -r $file ]] || continue
        major='' minor='' patch=''
        while IFS= read -r line || [[ -n $line ]]; do
            [[ $line =~ define[[:space:]]+NVFS_DRIVER_(MAJOR|MINOR|PATCH)_VERSION[[:space:]]+([0-9]+) ]] || continue
            case ${BASH_REMATCH[1]} in
                MAJOR) major=${BASH_REMATCH[2]} ;;
                MINOR) minor=${BASH_REMATCH[2]} ;;
                PATCH) patch=${BASH_REMATCH[2]} ;;
            esac
        done <"$file"
        [[ -n $major && -n $minor ]] || continue
        version=$major.$minor.${patch:-0}
        dir=${file%/nvfs-vers.h}
        if [[ -z $SOURCE_VERSION ]] || version_ge "$version" "$SOURCE_VERSION"; then
            SOURCE=${dir#"$ROOT"} SOURCE_VERSION=$version
        fi
    done
}

# ---------------------------------------------------------------- the plan

NOTES=() REFUSED=() MENDS=() PACKAGE_COMMANDS=() AFTER=()
WAY=none WAY_TEXT=''
refuse() {
    REFUSED+=("$1")
    MENDS+=("$2")
}

install_command() {
    case $FAMILY in
        apt)
            PACKAGE_COMMANDS+=("apt-get update" "apt-get install -y $1")
            ;;
        dnf) PACKAGE_COMMANDS+=("dnf install -y $1") ;;
        zypper) PACKAGE_COMMANDS+=("zypper --non-interactive install $1") ;;
    esac
}

headers_package() {
    case $FAMILY in
        apt) REPLY="sudo apt-get install linux-headers-$KERNEL" ;;
        dnf) REPLY="sudo dnf install kernel-devel-$KERNEL" ;;
        *) REPLY="sudo zypper install kernel-default-devel" ;;
    esac
}

check_preconditions() {
    if is_wsl; then
        refuse "this is Windows Subsystem for Linux, where nvidia-fs cannot work" "run Linux on the machine itself"
    fi
    [[ -n $FAMILY ]] ||
        refuse "the distribution '${OS_NAME:-${OS_ID:-unknown}}' is not one that NVIDIA packages nvidia-fs for" "build nvidia-fs 2.29 or later from its source by hand"
    [[ -n $KERNEL ]] || refuse "the kernel release cannot be read from /proc/sys/kernel/osrelease" "uname -r"
    case $DRIVER_KIND in
        open) ;;
        none) refuse "no NVIDIA driver is loaded" "install and load the driver with its open kernel modules first" ;;
        proprietary) refuse "the driver ${DRIVER_VERSION:-} is the proprietary one, and nvidia-fs takes the open one only" \
            "install the open kernel modules of the same version (Ubuntu: nvidia-driver-NNN-server-open), then reboot" ;;
        *) refuse "it cannot be told whether the driver ${DRIVER_VERSION:-} is the open one" "cat /proc/driver/nvidia/version" ;;
    esac
}

# A module that is built here needs headers, and a key when Secure Boot is on.
check_building() {
    if [[ -n $KERNEL && ! -e $ROOT/lib/modules/$KERNEL/build ]]; then
        headers_package
        refuse "the headers of $KERNEL are missing (/lib/modules/$KERNEL/build)" "$REPLY"
    fi
    if [[ $SECURE_BOOT == on ]]; then
        find_mok
        if [[ -n $MOK ]]; then
            NOTES+=("Secure Boot is on: DKMS signs with $MOK; 'mokutil --test-key $MOK' must say that it is enrolled")
        else
            refuse "Secure Boot is on, and there is no key to sign a module that is built here" \
                "make and enrol a machine owner key (sudo update-secureboot-policy --new-key, then --enroll-key), or use the distribution's signed package"
        fi
    elif [[ $SECURE_BOOT == unknown ]]; then
        NOTES+=("whether Secure Boot is on cannot be read; if it is, an unsigned module will not load")
    fi
}

choose_way() {
    local new_kernel=0
    version_ge "${KERNEL:-0}" 6.18 && new_kernel=1
    if [[ -n $SIGNED ]]; then
        WAY=distribution-package WAY_TEXT="the distribution's signed module, $SIGNED"
        install_command "$SIGNED"
        AFTER=("sudo modprobe nvidia-fs")
        return 0
    fi
    if [[ -n $OFFERED ]] && { version_ge "$OFFERED" 2.29 || { version_ge "$OFFERED" 2.28 && ((!new_kernel)); }; }; then
        nvidia_package "$OFFERED"
    elif [[ -n $SOURCE_VERSION ]] && version_ge "$SOURCE_VERSION" 2.29; then
        WAY=nvidia-package WAY_TEXT="nvidia-fs $SOURCE_VERSION, whose source is in $SOURCE"
        AFTER=("sudo dkms install nvidia-fs/$(source_name)" "sudo modprobe nvidia-fs")
        check_building
    elif [[ $SOURCE_VERSION == 2.28.4 || $OFFERED == 2.28.4 ]]; then
        patched_source
    elif ((REPOSITORY)); then
        nvidia_package ""
        [[ -z $OFFERED ]] || NOTES+=("the package lists offer nvidia-fs $OFFERED only; refresh them, and take 2.29 or later")
    else
        WAY=nvidia-package WAY_TEXT="nvidia-fs 2.29 or later from NVIDIA's CUDA repository"
        refuse "no package list and no source tree offers nvidia-fs" \
            "add NVIDIA's CUDA repository as its CUDA installation guide for Linux describes, and run this again"
    fi
}

nvidia_package() {
    WAY=nvidia-package WAY_TEXT="nvidia-fs ${1:-2.29 or later} from NVIDIA's CUDA repository"
    install_command nvidia-fs-dkms
    AFTER=("sudo modprobe nvidia-fs")
    check_building
}

patched_source() {
    local source=${SOURCE:-/usr/src/nvidia-fs-2.28.4} script
    WAY=patched-source WAY_TEXT="nvidia-fs 2.28.4, mended for Linux 7.0"
    if [[ $SOURCE_VERSION != 2.28.4 ]]; then
        source=/usr/src/nvidia-fs-2.28.4
        install_command nvidia-fs-dkms
        NOTES+=("the package's own build fails on this kernel; its source stays in $source, and is built after the mend")
    fi
    SOURCE=$source
    shell_word "$HERE/nvfs_kernel7_patch.sh"
    script=$REPLY
    shell_word "$source"
    AFTER=("sudo $script --apply --src $REPLY" "sudo dkms install --force nvidia-fs/$(source_name)" "sudo modprobe nvidia-fs")
    check_building
}

# The version under which DKMS knows the tree is that of its folder.
source_name() {
    local dir=${SOURCE%/src}
    printf '%s' "${dir##*/nvidia-fs-}"
}

make_plan() {
    if [[ -d $ROOT/proc/driver/nvidia-fs ]]; then
        WAY=loaded WAY_TEXT="nvidia-fs is loaded already"
        first_line "$ROOT/proc/driver/nvidia-fs/version" && WAY_TEXT+=" (${REPLY#version: })"
        return 0
    fi
    check_preconditions
    [[ -z $FAMILY || -z $KERNEL ]] || choose_way
    nvme_hook
    if [[ $REPLY == n ]]; then
        NOTES+=("the nvme driver of this kernel has no hook for nvidia-fs: local NVMe disks stay out of its reach with it (Ubuntu's nvidia flavour and DOCA-OFED have the hook; P2PDMA needs none)")
    fi
}

# ---------------------------------------------------------------- saying and doing

print_plan() {
    local i
    printf 'distribution: %s\n' "${OS_NAME:-${OS_ID:-unknown}}"
    printf 'kernel:       %s%s\n' "${KERNEL:-unknown}" "${FLAVOUR:+ (flavour $FLAVOUR)}"
    printf 'driver:       %s %s\n' "$DRIVER_KIND" "$DRIVER_VERSION"
    printf 'headers:      %s\n' "$HEADERS"
    printf 'Secure Boot:  %s\n' "$SECURE_BOOT"
    printf 'way:          %s%s\n' "$WAY" "${WAY_TEXT:+: $WAY_TEXT}"
    for i in ${NOTES[@]+"${NOTES[@]}"}; do printf 'note: %s\n' "$i"; done
    if ((${#REFUSED[@]})); then
        for i in "${!REFUSED[@]}"; do
            printf 'refused: %s\n  mend: %s\n' "${REFUSED[i]}" "${MENDS[i]}"
        done
        return 0
    fi
    [[ $WAY != loaded ]] || return 0
    printf '\nRead these, then run them:\n'
    for i in ${PACKAGE_COMMANDS[@]+"${PACKAGE_COMMANDS[@]}"}; do printf '  sudo %s\n' "$i"; done
    for i in ${AFTER[@]+"${AFTER[@]}"}; do printf '  %s\n' "$i"; done
    printf '  cat /proc/driver/nvidia-fs/modules    # must show a line nvme:\n'
}

print_json() {
    local q_name q_kernel q_way q_notes q_refused q_mends q_packages q_after
    json_str "${OS_NAME:-$OS_ID}" && q_name=$REPLY
    json_str "$KERNEL" && q_kernel=$REPLY
    json_str "$WAY_TEXT" && q_way=$REPLY
    json_list ${NOTES[@]+"${NOTES[@]}"} && q_notes=$REPLY
    json_list ${REFUSED[@]+"${REFUSED[@]}"} && q_refused=$REPLY
    json_list ${MENDS[@]+"${MENDS[@]}"} && q_mends=$REPLY
    json_list ${PACKAGE_COMMANDS[@]+"${PACKAGE_COMMANDS[@]}"} && q_packages=$REPLY
    json_list ${AFTER[@]+"${AFTER[@]}"} && q_after=$REPLY
    printf '{"tool": "install_nvidia_fs", "exit_code": %d, "distribution": %s, "kernel": %s, "flavour": "%s", "driver": "%s", "headers": "%s", "secure_boot": "%s", "way": "%s", "way_text": %s, "notes": %s, "refused": %s, "mends": %s, "package_commands": %s, "other_commands": %s}\n' \
        "$1" "$q_name" "$q_kernel" "$FLAVOUR" "$DRIVER_KIND" "$HEADERS" "$SECURE_BOOT" "$WAY" "$q_way" "$q_notes" \
        "$q_refused" "$q_mends" "$q_packages" "$q_after"
}

# The package manager's commands, and no other. Never through sudo.
run_packages() {
    local command
    local -a words
    if ((${#PACKAGE_COMMANDS[@]} == 0)); then
        printf 'the package manager has nothing to do here; the other commands are yours to run\n' >&2
        return 0
    fi
    if ((!DRY && EUID != 0)) && [[ -z $ROOT ]]; then
        printf '%s: not started as root, so the package manager will probably refuse\n' "$PROG" >&2
    fi
    for command in "${PACKAGE_COMMANDS[@]}"; do
        if ((DRY)); then
            printf 'would run: %s\n' "$command" >&2
            continue
        fi
        printf 'running: %s\n' "$command" >&2
        read -r -a words <<<"$command"
        "${words[@]}" >&2 </dev/null ||
            die 1 "'$command' failed; read its message above, mend that, and start again as root"
    done
}

DRY=0
main() {
    local mode='' json=0
    while (($#)); do
        case $1 in
            -h | --help)
                usage
                exit 0
                ;;
            --plan | --yes)
                [[ -z $mode || $mode == "$1" ]] || usage_error "--plan and --yes cannot go together"
                mode=$1
                ;;
            --dry-run) DRY=1 ;;
            --json) json=1 ;;
            *) usage_error "unknown argument '$1'" ;;
        esac
        shift
    done
    require_sysroot
    # The plan would be that of the other tree, and the packages would land on this machine.
    [[ $mode != --yes || -z $ROOT || $DRY == 1 || ${GDS_SYSROOT_PRETENDED:-} == yes ]] ||
        usage_error "GDS_SYSROOT is set, and --yes would install on this machine what '$ROOT' needs; unset it, or add --dry-run"
    read_distribution
    kernel_release
    KERNEL=$REPLY
    kernel_flavour
    read_driver
    secure_boot
    find_repository
    find_lists
    find_signed_package
    find_offered
    find_source
    HEADERS=missing
    [[ -z $KERNEL || ! -e $ROOT/lib/modules/$KERNEL/build ]] || HEADERS=present
    make_plan
    local code=0
    ((${#REFUSED[@]} == 0)) || code=3
    if [[ $mode == --yes ]] && ((code == 0)); then run_packages; fi
    if ((json)); then print_json "$code"; else print_plan; fi
    exit "$code"
}

main "$@"
