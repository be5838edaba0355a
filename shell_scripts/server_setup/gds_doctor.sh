#!/usr/bin/env bash
# Find out on which path the bytes of a folder reach the GPU, and why the path is not native.
# Read-only, except for the temporary file of --probe.
set -euo pipefail

# The folder of this script, also if it runs through a symlink, and independent of CDPATH.
HERE=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source=lib.sh
source "$HERE/lib.sh"

usage() {
    cat <<'TEXT'
Usage: gds_doctor.sh [OPTION]... DIR

Says which way bytes from DIR take to the GPU, and checks every precondition of
the two native ways. It changes nothing.

  path=nvidia-fs      native: the nvidia-fs kernel module moves the bytes
  path=p2pdma         native: the kernel's own PCI peer-to-peer DMA moves them
  path=cufile-compat  cuFile is used, and copies through host memory
  path=kvikio-posix   kvikio does not use cuFile: plain reads, then a copy
  path=unknown        there is not enough evidence; the reasons follow

Where both native ways are open, native= names both, and path= the one cuFile takes.

Options:
  --json            the same as one JSON object
  --gpu GPU         judge one GPU: its index in PCI order, or its PCI address
                    (default: every NVIDIA GPU must qualify)
  --gdscheck FILE   also weigh saved output of 'gdscheck -p'
  --cufile-json F   read this cuFile configuration instead of
                    $CUFILE_ENV_PATH_JSON or /etc/cufile.json
  --python EXE      the Python whose kvikio is asked (default: python3)
  --no-python       do not ask kvikio
  --probe           write and read one O_DIRECT temporary file in DIR, and
                    remove it, also when interrupted
  --dry-run         with --probe: say so, and write nothing
  -h, --help        this text

Environment: GDS_SYSROOT prefixes every look at /proc, /sys, /etc, /run, /boot
and /dev (for tests, or for the tree of another machine); KVIKIO_COMPAT_MODE,
CUFILE_ENV_PATH_JSON, CUFILE_FORCE_COMPAT_MODE, CUFILE_ALLOW_COMPAT_MODE,
CUFILE_USE_PCIP2PDMA and LD_LIBRARY_PATH count as they do for kvikio and cuFile.

Exit: 0 native, 10 cuFile compat, 11 POSIX, 1 unknown, 2 wrong usage.
TEXT
}

# NVIDIA lists these for P2PDMA on NVMe.
P2PDMA_GPUS='A100 A40 L4 L40S H100 H200 B100 B200 B300'

# ---------------------------------------------------------------- the table

# One row for each precondition. WAY says whom it concerns: nvidia-fs, p2pdma, both,
# cufile (whether cuFile is used at all) or info (nobody's verdict). STATUS is ok,
# FAIL, unsure (not enough evidence) or note.
C_ID=() C_WAY=() C_STATUS=() C_LOOKED=() C_FOUND=() C_WANT=() C_MEND=()
check() {
    C_ID+=("$1") C_WAY+=("$2") C_STATUS+=("$3") C_LOOKED+=("$4") C_FOUND+=("$5") C_WANT+=("$6") C_MEND+=("${7:-}")
}

# way_state WAY: open, closed or unknown, in REPLY.
way_state() {
    local i
    REPLY=open
    for i in "${!C_ID[@]}"; do
        case ${C_WAY[i]} in
            "$1" | both | cufile) ;;
            *) continue ;;
        esac
        case ${C_STATUS[i]} in
            FAIL)
                REPLY=closed
                return 0
                ;;
            unsure) REPLY=unknown ;;
        esac
    done
}

# status_of ID: the status of a row, in REPLY; empty when there is no such row.
status_of() {
    local i
    REPLY=
    for i in "${!C_ID[@]}"; do
        [[ ${C_ID[i]} == "$1" ]] && REPLY=${C_STATUS[i]}
    done
    return 0
}

# ---------------------------------------------------------------- arguments

DIR='' JSON=0 GPU='' GDSCHECK='' CUFILE_JSON='' PYTHON='' ASK_KVIKIO=1 PROBE=0 DRY=0
parse_arguments() {
    local have_dir=0
    while (($#)); do
        case $1 in
            -h | --help)
                usage
                exit 0
                ;;
            --json) JSON=1 ;;
            --dry-run) DRY=1 ;;
            --probe) PROBE=1 ;;
            --no-python) ASK_KVIKIO=0 ;;
            --gpu | --gdscheck | --cufile-json | --python)
                need_value "$1" $#
                [[ -n $2 ]] || usage_error "$1 got an empty value"
                case $1 in
                    --gpu) GPU=$2 ;;
                    --gdscheck) GDSCHECK=$2 ;;
                    --cufile-json) CUFILE_JSON=$2 ;;
                    --python) PYTHON=$2 ;;
                esac
                shift
                ;;
            --)
                shift
                break
                ;;
            -*) usage_error "unknown option '$1'" ;;
            *)
                ((!have_dir)) || usage_error "one folder at a time; got '$DIR' and '$1'"
                DIR=$1 have_dir=1
                ;;
        esac
        shift
    done
    if (($#)); then
        (($# == 1 && !have_dir)) || usage_error "one folder at a time"
        DIR=$1 have_dir=1
    fi
    ((have_dir)) || usage_error "no folder given; say which folder the data is in"
    [[ -z $GDSCHECK || (-f $GDSCHECK && -r $GDSCHECK) ]] ||
        usage_error "--gdscheck: cannot read '$GDSCHECK'; save the output of 'gdscheck -p' there first"
    [[ -z $CUFILE_JSON || (-f $CUFILE_JSON && -r $CUFILE_JSON) ]] ||
        usage_error "--cufile-json: cannot read '$CUFILE_JSON'; give a readable file"
    [[ -z $PYTHON ]] || command -v -- "$PYTHON" >/dev/null ||
        usage_error "--python: there is no program '$PYTHON'; give the Python that has kvikio"
}

# ---------------------------------------------------------------- cuFile at all?

check_wsl() {
    if is_wsl; then
        check wsl cufile FAIL /proc/sys/kernel/osrelease "Windows Subsystem for Linux" \
            "a Linux kernel on the machine itself" \
            "run on Linux without WSL: GPUDirect Storage does not exist in WSL"
    elif [[ -z $KERNEL ]] && ! first_line "$ROOT/proc/version"; then
        check wsl cufile unsure "/proc/sys/kernel/osrelease, /proc/version" "not readable" "no WSL" "uname -r"
    else
        check wsl cufile ok /proc/sys/kernel/osrelease "${KERNEL:-$REPLY}, no WSL" "no WSL"
    fi
}

check_udev() {
    local hint="start the udev service"
    [[ -z $CONTAINER ]] || hint="start the container with --volume /run/udev:/run/udev:ro"
    if [[ -d $ROOT/run/udev && -r $ROOT/run/udev && -x $ROOT/run/udev ]]; then
        check udev cufile ok /run/udev "readable" "readable"
    else
        check udev cufile FAIL /run/udev "missing or not readable${CONTAINER:+ in a $CONTAINER container}" \
            "readable: without it kvikio uses POSIX, and cuFile cannot tell disks apart" "$hint"
    fi
}

# Sets LIBCUFILE to the first libcufile that the loader, or a pip package, offers.
find_libcufile() {
    local d f
    local -a dirs=()
    LIBCUFILE=
    if [[ -n ${LD_LIBRARY_PATH:-} ]]; then IFS=: read -r -a dirs <<<"$LD_LIBRARY_PATH"; fi
    dirs+=(/usr/local/cuda/lib64 /usr/lib/x86_64-linux-gnu
        /usr/lib/aarch64-linux-gnu /usr/lib64 /usr/lib /lib/x86_64-linux-gnu /lib64 /opt/cuda/lib64)
    for d in "$ROOT"/usr/local/cuda*/lib64 "$ROOT"/usr/local/cuda*/targets/*/lib; do
        dirs+=("${d#"$ROOT"}")
    done
    for d in "${dirs[@]}"; do
        [[ -n $d ]] || continue
        for f in "$ROOT$d"/libcufile.so "$ROOT$d"/libcufile.so.[0-9]*; do
            if [[ -e $f ]]; then
                LIBCUFILE=${f#"$ROOT"}
                return 0
            fi
        done
    done
    if [[ -r $ROOT/etc/ld.so.cache ]]; then
        # The cache holds file names between NUL bytes; one that ends in this name is enough.
        LIBCUFILE=$(tr '\000' '\n' <"$ROOT/etc/ld.so.cache" | grep -a -m1 -E '^/.*/libcufile\.so(\.[0-9.]+)?$' || true)
        [[ -z $LIBCUFILE || -e $ROOT$LIBCUFILE ]] || LIBCUFILE=
    fi
    [[ -n $LIBCUFILE ]]
}

# What kvikio says of itself: KVIKIO is yes, no, missing, broken or unasked (does it prefer
# its compat mode?), and KVIKIO_CUFILE a libcufile that came with Python packages.
ask_kvikio() {
    KVIKIO=unasked KVIKIO_CUFILE=
    ((ASK_KVIKIO)) || return 0
    # The tree of another machine has no Python that could be run here.
    [[ -z $ROOT || -n $PYTHON ]] || return 0
    local python=${PYTHON:-python3} answer line
    command -v -- "$python" >/dev/null || {
        KVIKIO=missing
        return 0
    }
    local code='
import sys
# Nothing is imported from the folder that the admin happens to stand in.
sys.path[:] = [p for p in sys.path if p]
try:
    import importlib.metadata as md
    for name in ("nvidia-cufile", "nvidia-cufile-cu13", "nvidia-cufile-cu12"):
        try:
            dist = md.distribution(name)
        except md.PackageNotFoundError:
            continue
        for f in dist.files or ():
            if f.name.startswith("libcufile.so"):
                print("cufile=" + str(dist.locate_file(f)))
                break
except Exception:
    pass
try:
    import kvikio.defaults
except ImportError:
    print("kvikio=missing")
    sys.exit(0)
print("kvikio=" + ("yes" if kvikio.defaults.is_compat_mode_preferred() else "no"))
'
    answer=$(timeout 20 "$python" -c "$code" 2>/dev/null </dev/null) || KVIKIO=broken
    while IFS= read -r line; do
        case $line in
            cufile=*) KVIKIO_CUFILE=${line#cufile=} ;;
            kvikio=yes | kvikio=no | kvikio=missing) KVIKIO=${line#kvikio=} ;;
        esac
    done <<<"$answer"
    [[ $KVIKIO != unasked ]] || KVIKIO=broken
}

check_libcufile() {
    find_libcufile || true
    if [[ -z $LIBCUFILE && -n $KVIKIO_CUFILE ]]; then LIBCUFILE=$KVIKIO_CUFILE; fi
    if [[ -n $LIBCUFILE ]]; then
        check libcufile cufile ok "library folders" "$LIBCUFILE" "libcufile.so"
    elif [[ $KVIKIO == no ]]; then
        check libcufile cufile ok "kvikio" "kvikio has loaded it" "libcufile.so"
    else
        check libcufile cufile FAIL "library folders, /etc/ld.so.cache" "no libcufile.so" \
            "libcufile.so: without it kvikio uses POSIX" \
            "install cuFile: pip install nvidia-cufile, or the libcufile package of your CUDA version"
    fi
}

check_kvikio() {
    local env=${KVIKIO_COMPAT_MODE:-AUTO}
    case ${env^^} in
        ON | TRUE | YES | 1) KVIKIO_MODE=ON ;;
        OFF | FALSE | NO | 0) KVIKIO_MODE=OFF ;;
        AUTO) KVIKIO_MODE=AUTO ;;
        *) KVIKIO_MODE=unknown ;;
    esac
    if [[ $KVIKIO_MODE == unknown ]]; then
        check kvikio-mode cufile unsure KVIKIO_COMPAT_MODE "'$env', which kvikio does not know" "AUTO, ON or OFF" "unset KVIKIO_COMPAT_MODE"
    elif [[ $KVIKIO_MODE == ON ]]; then
        check kvikio-mode cufile FAIL KVIKIO_COMPAT_MODE "$env" "AUTO or unset" "unset KVIKIO_COMPAT_MODE"
    else
        check kvikio-mode cufile ok KVIKIO_COMPAT_MODE "$env" "not ON"
    fi
    case $KVIKIO in
        yes)
            check kvikio cufile FAIL "kvikio.defaults.is_compat_mode_preferred()" "True" \
                "False: kvikio would leave cuFile alone" "mend the rows above; kvikio looks at the same things"
            ;;
        no)
            check kvikio info note "kvikio.defaults.is_compat_mode_preferred()" \
                "False: kvikio uses cuFile, which may still be in a compat mode of its own" "False"
            ;;
        missing) check kvikio info note "Python" "no kvikio in this Python" "kvikio, to be asked" ;;
        broken) check kvikio info note "Python" "kvikio cannot be asked (it does not import here)" "kvikio, to be asked" ;;
        *) check kvikio info note "Python" "not asked" "kvikio, to be asked" ;;
    esac
}

# ---------------------------------------------------------------- cuFile's configuration

truth() {
    case ${1,,} in
        true | 1 | yes | on) REPLY=true ;;
        false | 0 | no | off) REPLY=false ;;
        *) REPLY=$2 ;;
    esac
}

# Sets CONF_FILE (its name on the machine), CONF_STATE (read, missing, broken) and CFG.
read_configuration() {
    local file
    CONF_STATE=missing CONF_FILE=/etc/cufile.json
    if [[ -n $CUFILE_JSON ]]; then
        CONF_FILE=$CUFILE_JSON file=$CUFILE_JSON
    elif [[ -n ${CUFILE_ENV_PATH_JSON:-} ]]; then
        CONF_FILE=$CUFILE_ENV_PATH_JSON file=$ROOT$CUFILE_ENV_PATH_JSON
    else
        file=$ROOT/etc/cufile.json
    fi
    [[ -e $file ]] || return 0
    if read_cufile_json "$file"; then CONF_STATE='read'; else CONF_STATE=broken; fi
}

check_configuration() {
    local make="make_cufile_json.sh --mode p2pdma -o cufile.json, then CUFILE_ENV_PATH_JSON=\$PWD/cufile.json"
    case $CONF_STATE in
        read) check cufile-json info note "$CONF_FILE" "read" "cuFile's configuration" ;;
        broken)
            local mend="make_cufile_json.sh --mode p2pdma -o $CONF_FILE --force"
            [[ $CFG_ERROR != 'cannot be read' ]] || mend="sudo chmod a+r $CONF_FILE"
            check cufile-json both unsure "$CONF_FILE" "$CFG_ERROR" "JSON that can be read" "$mend"
            ;;
        missing) check cufile-json info note "$CONF_FILE" "missing: cuFile takes its defaults" "cuFile's configuration" ;;
    esac

    local forced
    forced=${CUFILE_FORCE_COMPAT_MODE:-${CFG[properties.force_compat_mode]:-false}}
    truth "$forced" unknown
    if [[ $REPLY == unknown ]]; then
        check force-compat both unsure "$CONF_FILE, CUFILE_FORCE_COMPAT_MODE" "'$forced', neither true nor false" "not forced" \
            "set properties.force_compat_mode to false and unset CUFILE_FORCE_COMPAT_MODE"
    elif [[ $REPLY == true ]]; then
        check force-compat both FAIL "$CONF_FILE, CUFILE_FORCE_COMPAT_MODE" "compat mode is forced" "not forced" \
            "set properties.force_compat_mode to false and unset CUFILE_FORCE_COMPAT_MODE"
    fi
    truth "${CUFILE_ALLOW_COMPAT_MODE:-${CFG[properties.allow_compat_mode]:-}}" true
    ALLOW_COMPAT=$REPLY
    check allow-compat info note "$CONF_FILE" "allow_compat_mode is ${CFG[properties.allow_compat_mode]:-not set, so true}" \
        "explicit: false turns a silent copy into an error"

    check_denylist

    local status found
    truth "${CUFILE_USE_PCIP2PDMA:-${CFG[properties.use_pci_p2pdma]:-}}" false
    status=FAIL found="${CFG[properties.use_pci_p2pdma]:-not set}${CUFILE_USE_PCIP2PDMA:+, CUFILE_USE_PCIP2PDMA=$CUFILE_USE_PCIP2PDMA}"
    [[ $REPLY != true ]] || status=ok
    [[ $CONF_STATE != broken || $status == ok ]] || status=unsure
    if [[ -z ${CUFILE_USE_PCIP2PDMA:-} && -n ${CFG_STRING[properties.use_pci_p2pdma]:-} ]]; then
        status=FAIL found="the string \"$found\""
    fi
    check use-p2pdma p2pdma $status "$CONF_FILE: properties.use_pci_p2pdma" "$found" true \
        "$([[ $status == ok ]] || printf '%s' "$make")"

    truth "${CFG[block.nvme.use_pci_p2pdma]:-}" false
    status=FAIL found=${CFG[block.nvme.use_pci_p2pdma]:-not set}
    [[ $REPLY != true ]] || status=ok
    [[ $CONF_STATE != broken ]] || status=unsure
    if [[ -n ${CFG_STRING[block.nvme.use_pci_p2pdma]:-} ]]; then status=FAIL found="the string \"$found\""; fi
    local nested='' key
    for key in "${!CFG[@]}"; do
        [[ $key == *.block.nvme.use_pci_p2pdma ]] && nested=$key
    done
    if [[ $status == FAIL && -n $nested ]]; then
        found="only as $nested, which cuFile ignores"
        make="move \"block\" out of \"${nested%%.block.*}\": it belongs at the top level of $CONF_FILE"
    fi
    check block-p2pdma p2pdma $status "$CONF_FILE: block.nvme.use_pci_p2pdma (top level)" "$found" true \
        "$([[ $status == ok ]] || printf '%s' "$make")"
}

# cuFile leaves alone what its configuration denies: a disk, a mount point or a file system,
# and nvidia-fs a driver. The list is called "denylist", and was called "blacklist".
check_denylist() {
    local key kind value layer both='' nvfs='' near='' mend="take it out of the denylist in $CONF_FILE"
    for key in "${!CFG[@]}"; do
        [[ $key =~ ^(denylist|blacklist)\.(drivers|devices|mounts|filesystems)\. ]] || continue
        kind=${BASH_REMATCH[2]} value=${CFG[$key]}
        case $kind in
            drivers) [[ $value != "${HOOK_KEY:-nvme}" ]] || nvfs+="${nvfs:+, }drivers: $value" ;;
            filesystems) [[ $value != "$DIR_FS" ]] || both+="${both:+, }filesystems: $value" ;;
            mounts)
                [[ $value == / ]] || value=${value%/}
                if [[ $value == "$DIR_POINT" ]]; then
                    both+="${both:+, }mounts: $value"
                elif [[ -n $value && $value != / ]] && covers "$value" "$DIR_PATH"; then
                    near+="${near:+, }mounts: $value"
                fi
                ;;
            devices)
                for layer in "source $DIR_SOURCE" ${LAYERS[@]+"${LAYERS[@]}"}; do
                    layer=${layer#* }
                    layer=${layer%% *}
                    [[ -n $layer && ${value#/dev/} == "${layer#/dev/}" ]] || continue
                    both+="${both:+, }devices: $value"
                    break
                done
                ;;
        esac
    done
    [[ -z $both ]] || check denylist both FAIL "$CONF_FILE: denylist" "$both" "nothing below this folder" "$mend"
    [[ -z $nvfs ]] || check denylist nvidia-fs FAIL "$CONF_FILE: denylist" "$nvfs" "nothing below this folder" "$mend"
    [[ -z $near ]] || check denylist both unsure "$CONF_FILE: denylist" "$near, which is above the mount point" \
        "nothing below this folder" "$mend"
}

# ---------------------------------------------------------------- driver, GPU, kernel

check_driver() {
    local found="$DRIVER_KIND${DRIVER_VERSION:+ $DRIVER_VERSION}"
    local mend="install the open kernel modules of the same version (Ubuntu: nvidia-driver-NNN-server-open)"
    case $DRIVER_KIND in
        open) check driver both ok /proc/driver/nvidia/version "$found" "open kernel modules" ;;
        proprietary) check driver both FAIL /proc/driver/nvidia/version "$found" "open kernel modules" "$mend" ;;
        none) check driver both FAIL /proc/driver/nvidia/version "no NVIDIA driver is loaded" "open kernel modules" \
            "install and load the NVIDIA driver with its open kernel modules" ;;
        *) check driver both unsure /proc/driver/nvidia/version "$found" "open kernel modules" \
            "look at 'modinfo nvidia': the licence of the open modules is 'Dual MIT/GPL'" ;;
    esac

    local need=565
    version_ge "${KERNEL:-0}" 6.15 && need=595
    if [[ -z $DRIVER_VERSION || -z $KERNEL ]]; then
        check driver-version p2pdma unsure /proc/driver/nvidia/version "driver '${DRIVER_VERSION:-?}', kernel '${KERNEL:-?}'" \
            "565 or later, and 595 or later on Linux 6.15 or later" "cat /proc/driver/nvidia/version"
    elif version_ge "$DRIVER_VERSION" $need; then
        check driver-version p2pdma ok /proc/driver/nvidia/version "$DRIVER_VERSION on Linux $KERNEL" "$need or later on this kernel"
    else
        check driver-version p2pdma FAIL /proc/driver/nvidia/version "$DRIVER_VERSION on Linux $KERNEL" \
            "$need or later on this kernel" "install the open driver $need or later"
    fi
}

check_kernel() {
    if [[ -z $KERNEL ]]; then
        check kernel p2pdma unsure /proc/sys/kernel/osrelease "not readable" "6.2 or later" "uname -r"
    elif version_ge "$KERNEL" 6.2; then
        check kernel p2pdma ok /proc/sys/kernel/osrelease "$KERNEL" "6.2 or later"
    else
        check kernel p2pdma FAIL /proc/sys/kernel/osrelease "$KERNEL" "6.2 or later" "install a kernel of 6.2 or later"
    fi
    kernel_p2pdma "$KERNEL"
    case $REPLY in
        y) check kernel-config p2pdma ok "$KCONFIG_SOURCE" "CONFIG_PCI_P2PDMA is on" "CONFIG_PCI_P2PDMA=y" ;;
        n) check kernel-config p2pdma FAIL "$KCONFIG_SOURCE" "CONFIG_PCI_P2PDMA is off" "CONFIG_PCI_P2PDMA=y" \
            "install a kernel that has it (Ubuntu's do since 6.2)" ;;
        *) check kernel-config p2pdma unsure "$KCONFIG_SOURCE" "none is readable" "CONFIG_PCI_P2PDMA=y" \
            "grep CONFIG_PCI_P2PDMA /boot/config-${KERNEL:-\$(uname -r)}" ;;
    esac
    machine_arch
    ARCH=$REPLY
    if [[ -n $ARCH && $ARCH != x86_64 ]]; then
        check arch p2pdma FAIL /proc/sys/kernel/arch "$ARCH" "x86_64: NVIDIA supports P2PDMA for NVMe only there" \
            "use nvidia-fs on $ARCH"
    elif [[ -z $ARCH ]]; then
        check arch p2pdma unsure "/proc/sys/kernel/arch, /proc/driver/nvidia/version" "not readable" x86_64 "uname -m"
    fi
}

listed_gpu() {
    local model=$1 name
    for name in $P2PDMA_GPUS; do
        # The name stands alone: L40S is listed, L40 is not.
        [[ " ${model//[-_\/]/ } " == *" $name "* ]] && return 0
    done
    return 1
}

check_gpus() {
    local gpu model file size params status found mend
    select_gpus "$GPU"
    if ((${#GPUS[@]} == 0)); then
        check gpu both unsure "/proc/driver/nvidia/gpus, /sys/bus/pci/devices" "no NVIDIA GPU" "an NVIDIA GPU" \
            "ls /proc/driver/nvidia/gpus; in a container, start it with the NVIDIA runtime"
        return 0
    fi
    if slurp "$ROOT/proc/driver/nvidia/params"; then params=$REPLY; else params='?'; fi
    check_registry "$params"
    for gpu in "${GPUS[@]}"; do
        gpu_model "$gpu" || true
        model=$REPLY
        file=/sys/bus/pci/devices/$gpu/p2pmem/size
        size=
        if first_line "$ROOT$file"; then size=$REPLY; fi
        status=ok mend=
        if [[ ! $size =~ ^[0-9]+$ ]]; then
            status=unsure found="missing"
            mend="run one CUDA program on this GPU and look again: the driver registers its memory then"
        elif [[ $size =~ ^0+$ ]]; then
            status=FAIL found="0 bytes"
            mend="set the RegistryDwords above, reload the driver, and check that BAR1 is as large as the GPU's memory"
        else
            found="$size bytes"
        fi
        if [[ -z $model ]]; then
            check "gpu-model" p2pdma unsure "/proc/driver/nvidia/gpus/$gpu/information" "no model name" \
                "a data-centre GPU: $P2PDMA_GPUS" "nvidia-smi -L"
        elif listed_gpu "$model"; then
            check "gpu-model" p2pdma ok "/proc/driver/nvidia/gpus/$gpu/information" "$model" "a data-centre GPU: $P2PDMA_GPUS"
        elif [[ $status == ok ]]; then
            check "gpu-model" p2pdma unsure "/proc/driver/nvidia/gpus/$gpu/information" \
                "$model: not on NVIDIA's list, though its memory is registered" "a data-centre GPU: $P2PDMA_GPUS" \
                "compare a timed read with the compat way: nobody promises this GPU"
        else
            check "gpu-model" p2pdma FAIL "/proc/driver/nvidia/gpus/$gpu/information" "$model: not on NVIDIA's list" \
                "a data-centre GPU: $P2PDMA_GPUS" "use nvidia-fs, or another GPU"
        fi
        check "p2pmem" p2pdma $status "$file" "$found" "more than 0: the size of BAR1" "$mend"
        check_iommu "$gpu"
    done
}

check_registry() {
    local params=$1 line='' missing=''
    local want='RMForceStaticBar1=1;RmForceDisableIomapWC=1;'
    local mend="printf 'options nvidia NVreg_RegistryDwords=\"$want\"\\n' | sudo tee /etc/modprobe.d/nvidia-p2pdma.conf; sudo update-initramfs -u; reboot"
    if [[ $params == '?' ]]; then
        check registry p2pdma unsure /proc/driver/nvidia/params "not readable" "$want" "cat /proc/driver/nvidia/params"
        return 0
    fi
    if [[ $params =~ (^|$'\n')RegistryDwords:[[:space:]]*([^$'\n']*) ]]; then
        line=${BASH_REMATCH[2]//\"/}
        line=${line// /}
    fi
    # Whole items: RMForceStaticBar1=10 is not RMForceStaticBar1=1.
    [[ ";${line,,};" == *';rmforcestaticbar1=1;'* ]] || missing+=' RMForceStaticBar1=1'
    [[ ";${line,,};" == *';rmforcedisableiomapwc=1;'* ]] || missing+=' RmForceDisableIomapWC=1'
    if [[ -z $missing ]]; then
        check registry p2pdma ok "/proc/driver/nvidia/params: RegistryDwords" "$line" "$want"
    else
        check registry p2pdma FAIL "/proc/driver/nvidia/params: RegistryDwords" "${line:-empty}, without$missing" "$want" "$mend"
    fi
}

check_iommu() {
    local mend="boot with iommu=pt (or iommu=off) on the kernel command line; your distribution's manual says how"
    if [[ $ARCH == aarch64 ]]; then
        check iommu info note "/sys/class/iommu" "not judged on $ARCH" "-"
        return 0
    fi
    iommu_state "$1"
    case $REPLY in
        off | passthrough) check iommu both ok "/sys/class/iommu, iommu_group of $1, /proc/cmdline" "$REPLY" "off, or passthrough" ;;
        translated) check iommu both unsure "/sys/class/iommu, iommu_group of $1, /proc/cmdline" \
            "on, and it translates: NVIDIA promises nothing here" "off, or passthrough" "$mend" ;;
        *) check iommu both unsure "/sys/class/iommu, /proc/cmdline" "cannot be told" "off, or passthrough" "ls /sys/class/iommu" ;;
    esac
}

# ---------------------------------------------------------------- the folder

check_storage() {
    if ! resolve_storage; then
        check storage both unsure /proc/self/mountinfo "$STORAGE_ERROR" "the disk below $DIR_PATH" \
            "findmnt -T $(shell_word "$DIR_PATH" && printf '%s' "$REPLY")"
        HOOK_KEY=nvme
        return 0
    fi
    layers_line
    check storage info note /proc/self/mountinfo "$DIR_FS on $DIR_POINT: $REPLY" "-"
    check_file_system
    if [[ $HOOK_KEY == nvme ]]; then check_layers; fi
}

# Also sets HOOK_KEY: the line of /proc/driver/nvidia-fs/modules that must be there.
check_file_system() {
    local data mend point
    shell_word "$DIR_POINT"
    point=$REPLY
    HOOK_KEY=nvme
    case $DIR_FS in
        xfs) check file-system both ok /proc/self/mountinfo "xfs" "ext4 with data=ordered, or xfs" ;;
        ext4)
            data=
            option_value "$DIR_OPTIONS" data && data=$REPLY
            mend="check_nvme_mount.sh $point prints the line for /etc/fstab"
            if [[ $data == ordered ]]; then
                check file-system both ok /proc/self/mountinfo "ext4, data=ordered" "ext4 with data=ordered, or xfs"
            else
                check file-system both FAIL /proc/self/mountinfo "ext4, ${data:+data=$data}${data:-no explicit data=ordered}" \
                    "ext4 mounted with an explicit data=ordered, or xfs" "$mend"
            fi
            ;;
        nfs | nfs4)
            HOOK_KEY=rpcrdma
            check file-system p2pdma FAIL /proc/self/mountinfo "$DIR_FS" "a local NVMe disk" "put the data on a local NVMe disk"
            option_value "$DIR_OPTIONS" proto || REPLY=tcp
            if [[ $REPLY == rdma* ]]; then
                check file-system nvidia-fs ok /proc/self/mountinfo "$DIR_FS over RDMA" "proto=rdma"
            else
                check file-system nvidia-fs FAIL /proc/self/mountinfo "$DIR_FS over $REPLY" "proto=rdma" \
                    "mount it with proto=rdma, which needs an RDMA network card on both sides"
            fi
            ;;
        lustre | beegfs | gpfs | wekafs)
            case $DIR_FS in
                lustre) HOOK_KEY=lnet ;;
                gpfs) HOOK_KEY=mmfslinux ;;
                wekafs) HOOK_KEY=wekafsio ;;
                *) HOOK_KEY=$DIR_FS ;;
            esac
            check file-system p2pdma FAIL /proc/self/mountinfo "$DIR_FS" "a local NVMe disk" "put the data on a local NVMe disk"
            check file-system nvidia-fs unsure /proc/self/mountinfo "$DIR_FS, which this script cannot judge" \
                "its vendor's RDMA set-up" "follow the vendor's guide for GPUDirect Storage, then run gdscheck -p"
            ;;
        overlay)
            HOOK_KEY=
            check file-system both FAIL /proc/self/mountinfo "overlay${CONTAINER:+: the inside of a $CONTAINER container}" \
                "ext4 with data=ordered, or xfs" \
                "keep the data out of the image: mount a folder of the host, such as --volume /data:/data"
            ;;
        virtiofs)
            HOOK_KEY=
            check file-system nvidia-fs FAIL /proc/self/mountinfo "$DIR_FS" "ext4 with data=ordered, or xfs" "give the machine the NVMe disk itself"
            check file-system p2pdma unsure /proc/self/mountinfo "$DIR_FS: it depends on the host" \
                "ext4 with data=ordered, or xfs, on NVMe" "give the machine the NVMe disk itself"
            ;;
        *)
            HOOK_KEY=
            check file-system both FAIL /proc/self/mountinfo "${DIR_FS:-nothing}" "ext4 with data=ordered, or xfs" \
                "put the data on an NVMe disk with xfs, or ext4 mounted with data=ordered"
            ;;
    esac
}

check_layers() {
    local where="/sys/class/block/$BLOCK" transport
    transport_word
    transport=$REPLY
    if [[ -n $HAS_OTHER ]]; then
        check disk both FAIL "$where" "$HAS_OTHER: no NVMe disk" "NVMe disks only" "put the data on a local NVMe disk"
    else
        check_transport "$where" "$transport"
    fi
    if [[ -n $HAS_CRYPT ]]; then
        check dm-crypt both FAIL "$where" "encrypted: $HAS_CRYPT" "no dm-crypt: the CPU must decrypt each block" \
            "keep the data on a file system without dm-crypt, or on a self-encrypting drive"
    fi
    check_raid "$where"
    if [[ -n $HAS_DM ]]; then
        check device-mapper p2pdma FAIL "$where" "$HAS_DM" "the file system on the disk or its partition" \
            "make the file system on a plain partition"
        check device-mapper nvidia-fs unsure "$where" "$HAS_DM: NVIDIA says nothing of it" \
            "the file system on the disk, its partition or md RAID 0" "make the file system on a plain partition"
    fi
    if [[ -n $HAS_MPATH ]]; then
        check dm-multipath both FAIL "$where" "$HAS_MPATH" "no multipath map" "exclude the disk in /etc/multipath.conf"
    fi
    if [[ -n $HAS_INTEGRITY ]]; then
        check integrity both FAIL "$where" "$HAS_INTEGRITY" "no protection information on the namespace" \
            "format the namespace with a metadata size of 0 (this erases it)"
    fi
    check_multipath
}

check_transport() {
    local where=$1 transport=$2
    case $transport in
        pcie) check transport both ok "$where/device/transport" pcie "pcie" ;;
        rdma)
            HOOK_KEY=nvme_rdma
            check transport nvidia-fs ok "$where/device/transport" rdma "pcie or rdma"
            check transport p2pdma FAIL "$where/device/transport" rdma pcie "put the data on a local NVMe disk"
            ;;
        unknown | none) check transport both unsure "$where/device/transport" "not readable" "pcie" "cat /sys/class/nvme/nvme*/transport" ;;
        *) check transport both FAIL "$where/device/transport" "$transport" "pcie (or rdma, with nvidia-fs)" \
            "put the data on a local NVMe disk" ;;
    esac
}

check_raid() {
    [[ -n $HAS_MD ]] || {
        check raid p2pdma ok "$1" "no RAID" "no RAID"
        return 0
    }
    check raid p2pdma FAIL "$1" "md: $HAS_MD" "no RAID" "keep the data on one disk, or use nvidia-fs"
    local level status=ok mend='' found="md: $HAS_MD"
    for level in $HAS_MD; do
        case $level in
            raid0) ;;
            raid4 | raid5 | raid6)
                check raid nvidia-fs FAIL "$1" "$found: parity needs the CPU" "RAID 0" "use RAID 0, or single disks"
                return 0
                ;;
            *) status=unsure mend="use RAID 0, or single disks: NVIDIA promises no other level" ;;
        esac
    done
    # cuFile learns the members of an array from udev.
    if [[ $status == ok ]] && ! grep -qs '^E:MD_LEVEL=' "$ROOT/run/udev/data/b$DIR_DEV"; then
        status=unsure found+=", but udev does not know the array"
        mend="in /lib/udev/rules.d/63-md-raid-arrays.rules, let mdadm --detail --export fill in the array; then restart udev"
    fi
    check raid nvidia-fs $status "$1, /run/udev/data/b$DIR_DEV" "$found" "RAID 0 that udev describes" "$mend"
}

check_multipath() {
    nvme_multipath
    local file=/sys/module/nvme_core/parameters/multipath
    case $REPLY in
        N) check nvme-multipath p2pdma ok $file N "N: the multipath layer refuses peer memory" ;;
        absent) check nvme-multipath p2pdma ok $file "not built into this kernel" N ;;
        '') check nvme-multipath p2pdma unsure $file "not readable" N "cat $file" ;;
        *)
            local found=$REPLY
            ((MULTI_PATHS < 2)) || found+=", $MULTI_PATHS paths"
            check nvme-multipath p2pdma FAIL $file "$found" "N: the multipath layer refuses peer memory" \
                "echo 'options nvme_core multipath=N' | sudo tee /etc/modprobe.d/nvme-p2pdma.conf; sudo update-initramfs -u; reboot"
            ;;
    esac
}

# ---------------------------------------------------------------- nvidia-fs

check_nvidia_fs() {
    local dir=/proc/driver/nvidia-fs version='' line key found='' ops=''
    local install="install_nvidia_fs.sh --plan says how to install it here; then: sudo modprobe nvidia-fs"
    if [[ ! -d $ROOT$dir ]]; then
        if [[ -d $ROOT/sys/module/nvidia_fs ]]; then
            check nvidia-fs nvidia-fs unsure $dir "the module is loaded, but its /proc folder is not visible" "loaded" \
                "look on the host: a container may hide $dir"
        else
            check nvidia-fs nvidia-fs FAIL $dir "not loaded" "loaded" "$install"
        fi
        return 0
    fi
    if first_line "$ROOT$dir/version"; then version=${REPLY#version: }; fi
    check nvidia-fs nvidia-fs ok $dir "loaded${version:+, $version}" "loaded"

    # A container shows /proc of the host, but not its devices; without one cuFile copies.
    local device devices=''
    for device in "$ROOT"/dev/nvidia-fs*; do
        [[ ! -e $device ]] || devices=yes
    done
    if [[ -n $devices ]]; then
        check nvidia-fs-device nvidia-fs ok "/dev/nvidia-fs*" "there" "the module's devices"
    elif [[ ! -d $ROOT/dev ]]; then
        check nvidia-fs-device nvidia-fs unsure "/dev/nvidia-fs*" "/dev is not there" "the module's devices" "ls /dev/nvidia-fs*"
    else
        check nvidia-fs-device nvidia-fs FAIL "/dev/nvidia-fs*" "none${CONTAINER:+ in a $CONTAINER container}" "the module's devices" \
            "start the container with --device for each /dev/nvidia-fs* of the host; on the host itself, load nvidia-fs anew"
    fi

    if [[ ! -f $ROOT$dir/modules || ! -r $ROOT$dir/modules ]]; then
        check nvidia-fs-hook nvidia-fs unsure $dir/modules "not readable" "a line '${HOOK_KEY:-nvme}:'" "cat $dir/modules"
    elif [[ -n $HOOK_KEY ]]; then
        while IFS= read -r line || [[ -n $line ]]; do
            key=${line%%:*}
            [[ $line == *:* && $key == "$HOOK_KEY" ]] && found=${line%$'\r'}
        done <"$ROOT$dir/modules"
        if [[ -n $found ]]; then
            check nvidia-fs-hook nvidia-fs ok $dir/modules "$found" "a line '$HOOK_KEY:'"
        else
            check_missing_hook "$dir/modules"
        fi
    fi
    if slurp "$ROOT$dir/stats" && [[ $REPLY =~ (^|$'\n')Ops[[:space:]]*:[[:space:]]*([^$'\n']*) ]]; then
        ops=${BASH_REMATCH[2]}
        check nvidia-fs-ops info note $dir/stats "Ops: $ops" "Read counts up while a native read runs"
    else
        check nvidia-fs-ops info note $dir/stats "no Ops line" "Read counts up while a native read runs"
    fi
    if version_ge "${KERNEL:-0}" 6.17 && [[ $HOOK_KEY == nvme ]]; then
        check nvidia-fs-sgl info note /proc/sys/kernel/osrelease \
            "NVIDIA knows of hangs of nvidia-fs on Linux 6.17 and later with disks that use scatter-gather lists" \
            "p2pdma where it is open"
    fi
}

check_missing_hook() {
    local mend="this nvme driver does not know nvidia-fs: use a kernel or driver that does (Ubuntu's nvidia flavour, DOCA-OFED), or P2PDMA"
    if [[ $HOOK_KEY == nvme ]]; then
        nvme_hook
        [[ $REPLY != y ]] || mend="the nvme driver has the hook, but nvidia-fs did not take it: load nvidia-fs after nvme, and compare their versions"
    else
        mend="no driver of this transport has registered with nvidia-fs: install the one of DOCA-OFED"
    fi
    check nvidia-fs-hook nvidia-fs FAIL "$1" "no line '$HOOK_KEY:'" "a line '$HOOK_KEY:'" "$mend"
}

# ---------------------------------------------------------------- gdscheck

# Reads the DRIVER CONFIGURATION part of saved gdscheck output into DRIVER_LINES.
# Other parts repeat the same names with other meanings, so they do not count.
read_gdscheck() {
    declare -gA DRIVER_LINES=()
    local line name value inside=0 seen=0
    while IFS= read -r line || [[ -n $line ]]; do
        line=${line%$'\r'}
        line=${line#"${line%%[![:space:]]*}"}
        line=${line%"${line##*[![:space:]]}"}
        if [[ $line == 'DRIVER CONFIGURATION'* ]]; then
            inside=1 seen=1
        elif [[ $line =~ ^[A-Z][A-Z\ ]+:$ ]]; then
            inside=0
        elif ((inside)) && [[ $line == *:* ]]; then
            name=${line%%:*}
            value=${line#*:}
            name=${name%"${name##*[![:space:]]}"}
            value=${value#"${value%%[![:space:]]*}"}
            DRIVER_LINES[$name]=$value
        fi
    done <"$GDSCHECK"
    ((seen && ${#DRIVER_LINES[@]} > 0)) ||
        usage_error "--gdscheck: '$GDSCHECK' has no DRIVER CONFIGURATION part; save the whole output of 'gdscheck -p'"
}

# has_mode VALUE MODE: is MODE one of the comma-separated words?
has_mode() {
    local list=",${1// /},"
    [[ ${list,,} == *",$2,"* ]]
}

check_gdscheck() {
    [[ -n $GDSCHECK ]] || return 0
    read_gdscheck
    local name=NVMe value nvfs='' p2p=''
    case $HOOK_KEY in
        nvme_rdma) name=NVMeOF ;;
        rpcrdma) name=NFS ;;
    esac
    value=${DRIVER_LINES[$name]:-}
    case ${value,,} in
        '') ;;
        supported) nvfs=yes ;;
        unsupported) nvfs=no ;;
        *)
            if has_mode "$value" nvfs; then nvfs=yes; else nvfs=no; fi
            if has_mode "$value" p2pdma; then p2p=yes; else p2p=no; fi
            ;;
    esac
    # Before GDS 1.16, P2PDMA has a line of its own.
    if [[ $name == NVMe && -n ${DRIVER_LINES[NVMe P2PDMA]:-} ]]; then
        p2p=no
        [[ ${DRIVER_LINES[NVMe P2PDMA],,} != supported ]] || p2p=yes
    fi
    gdscheck_row nvidia-fs "$nvfs" "$name : ${value:-no line}"
    gdscheck_row p2pdma "$p2p" "$name : ${value:-no line}${DRIVER_LINES[NVMe P2PDMA]:+; NVMe P2PDMA : ${DRIVER_LINES[NVMe P2PDMA]}}"
    [[ $nvfs != yes ]] || settle_platform nvidia-fs
    [[ $p2p != yes ]] || settle_platform p2pdma
}

gdscheck_row() {
    case $2 in
        yes) check gdscheck "$1" ok "$GDSCHECK" "$3" "cuFile offers $1" ;;
        no) check gdscheck "$1" FAIL "$GDSCHECK" "$3" "cuFile offers $1" "mend the other rows, then save gdscheck -p anew" ;;
        *) check gdscheck "$1" unsure "$GDSCHECK" "$3" "a line for this kind of disk" "save gdscheck -p anew" ;;
    esac
}

# cuFile's own yes settles what could not be read of the platform. It says nothing of
# the folder, nor of the IOMMU, and it outweighs no failure.
settle_platform() {
    local i
    for i in "${!C_ID[@]}"; do
        [[ ${C_STATUS[i]} == unsure && ${C_WAY[i]} == "$1" ]] || continue
        case ${C_ID[i]} in
            kernel | kernel-config | driver-version | registry | p2pmem | nvidia-fs | nvidia-fs-hook)
                C_STATUS[i]=ok
                C_FOUND[i]+="; gdscheck says cuFile offers $1"
                ;;
        esac
    done
}

# ---------------------------------------------------------------- probe

PROBE_FILE='' PROBE_PID='' DD_SAID=''
PROBE_ROOM=$((64 << 20))
remove_probe() {
    [[ -z $PROBE_PID ]] || kill "$PROBE_PID" 2>/dev/null || true
    [[ -z $PROBE_FILE ]] || rm -f -- "$PROBE_FILE"
    PROBE_FILE='' PROBE_PID=''
}

probe() {
    ((PROBE)) || return 0
    if ((DRY)); then
        check probe info note "$DIR_PATH" "dry run: one file of 4 MiB would be written, read and removed" "O_DIRECT works"
        return 0
    fi
    trap remove_probe EXIT
    trap 'remove_probe; exit 130' INT
    trap 'remove_probe; exit 143' TERM
    trap 'remove_probe; exit 129' HUP
    PROBE_FILE=$(mktemp -- "$DIR_REAL/.gds_probe.XXXXXXXX" 2>/dev/null) || {
        PROBE_FILE=
        check probe info note "$DIR_PATH" "no file can be made here" "a folder this user may write to, for --probe" \
            "run --probe as a user who may write there"
        return 0
    }
    # Never the last bytes of a disk: others write there, too.
    local room
    room=$(stat -f -c '%a %S' -- "$DIR_REAL" 2>/dev/null) || room=
    if [[ ! $room =~ ^([0-9]+)\ ([1-9][0-9]*)$ ]] || ((BASH_REMATCH[1] < PROBE_ROOM / BASH_REMATCH[2])); then
        check probe info note "$DIR_PATH" "less than $((PROBE_ROOM >> 20)) MiB are free, so nothing was written" \
            "room for a file of 4 MiB" "make room, and probe again"
    elif ! run_dd if=/dev/zero of="$PROBE_FILE" oflag=direct conv=notrunc,fsync; then
        probe_failed write
    elif ! run_dd if="$PROBE_FILE" of=/dev/null iflag=direct; then
        probe_failed read
    else
        check probe both ok "$DIR_PATH" "4 MiB written and read with O_DIRECT" "O_DIRECT works"
    fi
    remove_probe
    trap - EXIT INT TERM HUP
}

# EINVAL is how a file system says that it has no O_DIRECT. Whatever else went wrong
# (a quota, an I/O error, a disk that hangs) says nothing of that.
probe_failed() {
    if [[ $DD_SAID == *'Invalid argument'* ]]; then
        check probe both FAIL "$DIR_PATH" "an O_DIRECT $1 fails" "O_DIRECT works" \
            "use xfs or ext4 on a local disk: cuFile needs O_DIRECT"
    else
        check probe both unsure "$DIR_PATH" "an O_DIRECT $1 could not be tried: ${DD_SAID:-no answer within 60 s}" \
            "O_DIRECT works" "mend that, and probe again"
    fi
}

# In the background, because bash answers a signal only when no foreground command runs.
run_dd() {
    local status=0 said
    # What dd says comes through a pipe that is read after it ended; no second file is made.
    exec {said}< <(exec timeout 60 dd bs=1M count=4 status=none "$@" 2>&1 >/dev/null)
    PROBE_PID=$!
    wait "$PROBE_PID" || status=$?
    PROBE_PID=
    DD_SAID=
    IFS= read -r DD_SAID <&"$said" || true
    exec {said}<&-
    DD_SAID=${DD_SAID##*: }
    return "$status"
}

# ---------------------------------------------------------------- verdict

decide() {
    local nvfs p2p cufile_state=ok i
    way_state nvidia-fs
    nvfs=$REPLY
    way_state p2pdma
    p2p=$REPLY
    WAY_NVFS=$nvfs WAY_P2P=$p2p NATIVE=() BOTH=false
    for i in "${!C_ID[@]}"; do
        [[ ${C_WAY[i]} != cufile || ${C_STATUS[i]} != FAIL ]] || cufile_state=FAIL
    done
    # Order matters: a machine without a GPU driver moves no bytes to a GPU, and where
    # kvikio leaves cuFile alone no native way is taken, however open it is.
    local wsl
    status_of wsl
    wsl=$REPLY
    if [[ $DRIVER_KIND == none && $wsl != FAIL ]]; then
        VERDICT=unknown CODE=1
        REASONS=("no NVIDIA driver is loaded here, so nothing goes to a GPU")
    elif [[ $cufile_state == FAIL && $KVIKIO_MODE == OFF && $KVIKIO != yes ]]; then
        VERDICT=unknown CODE=1
        REASONS=("KVIKIO_COMPAT_MODE=OFF insists on cuFile, which cannot work here: reads may fail")
        add_reasons cufile
    elif [[ $cufile_state == FAIL ]]; then
        VERDICT=kvikio-posix CODE=11 REASONS=()
        add_reasons cufile
    elif [[ $nvfs == open || $p2p == open ]]; then
        [[ $nvfs != open ]] || NATIVE+=(nvidia-fs)
        [[ $p2p != open ]] || NATIVE+=(p2pdma)
        VERDICT=${NATIVE[0]} CODE=0
        REASONS=("every precondition of ${NATIVE[*]} is met")
        if ((${#NATIVE[@]} == 2)); then
            # With use_pci_p2pdma set, which P2PDMA needs, cuFile takes it for NVMe.
            VERDICT=p2pdma BOTH=true
            REASONS=("both native ways are open, nvidia-fs and p2pdma; cuFile takes p2pdma while use_pci_p2pdma is true")
        fi
    elif [[ $nvfs == unknown || $p2p == unknown ]]; then
        VERDICT=unknown CODE=1 REASONS=()
        [[ $nvfs != unknown ]] || add_reasons nvidia-fs unsure
        [[ $p2p != unknown ]] || add_reasons p2pdma unsure
    elif [[ $ALLOW_COMPAT == false ]]; then
        REASONS=("no native way is open, and allow_compat_mode is false, so cuFile refuses the file")
        if [[ $KVIKIO_MODE == OFF ]]; then
            VERDICT=unknown CODE=1
            REASONS+=("KVIKIO_COMPAT_MODE=OFF insists on cuFile: reads fail")
        else
            VERDICT=kvikio-posix CODE=11
        fi
        add_reasons nvidia-fs
        add_reasons p2pdma
    else
        VERDICT=cufile-compat CODE=10 REASONS=()
        add_reasons nvidia-fs
        add_reasons p2pdma
    fi
}

# Adds the rows of a way that stand in its way, each once.
add_reasons() {
    local way=$1 status=${2:-FAIL} i text old known
    for i in "${!C_ID[@]}"; do
        [[ ${C_STATUS[i]} == "$status" ]] || continue
        case ${C_WAY[i]} in
            both | cufile) text="${C_ID[i]}: ${C_FOUND[i]}" ;;
            "$way") text="$way: ${C_ID[i]}: ${C_FOUND[i]}" ;;
            *) continue ;;
        esac
        known=0
        for old in "${REASONS[@]:-}"; do
            [[ $old != "$text" ]] || known=1
        done
        ((known)) || REASONS+=("$text")
    done
}

print_table() {
    local i reason gpus
    printf 'path=%s\n' "$VERDICT"
    printf 'native=%s\n' "${NATIVE[*]:-none}"
    printf 'folder: %s\n' "$DIR_PATH"
    layers_line
    printf 'below it: %s on %s: %s\n' "${DIR_FS:-unknown file system}" "${DIR_POINT:-unknown mount}" "$REPLY"
    gpus=${GPUS[*]:-none}
    printf 'GPU: %s\n' "$gpus"
    for reason in "${REASONS[@]}"; do printf 'why: %s\n' "$reason"; done
    printf '\n%-6s  %-9s  %-15s  %s\n' STATUS WAY PRECONDITION 'FOUND | MUST BE | LOOKED AT'
    for i in "${!C_ID[@]}"; do
        printf '%-6s  %-9s  %-15s  %s | %s | %s\n' "${C_STATUS[i]}" "${C_WAY[i]}" "${C_ID[i]}" \
            "${C_FOUND[i]}" "${C_WANT[i]}" "${C_LOOKED[i]}"
        [[ -z ${C_MEND[i]} ]] || printf '%-6s  mend: %s\n' '' "${C_MEND[i]}"
    done
}

print_json() {
    local i rows='' row q_dir q_fs q_point q_opt q_block q_reasons q_native q_gpus q_layers q_word q_error q_file
    for i in "${!C_ID[@]}"; do
        row=
        json_str "${C_ID[i]}" && row+="\"id\": $REPLY"
        json_str "${C_WAY[i]}" && row+=", \"way\": $REPLY"
        json_str "${C_STATUS[i],,}" && row+=", \"status\": $REPLY"
        json_str "${C_LOOKED[i]}" && row+=", \"looked_at\": $REPLY"
        json_str "${C_FOUND[i]}" && row+=", \"found\": $REPLY"
        json_str "${C_WANT[i]}" && row+=", \"must_be\": $REPLY"
        json_str "${C_MEND[i]}" && row+=", \"mend\": $REPLY"
        rows+="${rows:+,}"$'\n'"    {$row}"
    done
    json_str "$DIR_PATH" && q_dir=$REPLY
    json_str "$DIR_FS" && q_fs=$REPLY
    json_str "$DIR_POINT" && q_point=$REPLY
    json_str "$DIR_OPTIONS" && q_opt=$REPLY
    json_str "$BLOCK" && q_block=$REPLY
    json_str "$STORAGE_ERROR" && q_error=$REPLY
    json_str "$CONF_FILE" && q_file=$REPLY
    transport_word && json_str "$REPLY" && q_word=$REPLY
    json_list "${REASONS[@]}" && q_reasons=$REPLY
    json_list ${NATIVE[@]+"${NATIVE[@]}"} && q_native=$REPLY
    json_list ${GPUS[@]+"${GPUS[@]}"} && q_gpus=$REPLY
    json_list ${LAYERS[@]+"${LAYERS[@]}"} && q_layers=$REPLY
    cat <<TEXT
{
  "tool": "gds_doctor",
  "format": 1,
  "path": "$VERDICT",
  "exit_code": $CODE,
  "native": $q_native,
  "both_native": $BOTH,
  "ways": {"nvidia-fs": "$WAY_NVFS", "p2pdma": "$WAY_P2P"},
  "reasons": $q_reasons,
  "dir": $q_dir,
  "storage": {"file_system": $q_fs, "mount_point": $q_point, "options": $q_opt, "device": $q_block, "layers": $q_layers, "transport": $q_word, "error": $q_error},
  "gpus": $q_gpus,
  "driver": {"kind": "$DRIVER_KIND", "version": "$DRIVER_VERSION"},
  "cufile_json": {"file": $q_file, "state": "$CONF_STATE", "allow_compat_mode": $ALLOW_COMPAT},
  "kvikio": {"prefers_compat_mode": $(kvikio_json), "mode": "$KVIKIO_MODE"},
  "checks": [$rows
  ]
}
TEXT
}

kvikio_json() {
    case $KVIKIO in
        yes) printf true ;;
        no) printf false ;;
        *) printf null ;;
    esac
}

main() {
    parse_arguments "$@"
    require_sysroot
    locate_dir "$DIR"
    kernel_release
    KERNEL=$REPLY
    find_container
    read_driver
    read_configuration
    ask_kvikio
    check_wsl
    check_udev
    check_libcufile
    check_kvikio
    check_driver
    check_kernel
    check_gpus
    HOOK_KEY=nvme
    check_storage
    check_nvidia_fs
    check_configuration
    check_gdscheck
    probe
    decide
    if ((JSON)); then print_json; else print_table; fi
    exit "$CODE"
}

main "$@"
