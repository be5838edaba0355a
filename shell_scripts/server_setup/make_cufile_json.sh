#!/usr/bin/env bash
# Write a cuFile configuration, with a file that explains each setting.
set -euo pipefail

# The folder of this script, also if it runs through a symlink, and independent of CDPATH.
HERE=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
# shellcheck source=lib.sh
source "$HERE/lib.sh"

usage() {
    cat <<'TEXT'
Usage: make_cufile_json.sh --mode p2pdma | nvfs | compat [OPTION]... [-o FILE]

Prints a cuFile configuration, or writes it to FILE, with FILE.comments.txt beside
it, because JSON has no room for comments.

  --mode p2pdma    native through the kernel's PCI peer-to-peer DMA
  --mode nvfs      native through nvidia-fs
  --mode compat    through host memory, on purpose

Options:
  -o FILE                    write there instead of to the terminal
  --force                    replace FILE and its comments when they exist
  --allow-compat true|false  may cuFile copy through host memory where the native
                             way is not open? Default: false for p2pdma and nvfs,
                             so that a fallback is an error and not a secret;
                             true for compat
  --dry-run                  print what would be written; write nothing
  --json                     say what was done as one JSON object
  -h, --help                 this text

Use it with: export CUFILE_ENV_PATH_JSON=FILE, or as /etc/cufile.json.

Exit: 0 done, 1 FILE cannot be written, 2 wrong usage, 3 FILE exists.
TEXT
}

MODE='' OUT='' FORCE=0 DRY=0 JSON=0 ALLOW=''
parse_arguments() {
    while (($#)); do
        case $1 in
            -h | --help)
                usage
                exit 0
                ;;
            --mode | -o | --allow-compat)
                need_value "$1" $#
                case $1 in
                    --mode) MODE=$2 ;;
                    -o) OUT=$2 ;;
                    --allow-compat) ALLOW=$2 ;;
                esac
                [[ -n $2 ]] || usage_error "$1 got an empty value"
                shift
                ;;
            --mode=*) MODE=${1#*=} ;;
            --allow-compat=*) ALLOW=${1#*=} ;;
            --force) FORCE=1 ;;
            --dry-run) DRY=1 ;;
            --json) JSON=1 ;;
            *) usage_error "unknown argument '$1'" ;;
        esac
        shift
    done
    case $MODE in
        p2pdma | nvfs | compat) ;;
        '') usage_error "no mode given; add --mode p2pdma, nvfs or compat" ;;
        *) usage_error "--mode '$MODE' is unknown; take p2pdma, nvfs or compat" ;;
    esac
    case $ALLOW in
        true | false) ;;
        '') if [[ $MODE == compat ]]; then ALLOW=true; else ALLOW=false; fi ;;
        *) usage_error "--allow-compat '$ALLOW' is neither true nor false" ;;
    esac
    [[ $MODE != compat || $ALLOW == true ]] ||
        usage_error "--mode compat with --allow-compat false would forbid every read; take another mode"
    ((!FORCE)) || [[ -n $OUT ]] || usage_error "--force goes with -o FILE"
    ((!JSON)) || [[ -n $OUT ]] || usage_error "--json goes with -o FILE: without it the configuration itself is printed"
}

# Without a trailing comment anywhere: other JSON readers refuse cuFile's own style.
configuration() {
    local p2pdma=false force=false
    [[ $MODE != p2pdma ]] || p2pdma=true
    [[ $MODE != compat ]] || force=true
    cat <<TEXT
{
  "logging": {
    "level": "ERROR"
  },
  "profile": {
    "nvtx": false,
    "cufile_stats": 0
  },
  "execution": {
    "max_io_threads": 4,
    "max_io_queue_depth": 128,
    "parallel_io": true,
    "min_io_threshold_size_kb": 8192,
    "max_request_parallelism": 4
  },
  "properties": {
    "max_direct_io_size_kb": 16384,
    "max_device_cache_size_kb": 131072,
    "per_buffer_cache_size_kb": 1024,
    "max_device_pinned_mem_size_kb": 33554432,
    "posix_pool_slab_size_kb": [4, 1024, 16384],
    "posix_pool_slab_count": [128, 64, 64],
    "io_batchsize": 128,
    "use_poll_mode": false,
    "use_pci_p2pdma": $p2pdma,
    "allow_compat_mode": $ALLOW,
    "force_compat_mode": $force
  },
  "fs": {
    "generic": {
      "posix_unaligned_writes": false
    }
  },
  "block": {
    "nvme": {
      "use_pci_p2pdma": $p2pdma
    }
  }
}
TEXT
}

comments() {
    cat <<TEXT
cuFile configuration for --mode $MODE, written by make_cufile_json.sh.

properties.use_pci_p2pdma and block.nvme.use_pci_p2pdma
    Both must be true for P2PDMA. "block" stands at the top level: cuFile ignores
    it without a word when it stands inside "fs".
properties.allow_compat_mode ($ALLOW)
    true lets cuFile copy through host memory wherever the native way is not open,
    without saying so. false makes that an error; kvikio then falls back to POSIX
    reads unless KVIKIO_COMPAT_MODE=OFF.
properties.force_compat_mode
    true sends every read through host memory.
properties.max_device_cache_size_kb / per_buffer_cache_size_kb
    Pool of bounce buffers on the GPU: 128 MiB in buffers of 1 MiB. Their number
    must be at least io_batchsize (128).
properties.posix_pool_slab_size_kb / posix_pool_slab_count
    Pool of host buffers for compat mode, one count for each size.
properties.max_device_pinned_mem_size_kb
    The most GPU memory that may be pinned: 32 GiB. Raise it for larger arenas.
execution.max_io_threads / max_io_queue_depth / parallel_io
    cuFile's own threads for one GPU. kvikio splits reads by itself
    (KVIKIO_NTHREADS, KVIKIO_TASK_SIZE), so 4 suffice.
execution.min_io_threshold_size_kb / max_request_parallelism
    cuFile splits a read larger than this into at most so many parts.
logging.level
    DEBUG or TRACE, in cufile.log of the working folder, to see which way is taken.

Check it with: gds_doctor.sh --cufile-json THIS_FILE FOLDER
TEXT
}

check_names() {
    local dir
    dir=$(dirname -- "$OUT")
    [[ -d $dir ]] || usage_error "-o: there is no folder '$dir'; make it first"
    [[ ! -d $OUT ]] || usage_error "-o: '$OUT' is a folder; give a file name"
    [[ ! -d $COMMENTS ]] || usage_error "-o: '$COMMENTS' is a folder, where the comments would go; give another name"
}

refuse_existing() {
    local file
    ((!FORCE)) || return 0
    for file in "$OUT" "$COMMENTS"; do
        if [[ -e $file || -L $file ]]; then
            die 3 "'$file' exists and was left alone; choose another name, or add --force"
        fi
    done
}

TEMPS=()
clean_up() {
    local f
    for f in ${TEMPS[@]+"${TEMPS[@]}"}; do rm -f -- "$f"; done
}

cannot_write() {
    die 1 "cannot write '$1'; nothing was changed. Is the folder writable, and is there room?"
}

# A link fails where a name has been taken since the check above. Some file systems (exFAT,
# CIFS) have no links; there mv -n leaves the temporary file where the name is taken.
give_name() {
    ln -T -- "$1" "$2" 2>/dev/null && return 0
    [[ ! -e $2 && ! -L $2 ]] && mv -nT -- "$1" "$2" 2>/dev/null && [[ ! -e $1 ]]
}

# Both files are complete before either gets its name. The comments come first: a
# configuration without them would be half of what was asked for.
write_files() {
    local dir temp text
    dir=$(dirname -- "$OUT")
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    for text in comments configuration; do
        temp=$(mktemp -- "$dir/.cufile.XXXXXX" 2>/dev/null) || cannot_write "$OUT"
        TEMPS+=("$temp")
        "$text" 2>/dev/null >"$temp" || cannot_write "$OUT"
        "$text" | cmp -s - "$temp" || cannot_write "$OUT"
        # mktemp makes a private file; a configuration is for everyone.
        chmod 644 -- "$temp" 2>/dev/null || cannot_write "$OUT"
    done
    if ((FORCE)); then
        mv -fT -- "${TEMPS[0]}" "$COMMENTS" 2>/dev/null || cannot_write "$COMMENTS"
        mv -fT -- "${TEMPS[1]}" "$OUT" 2>/dev/null || cannot_write "$OUT"
    else
        give_name "${TEMPS[0]}" "$COMMENTS" || cannot_write "$COMMENTS"
        if ! give_name "${TEMPS[1]}" "$OUT"; then
            rm -f -- "$COMMENTS"
            cannot_write "$OUT"
        fi
    fi
    clean_up
    TEMPS=()
    trap - EXIT INT TERM HUP
}

report() {
    local q_out q_comments
    if ((JSON)); then
        json_str "$OUT" && q_out=$REPLY
        json_str "$COMMENTS" && q_comments=$REPLY
        printf '{"tool": "make_cufile_json", "exit_code": 0, "mode": "%s", "allow_compat_mode": %s, "file": %s, "comments": %s, "written": %s}\n' \
            "$MODE" "$ALLOW" "$q_out" "$q_comments" "$1"
    elif [[ $1 == true ]]; then
        printf "wrote '%s' and '%s'\n" "$OUT" "$COMMENTS"
    fi
}

main() {
    parse_arguments "$@"
    if [[ -z $OUT ]]; then
        configuration
        exit 0
    fi
    COMMENTS=$OUT.comments.txt
    check_names
    if ((DRY)); then
        ((JSON)) || {
            printf "would write '%s':\n" "$OUT"
            configuration
            printf "would write '%s':\n" "$COMMENTS"
            comments
        }
        report false
        exit 0
    fi
    refuse_existing
    write_files
    report true
}

main "$@"
