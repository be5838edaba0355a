#!/usr/bin/env bats
# nvfs_symvers.sh on ELF objects made with as.
load helpers

setup() {
    common_setup
    SYMVERS=$SETUP_DIR/nvfs_symvers.sh
    MOD="$BOX/mod dir"
    mkdir "$MOD"
    export TMPDIR=$BOX/tmp
    mkdir "$TMPDIR"
}
teardown() {
    # Whatever happened, the temporary folder is gone.
    local left
    left=$(ls -A "$TMPDIR")
    common_teardown || return 1
    [ -z "$left" ] || {
        echo "left behind: $left"
        return 1
    }
}

assemble() {
    as -o "$MOD/${1:-nvidia.ko}" -
}

# __crc_ symbol BIND in SECTION, holding WORD.
relative() {
    printf '.section "%s","a"\n.balign 4\n.long 0x11111111\n.%s __crc_%s\n__crc_%s:\n.long %s\n' "$2" "$1" "$3" "$3" "$4"
}

refused() {
    exits 4
    [ "${#lines[@]}" -eq 1 ]
    says 'nothing was printed'
}

@test "absolute" {
    printf '.globl __crc_nvidia_p2p_get_pages\n.set __crc_nvidia_p2p_get_pages, 0xfedcba98\n' | assemble
    run "$SYMVERS" "$MOD/nvidia.ko"
    exits 0
    [ "$output" = $'0xfedcba98\tnvidia_p2p_get_pages\tnvidia\tEXPORT_SYMBOL\t' ]
}

@test "global relative, in __kcrctab" {
    relative globl __kcrctab nvidia_p2p_get_pages 0x12345678 | assemble
    nm "$MOD/nvidia.ko" | grep -q ' R __crc_nvidia_p2p_get_pages'
    run "$SYMVERS" "$MOD/nvidia.ko"
    exits 0
    [ "$output" = $'0x12345678\tnvidia_p2p_get_pages\tnvidia\tEXPORT_SYMBOL\t' ]
}

@test "local relative, one section for each symbol, GPL and not" {
    {
        relative local '___kcrctab+nvidia_p2p_a' nvidia_p2p_a 0x00000001
        relative local '___kcrctab_gpl+nvidia_p2p_b' nvidia_p2p_b 0xffffffff
    } | assemble
    nm "$MOD/nvidia.ko" | grep -q ' r __crc_nvidia_p2p_a'
    run "$SYMVERS" "$MOD/nvidia.ko"
    exits 0
    [ "${lines[0]}" = $'0x00000001\tnvidia_p2p_a\tnvidia\tEXPORT_SYMBOL\t' ]
    [ "${lines[1]}" = $'0xffffffff\tnvidia_p2p_b\tnvidia\tEXPORT_SYMBOL_GPL\t' ]
}

@test "in .rodata, as Linux 4.10 to 5.18 has it; the kind of export from __ksymtab" {
    {
        relative globl .rodata nvidia_p2p_a 0xcafef00d
        printf '.section "__ksymtab_gpl","a"\n__ksymtab_nvidia_p2p_a:\n.long 0\n'
    } | assemble
    run "$SYMVERS" "$MOD/nvidia.ko"
    [ "$output" = $'0xcafef00d\tnvidia_p2p_a\tnvidia\tEXPORT_SYMBOL_GPL\t' ]
}

@test "xz, zst and gz, also under a wrong name; the packed file stays" {
    relative local __kcrctab nvidia_p2p_a 0x12345678 | assemble
    expected=$("$SYMVERS" "$MOD/nvidia.ko")
    xz -k "$MOD/nvidia.ko"
    zstd -q "$MOD/nvidia.ko"
    gzip -k "$MOD/nvidia.ko"
    cp "$MOD/nvidia.ko.zst" "$MOD/nvidia.ko.old"
    before=$(fingerprint "$MOD")
    for suffix in xz zst gz old; do
        run "$SYMVERS" "$MOD/nvidia.ko.$suffix"
        exits 0
        [ "$output" = "$expected" ]
    done
    cd "$MOD"
    run "$SYMVERS" nvidia.ko.xz
    [ "$output" = "$expected" ]
    [ "$before" = "$(fingerprint "$MOD")" ]
}

@test "a stale nvidia.ko in the working folder is neither read nor replaced, on a terminal" {
    relative local __kcrctab nvidia_p2p_a 0x12345678 | assemble
    zstd -q --rm "$MOD/nvidia.ko"
    echo stale >"$MOD/nvidia.ko"
    cd "$MOD"
    run python3 - "$SYMVERS" <<'PY'
import os, pty, subprocess, sys
master, slave = pty.openpty()
out = subprocess.run([sys.argv[1], "nvidia.ko.zst"], stdin=slave, stderr=slave, stdout=subprocess.PIPE, timeout=15, start_new_session=True)
sys.stdout.buffer.write(out.stdout)
sys.exit(out.returncode)
PY
    exits 0
    says '0x12345678'
    [ "$(cat nvidia.ko)" = stale ]
}

@test "a relocated entry holds an offset: refused" {
    printf '.section "__kcrctab","a"\n__crc_nvidia_p2p_a:\n.long elsewhere - .\n' | assemble
    run "$SYMVERS" "$MOD/nvidia.ko"
    refused
    says 'address'
}

@test "a relocation beside the entry does no harm" {
    printf '.section "__kcrctab","a"\n.long elsewhere - .\n.long 0\n__crc_nvidia_p2p_a:\n.long 0x12345678\n' | assemble
    run "$SYMVERS" "$MOD/nvidia.ko"
    # A field of four bytes before it is not it; an eight-byte one could reach it.
    exits 0
    says 0x12345678
}

@test "other sections, undefined, common, misaligned, too long: refused" {
    local -a sources=(
        '.data\n__crc_nvidia_p2p_a:\n.long 5\n'
        '.text\n__crc_nvidia_p2p_a:\n.long 5\n'
        '.bss\n__crc_nvidia_p2p_a:\n.zero 4\n'
        '.globl __crc_nvidia_p2p_a\n.long __crc_nvidia_p2p_a\n'
        '.weak __crc_nvidia_p2p_a\n.long __crc_nvidia_p2p_a\n'
        '.comm __crc_nvidia_p2p_a,4,4\n'
        '.section "__kcrctab","a"\n.byte 1\n__crc_nvidia_p2p_a:\n.long 5\n.byte 0\n'
        '.section "__kcrctab","a"\n.long 5\n__crc_nvidia_p2p_a:\n'
        '.section "__kcrctab","aw"\n__crc_nvidia_p2p_a:\n.long 5\n'
        '.globl __crc_nvidia_p2p_a\n.set __crc_nvidia_p2p_a, 0x123456789\n'
        '.section "other","a"\n__crc_nvidia_p2p_a:\n.long 5\n'
    )
    for source in "${sources[@]}"; do
        printf "$source" | assemble
        run "$SYMVERS" "$MOD/nvidia.ko"
        [ "$status" -eq 4 ] || echo "source: $source"
        refused
        says '__crc_nvidia_p2p_a'
    done
}

@test "one bad symbol among good ones: nothing at all is printed" {
    {
        relative local __kcrctab nvidia_p2p_a 0x12345678
        printf '.data\n__crc_nvidia_p2p_b:\n.long 5\n'
    } | assemble
    run "$SYMVERS" "$MOD/nvidia.ko"
    refused
    relative local __kcrctab nvidia_p2p_a 0x12345678 | assemble good.ko
    run "$SYMVERS" "$MOD/good.ko" "$MOD/nvidia.ko"
    refused
    does_not_say 0x12345678
    run "$SYMVERS" "$MOD/good.ko" "$MOD/good.ko"
    exits 0
    [ "${#lines[@]}" -eq 2 ]
}

@test "two symbols of one name: refused" {
    printf '.section "__kcrctab","a"\n__crc_nvidia_p2p_a:\n.long 5\n' | as -o "$BOX/1.o" -
    printf '.section "__kcrctab","a"\n__crc_nvidia_p2p_a:\n.long 6\n' | as -o "$BOX/2.o" -
    ld -r -o "$MOD/nvidia.ko" "$BOX/1.o" "$BOX/2.o"
    run "$SYMVERS" "$MOD/nvidia.ko"
    refused
}

@test "merged by the linker, as in a real module" {
    relative local '___kcrctab+nvidia_p2p_a' nvidia_p2p_a 0x12345678 | as -o "$BOX/1.o" -
    relative local '___kcrctab+nvidia_p2p_b' nvidia_p2p_b 0x9abcdef0 | as -o "$BOX/2.o" -
    printf 'SECTIONS { __kcrctab 0 : { *(SORT(___kcrctab+*)) } }\n' >"$BOX/module.lds"
    ld -r -T "$BOX/module.lds" -o "$MOD/nvidia.ko" "$BOX/1.o" "$BOX/2.o"
    run "$SYMVERS" "$MOD/nvidia.ko"
    exits 0
    says $'0x12345678\tnvidia_p2p_a'
    says $'0x9abcdef0\tnvidia_p2p_b'
}

@test "no checksums, a linked program, no ELF, empty, cut short: refused" {
    printf '.globl nvidia_p2p_get_pages\nnvidia_p2p_get_pages:\nnop\n' | assemble
    run "$SYMVERS" "$MOD/nvidia.ko"
    refused
    says MODVERSIONS
    run "$SYMVERS" "$(command -v bash)"
    refused
    echo text >"$MOD/text.ko"
    : >"$MOD/empty.ko"
    printf '\177ELF' >"$MOD/cut.ko"
    relative local __kcrctab nvidia_p2p_a 0x12345678 | assemble
    for pack in 'xz -k' 'zstd -q' 'gzip -k'; do $pack "$MOD/nvidia.ko"; done
    for suffix in xz zst gz; do head -c 60 "$MOD/nvidia.ko.$suffix" >"$MOD/cut-$suffix.ko.$suffix"; done
    for file in text.ko empty.ko cut.ko cut-xz.ko.xz cut-zst.ko.zst cut-gz.ko.gz; do
        run "$SYMVERS" "$MOD/$file"
        refused
        says "$file"
    done
    gzip -c "$MOD/text.ko" >"$MOD/text.ko.gz"
    run "$SYMVERS" "$MOD/text.ko.gz"
    refused
}

@test "a tool that is missing is named, with its package" {
    relative local __kcrctab nvidia_p2p_a 0x12345678 | assemble
    zstd -q "$MOD/nvidia.ko"
    mkdir "$BOX/few"
    for tool in bash dirname readlink od tr mktemp rm cat; do ln -s "$(command -v $tool)" "$BOX/few/$tool"; done
    PATH=$BOX/few run "$BOX/few/bash" "$SYMVERS" "$MOD/nvidia.ko"
    refused
    says "install the package binutils"
    ln -s "$(command -v readelf)" "$BOX/few/readelf"
    PATH=$BOX/few run "$BOX/few/bash" "$SYMVERS" "$MOD/nvidia.ko.zst"
    refused
    says "install the package zstd"
}

@test "--json" {
    {
        relative local '___kcrctab+nvidia_p2p_a' nvidia_p2p_a 0x12345678
        printf '.globl __crc_nvidia_p2p_b\n.set __crc_nvidia_p2p_b, 2\n'
    } | assemble 'odd "name".ko'
    run "$SYMVERS" --json "$MOD/odd \"name\".ko"
    exits 0
    python3 -c '
import json, sys
rows = json.load(sys.stdin)["symbols"]
assert [(r["crc"], r["symbol"], r["module"], r["form"]) for r in rows] == [
    ("0x12345678", "nvidia_p2p_a", "odd \"name\"", "relative-local"),
    ("0x00000002", "nvidia_p2p_b", "odd \"name\"", "absolute")], rows' <<<"$output"
}

@test "wrong usage: one line, exit 2" {
    run "$SYMVERS"
    one_clear_line
    run "$SYMVERS" "$MOD/none.ko"
    one_clear_line
    says none.ko
    run "$SYMVERS" "$MOD"
    one_clear_line
    run "$SYMVERS" --nonsense
    one_clear_line
    run "$SYMVERS" --help
    exits 0
    says '4 refused'
}

@test "a section whose bytes are cut off: refused in one line" {
    {
        relative globl __kcrctab nvidia_p2p_a 0x12345678
        printf '.section .rodata,"a"\n.zero 64\n'
    } | assemble
    python3 - "$MOD/nvidia.ko" <<'PY'
import struct, sys
data = bytearray(open(sys.argv[1], "rb").read())
table, = struct.unpack_from("<Q", data, 40)
size, count = struct.unpack_from("<HH", data, 58)
for n in range(count):
    at = table + n * size
    if struct.unpack_from("<I", data, at + 4)[0] == 1 and struct.unpack_from("<Q", data, at + 8)[0] == 2:
        struct.pack_into("<Q", data, at + 24, len(data) + 4096)
open(sys.argv[1], "wb").write(data)
PY
    run "$SYMVERS" "$MOD/nvidia.ko"
    refused
}

@test "a big section with many relocations is read once, and in time" {
    {
        printf '.section .rodata,"a"\n.balign 8\n.rept 150000\n.quad somewhere\n.endr\n'
        for n in 1 2 3 4 5 6; do printf '.globl __crc_nvidia_p2p_%s\n__crc_nvidia_p2p_%s:\n.long 0x1000%s\n' "$n" "$n" "$n"; done
        printf '.balign 8\n.quad somewhere\n'
    } | assemble
    run timeout 20 "$SYMVERS" "$MOD/nvidia.ko"
    exits 0
    [ "${#lines[@]}" -eq 6 ]
    says $'0x00010006\tnvidia_p2p_6'
}

@test "killed by a signal: no folder stays" {
    relative globl __kcrctab nvidia_p2p_a 0x12345678 | assemble
    gzip "$MOD/nvidia.ko"
    printf '#!/bin/sh\n: >"%s/started"\nsleep 1\n' "$BOX" >"$BOX/trap/gzip"
    chmod +x "$BOX/trap/gzip"
    for signal in TERM HUP; do
        rm -f "$BOX/started"
        "$SYMVERS" "$MOD/nvidia.ko.gz" 2>/dev/null &
        pid=$!
        while [ ! -e "$BOX/started" ]; do sleep 0.05; done
        kill -s "$signal" "$pid"
        code=0
        wait "$pid" || code=$?
        [ "$code" -gt 128 ]
        [ -z "$(ls -A "$TMPDIR")" ]
    done
}

@test "two packed modules with noclobber; no room for a folder is said with its name" {
    relative globl __kcrctab nvidia_p2p_a 0x12345678 | assemble
    gzip -k "$MOD/nvidia.ko"
    cp "$MOD/nvidia.ko.gz" "$MOD/nvidia2.ko.gz"
    run env SHELLOPTS=noclobber "$SYMVERS" "$MOD/nvidia.ko.gz" "$MOD/nvidia2.ko.gz"
    exits 0
    [ "${#lines[@]}" -eq 2 ]
    TMPDIR=$BOX/none run "$SYMVERS" "$MOD/nvidia.ko.gz"
    exits 4
    [ "${#lines[@]}" -eq 1 ]
    says "'$BOX/none'"
}
