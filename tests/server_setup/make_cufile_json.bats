#!/usr/bin/env bats
# make_cufile_json.sh
load helpers

setup() {
    common_setup
    MAKE=$SETUP_DIR/make_cufile_json.sh
    OUT="$BOX/an \"odd\" folder/cufile.json"
    mkdir "$BOX/an \"odd\" folder"
}
teardown() { common_teardown; }

field() {
    python3 -c '
import json, sys
value = json.load(open(sys.argv[1]))
for key in sys.argv[2].split("."):
    value = value[key]
print(json.dumps(value))' "$OUT" "$1"
}

@test "each mode is valid JSON that says what it means" {
    for mode in p2pdma nvfs compat; do
        run "$MAKE" --mode $mode -o "$OUT" --force
        exits 0
        says "wrote '$OUT'"
        case $mode in
            p2pdma) p2p=true allow=false ;;
            nvfs) p2p=false allow=false ;;
            compat) p2p=false allow=true ;;
        esac
        [ "$(field properties.use_pci_p2pdma)" = $p2p ]
        [ "$(field block.nvme.use_pci_p2pdma)" = $p2p ]
        [ "$(field properties.allow_compat_mode)" = $allow ]
        [ "$(field properties.posix_pool_slab_size_kb)" = '[4, 1024, 16384]' ]
        [ "$(field execution.max_io_threads)" = 4 ]
        grep -q "allow_compat_mode ($allow)" "$OUT.comments.txt"
    done
    [ "$(stat -c %a "$OUT")" = 644 ]
    [ "$(ls -A "$(dirname "$OUT")" | wc -l)" -eq 2 ]
}

@test "the pool holds as many buffers as a batch needs, and every size has a count" {
    "$MAKE" --mode p2pdma -o "$OUT"
    python3 -c '
import json, sys
p = json.load(open(sys.argv[1]))["properties"]
assert p["max_device_cache_size_kb"] // p["per_buffer_cache_size_kb"] >= p["io_batchsize"]
assert len(p["posix_pool_slab_size_kb"]) == len(p["posix_pool_slab_count"])
assert p["max_direct_io_size_kb"] % 64 == 0' "$OUT"
}

@test "the doctor takes what p2pdma and compat write" {
    use_tree
    "$MAKE" --mode p2pdma -o "$TREE/etc/cufile.json" --force
    run "$SETUP_DIR/gds_doctor.sh" /data
    verdict p2pdma
    "$MAKE" --mode nvfs -o "$TREE/etc/cufile.json" --force
    run "$SETUP_DIR/gds_doctor.sh" /data
    verdict nvidia-fs
    "$MAKE" --mode compat -o "$TREE/etc/cufile.json" --force
    run "$SETUP_DIR/gds_doctor.sh" /data
    verdict cufile-compat
}

@test "without -o the configuration goes to the terminal" {
    run "$MAKE" --mode p2pdma
    exits 0
    python3 -m json.tool <<<"$output" >"$BOX/null"
    [ -z "$(ls -A "$(dirname "$OUT")")" ]
}

@test "--allow-compat" {
    "$MAKE" --mode p2pdma --allow-compat true -o "$OUT"
    [ "$(field properties.allow_compat_mode)" = true ]
}

@test "it never overwrites without --force: file, comments, dangling link" {
    echo mine >"$OUT"
    run "$MAKE" --mode p2pdma -o "$OUT"
    exits 3
    says "'$OUT' exists"
    [ "$(cat "$OUT")" = mine ]
    [ ! -e "$OUT.comments.txt" ]
    rm "$OUT"
    echo mine >"$OUT.comments.txt"
    run "$MAKE" --mode p2pdma -o "$OUT"
    exits 3
    [ ! -e "$OUT" ]
    rm "$OUT.comments.txt"
    ln -s "$BOX/nowhere" "$OUT"
    run "$MAKE" --mode p2pdma -o "$OUT"
    exits 3
    run "$MAKE" --mode p2pdma -o "$OUT" --force
    exits 0
    [ ! -L "$OUT" ] && [ ! -e "$BOX/nowhere" ]
}

@test "--dry-run writes nothing" {
    run "$MAKE" --mode nvfs -o "$OUT" --dry-run
    exits 0
    says "would write '$OUT'"
    [ -z "$(ls -A "$(dirname "$OUT")")" ]
}

@test "a write that fails leaves nothing: exit 1" {
    printf '#!/bin/sh\nexit 1\n' >"$BOX/trap/chmod"
    chmod +x "$BOX/trap/chmod"
    run "$MAKE" --mode p2pdma -o "$OUT"
    exits 1
    [ -z "$(ls -A "$(dirname "$OUT")")" ]
    rm "$BOX/trap/chmod"
    printf '#!/bin/sh\ncase "$*" in *comments.txt) exec /bin/ln "$@" ;; esac\nexit 1\n' >"$BOX/trap/ln"
    printf '#!/bin/sh\nexit 1\n' >"$BOX/trap/mv"
    chmod +x "$BOX/trap/ln" "$BOX/trap/mv"
    run "$MAKE" --mode p2pdma -o "$OUT"
    exits 1
    [ -z "$(ls -A "$(dirname "$OUT")")" ]
    rm "$BOX/trap/ln" "$BOX/trap/mv"
    echo mine >"$OUT"
    printf '#!/bin/sh\nexit 1\n' >"$BOX/trap/cmp"
    chmod +x "$BOX/trap/cmp"
    run "$MAKE" --mode p2pdma -o "$OUT" --force
    exits 1
    [ "$(cat "$OUT")" = mine ]
    [ "$(ls -A "$(dirname "$OUT")")" = cufile.json ]
}

@test "a full disk" {
    # mktemp hands out a name whose writes end in ENOSPC.
    printf '#!/bin/sh\nln -s /dev/full "%s"\necho "%s"\n' "$BOX/full" "$BOX/full" >"$BOX/trap/mktemp"
    chmod +x "$BOX/trap/mktemp"
    run "$MAKE" --mode p2pdma -o "$OUT"
    exits 1
    says 'is there room?'
    [ -z "$(ls -A "$(dirname "$OUT")")" ]
}

@test "--json" {
    run "$MAKE" --mode p2pdma -o "$OUT" --json
    exits 0
    python3 -c 'import json,sys; r=json.load(sys.stdin); assert r["file"]==sys.argv[1] and r["written"] is True and r["mode"]=="p2pdma"' "$OUT" <<<"$output"
}

@test "wrong usage: one line, exit 2" {
    run "$MAKE"
    one_clear_line
    says --mode
    run "$MAKE" --mode fast
    one_clear_line
    says "'fast'"
    run "$MAKE" --mode
    one_clear_line
    run "$MAKE" --mode p2pdma -o "$BOX/none/x"
    one_clear_line
    says "$BOX/none"
    run "$MAKE" --mode p2pdma -o "$BOX"
    one_clear_line
    run "$MAKE" --mode p2pdma -o ''
    one_clear_line
    run "$MAKE" --mode p2pdma --allow-compat maybe
    one_clear_line
    run "$MAKE" --mode compat --allow-compat false
    one_clear_line
    run "$MAKE" --mode p2pdma --force
    one_clear_line
    run "$MAKE" --mode p2pdma --json
    one_clear_line
    run "$MAKE" --mode p2pdma nonsense
    one_clear_line
    run "$MAKE" --help
    exits 0
    says '3 FILE exists'
}

@test "a file system without hard links, and a shell with noclobber" {
    printf '#!/bin/sh\nexit 1\n' >"$BOX/trap/ln"
    chmod +x "$BOX/trap/ln"
    run env SHELLOPTS=noclobber "$MAKE" --mode nvfs -o "$BOX/c.json"
    exits 0
    python3 -m json.tool "$BOX/c.json" >"$BOX/read"
    [ -s "$BOX/c.json.comments.txt" ]
    run "$MAKE" --mode nvfs -o "$BOX/c.json"
    exits 3
    [ "$(ls -A "$BOX" | grep -c '^\.cufile')" -eq 0 ]
}
