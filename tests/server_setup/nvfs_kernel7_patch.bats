#!/usr/bin/env bats
# nvfs_kernel7_patch.sh on a small source tree of our own.
load helpers

setup() {
    common_setup
    PATCH=$SETUP_DIR/nvfs_kernel7_patch.sh
    SRC="$BOX/it's a \"source\""
    new_source
}
teardown() { common_teardown; }

new_source() {
    local made=$SHARED/source-${1:-2.28.4}
    [ -d "$made" ] || python3 "$BATS_TEST_DIRNAME/fakesource.py" "$made" "${1:-2.28.4}"
    rm -rf "$SRC"
    cp -a "$made" "$SRC"
    ORIGINAL=$(fingerprint "$SRC")
}

unchanged() {
    [ "$ORIGINAL" = "$(fingerprint "$SRC")" ] || {
        echo "the source changed:"
        diff <(echo "$ORIGINAL") <(fingerprint "$SRC")
        return 1
    }
}

# Does the C source compile on the pretended kernel?
builds_on() {
    local file
    for file in nvfs-mmap.c nvfs-dma.c; do
        gcc -fsyntax-only -Wall -Werror=incompatible-pointer-types -Wno-unused -DKVER="$1" "$SRC/$file" 2>"$BOX/gcc.log" || return 1
    done
}

@test "the tree itself: builds on 6.8 and 6.17, and not on 7.0" {
    builds_on 608
    builds_on 617
    if builds_on 700; then false; fi
}

@test "check: not applied, exit 3, and nothing changes" {
    run "$PATCH" --check --src "$SRC"
    exits 3
    says 'nvfs-mmap.c nvfs-dma.c create_nv.symvers.sh can be mended'
    run "$PATCH" --src "$SRC"
    exits 3
    unchanged
}

@test "apply: builds on 7.0, and still on 6.8 and 6.17" {
    run "$PATCH" --apply --src "$SRC"
    exits 0
    builds_on 700
    builds_on 617
    builds_on 608
    run "$PATCH" --check --src "$SRC"
    exits 0
    says 'already applied'
}

@test "apply: exactly four places in the iterator path, and the older path untouched" {
    "$PATCH" --apply --src "$SRC"
    [ "$(grep -c '__typeof__(((struct blk_dma_iter \*)0)->iter) \*' "$SRC/nvfs-dma.c")" -eq 4 ]
    grep -q 'older_walk(struct req_iterator \*position)' "$SRC/nvfs-dma.c"
    grep -q 'pretended_use(struct req_iterator \*position)' "$SRC/nvfs-dma.c"
    [ "$(grep -c 'struct req_iterator' "$SRC/nvfs-dma.c")" -eq 3 ]
    if grep -q blk_map_iter "$SRC/nvfs-dma.c"; then false; fi
    # Comments and strings that name the member stay as they are.
    [ "$(grep -c __vm_flags "$SRC/nvfs-mmap.c")" -eq 2 ]
    grep -q '	vm_flags = vma->vm_flags; // of the area' "$SRC/nvfs-mmap.c"
}

@test "apply twice: already applied, and nothing changes the second time" {
    "$PATCH" --apply --src "$SRC"
    after=$(fingerprint "$SRC")
    run "$PATCH" --apply --src "$SRC"
    exits 0
    says 'already applied'
    [ "$after" = "$(fingerprint "$SRC")" ]
}

@test "apply then revert: content, modes and names byte for byte" {
    printf 'no newline at the end' >>"$SRC/nvfs-dma.c"
    sed -i 's/$/\r/' "$SRC/nvfs-mmap.c"
    ORIGINAL=$(fingerprint "$SRC")
    "$PATCH" --apply --src "$SRC"
    [ "$(stat -c %a "$SRC/nvfs-mmap.c" "$SRC/nvfs-dma.c" "$SRC/create_nv.symvers.sh" | tr '\n' ' ')" = '640 644 755 ' ]
    [ "$(ls -A "$SRC" | grep -c before-kernel7)" -eq 3 ]
    run "$PATCH" --revert --src "$SRC"
    exits 0
    unchanged
}

@test "revert keeps time stamps, so that make sees the original" {
    touch -d '2001-02-03 04:05:06' "$SRC/nvfs-dma.c"
    "$PATCH" --apply --src "$SRC"
    "$PATCH" --revert --src "$SRC"
    [ "$(stat -c %Y "$SRC/nvfs-dma.c")" = "$(date -d '2001-02-03 04:05:06' +%s)" ]
}

@test "revert needs no temporary folder, and writes nowhere else without one" {
    printf '#!/bin/sh\necho "$*" >>"$TRAP_LOG"\nexit 1\n' >"$BOX/trap/mktemp"
    "$PATCH" --apply --src "$SRC"
    chmod +x "$BOX/trap/mktemp"
    run "$PATCH" --revert --src "$SRC"
    exits 0
    unchanged
}

@test "revert without apply: nothing to do" {
    run "$PATCH" --revert --src "$SRC"
    exits 0
    says 'nothing to revert'
    unchanged
}

@test "the first original is never overwritten" {
    "$PATCH" --apply --src "$SRC"
    first=$(sha256sum <"$SRC/nvfs-dma.c.before-kernel7")
    python3 "$BATS_TEST_DIRNAME/fakesource.py" "$BOX/fresh"
    echo '/* newer */' >>"$BOX/fresh/nvfs-dma.c"
    cp "$BOX/fresh/nvfs-dma.c" "$SRC/nvfs-dma.c"
    run "$PATCH" --apply --src "$SRC"
    exits 0
    [ "$first" = "$(sha256sum <"$SRC/nvfs-dma.c.before-kernel7")" ]
    grep -q '__typeof__' "$SRC/nvfs-dma.c"
}

@test "revert refuses to lose later changes, and --force does as told" {
    "$PATCH" --apply --src "$SRC"
    echo '/* my own */' >>"$SRC/nvfs-dma.c"
    after=$(fingerprint "$SRC")
    run "$PATCH" --revert --src "$SRC"
    exits 4
    says 'nvfs-dma.c changed after --apply'
    [ "$after" = "$(fingerprint "$SRC")" ]
    run "$PATCH" --revert --force --src "$SRC"
    exits 0
    unchanged
}

@test "dry runs change nothing, and show the change" {
    run "$PATCH" --apply --dry-run --src "$SRC"
    exits 0
    says '+++ nvfs-dma.c (mended)'
    says 'would mend'
    unchanged
    "$PATCH" --apply --src "$SRC"
    after=$(fingerprint "$SRC")
    run "$PATCH" --revert --dry-run --src "$SRC"
    exits 0
    says 'would put back'
    [ "$after" = "$(fingerprint "$SRC")" ]
}

@test "2.29 and later: not needed, untouched" {
    for version in 2.29.0 2.30.1 3.0.0; do
        new_source "$version"
        for action in --check --apply --revert; do
            run "$PATCH" $action --src "$SRC"
            exits 0
            says 'not needed'
        done
        unchanged
    done
}

@test "other versions: exit 4, untouched; dkms.conf does not count" {
    for version in 2.28.3 2.28.5 2.27.4 2.7.0 1.9.9; do
        new_source "$version"
        run "$PATCH" --apply --src "$SRC"
        exits 4
        says "$version"
        unchanged
    done
    new_source
    sed -i 's/2\.7/2.29/' "$SRC/dkms.conf"
    run "$PATCH" --check --src "$SRC"
    exits 3
}

@test "a version header that says nothing: exit 4" {
    for text in '' '#define NVFS_DRIVER_MAJOR_VERSION 2' '#define NVFS_DRIVER_MAJOR_VERSION TWO'; do
        echo "$text" >"$SRC/nvfs-vers.h"
        run "$PATCH" --apply --src "$SRC"
        exits 4
    done
}

@test "unknown context in any one file: exit 4, and no file changes" {
    local -a edits=(
        's/ACCESS_PRIVATE(vma, __vm_flags);/ACCESS_PRIVATE(vma, __vm_flags) |= 1;/ nvfs-mmap.c'
        's/vm_flags = ACCESS_PRIVATE(vma, __vm_flags);/vm_flags = read(\&vma->__vm_flags);/ nvfs-mmap.c'
        's/ACCESS_PRIVATE(vma, __vm_flags)/hidden(vma, __vm_flags)/ nvfs-mmap.c'
        '/vm_flags = /d nvfs-mmap.c'
        's/static void nvfs_advance_bvec(struct req_iterator \*/static void nvfs_advance_bvec(struct unknown */ nvfs-dma.c'
        's/^int nvfs_map_next_gpu_segment.*/&;int more(struct req_iterator *a);/ nvfs-dma.c'
        's/HAVE_BLK_RQ_DMA_MAP_ITER_START/HAVE_ELSE/ nvfs-dma.c'
        '$a#endif nvfs-dma.c'
        '$a#if_1\n#ifdef_X nvfs-dma.c'
        's/ko\.xz)/ko.bz2)/ create_nv.symvers.sh'
        's/xz -d/unpack/ create_nv.symvers.sh'
        's/case "$nvidia_mod"/case "$(echo $1)"/ create_nv.symvers.sh'
        's/grep -qe .*;/true;/ create_nv.symvers.sh'
    )
    for edit in "${edits[@]}"; do
        new_source
        sed -i "$(printf '%s' "${edit% *}" | sed 's/if_1/if 1/;s/ifdef_X/ifdef X/')" "$SRC/${edit##* }"
        ORIGINAL=$(fingerprint "$SRC")
        for action in --check --apply; do
            run "$PATCH" $action --src "$SRC"
            [ "$status" -eq 4 ] || echo "edit: $edit"
            exits 4
            says "${edit##* }"
        done
        unchanged
    done
}

# Runs the script on a copy of the tree in $BOX/whole with one edit: PATTERN FILE.
refuses_edit() {
    rm -rf "$SRC"
    cp -a "$BOX/whole" "$SRC"
    sed -i "${1% *}" "$SRC/${1##* }"
    if cmp -s "$SRC/${1##* }" "$BOX/whole/${1##* }"; then
        echo "changes nothing: $1"
        return 1
    fi
    ORIGINAL=$(fingerprint "$SRC")
    run "$PATCH" --apply --src "$SRC"
    [ "$status" -eq 4 ] || echo "edit: $1"
    exits 4
    says "${1##* }"
    unchanged
}

@test "a private member of another name, though vm_flags is read elsewhere: exit 4" {
    mv "$SRC" "$BOX/whole"
    refuses_edit 's/ACCESS_PRIVATE(vma, __vm_flags)/ACCESS_PRIVATE(vma, weird)/ nvfs-mmap.c'
}

@test "a function of another name around an iterator: exit 4" {
    mv "$SRC" "$BOX/whole"
    refuses_edit 's/nvfs_map_next_gpu_segment/renamed/ nvfs-dma.c'
}

@test "every anchor drifted, one at a time: exit 4, and no file changes" {
    mv "$SRC" "$BOX/whole"
    while IFS= read -r edit; do
        refuses_edit "$edit"
    done <<'EDITS'
s/ACCESS_PRIVATE(vma, __vm_flags)/READ_PRIVATE(vma, __vm_flags)/ nvfs-mmap.c
s/ACCESS_PRIVATE(vma, __vm_flags)/flags_of(vma)/ nvfs-mmap.c
s/vm_flags = ACCESS_PRIVATE(vma, __vm_flags);/weird = 0;/ nvfs-mmap.c
s/vm_flags = vma->vm_flags;/vm_flags = vma->weird;/ nvfs-mmap.c
s/vm_flags = vma->vm_flags;/weird = vma->vm_flags;/ nvfs-mmap.c
/vm_flags = ACCESS/d nvfs-mmap.c
/vm_flags = vma/d nvfs-mmap.c
s/^#else/#elif PRETENDED_NEW/ nvfs-mmap.c
s/^#else/#endif\n#ifdef PRETENDED_NEW/ nvfs-mmap.c
/^#else/d nvfs-mmap.c
/^#endif/d nvfs-mmap.c
s/nvfs_peek_next_bvec(struct/peek(struct/ nvfs-dma.c
s/nvfs_advance_bvec(struct/advance(struct/ nvfs-dma.c
s/nvfs_coalesce_gpu_pages(unsigned/coalesce(unsigned/ nvfs-dma.c
/nvfs_peek_next_bvec(struct/s/struct req_iterator/struct weird/ nvfs-dma.c
/nvfs_advance_bvec(struct/s/struct req_iterator/struct weird/ nvfs-dma.c
/^  *struct req_iterator/s/struct req_iterator/struct weird/ nvfs-dma.c
s/struct req_iterator \*req_iter = &iter->iter/void *req_iter = \&iter->iter/ nvfs-dma.c
s/struct req_iterator \*req_iter = /&0; struct req_iterator *more = / nvfs-dma.c
/^static void nvfs_advance_bvec/,/^}/d nvfs-dma.c
s/HAVE_BLK_RQ_DMA_MAP_ITER_START/HAVE_WEIRD/ nvfs-dma.c
s/^#ifdef HAVE_BLK_RQ_DMA_MAP_ITER_START/#ifndef HAVE_BLK_RQ_DMA_MAP_ITER_START/ nvfs-dma.c
/^#endif .*ITER_START/d nvfs-dma.c
s/ko\.xz)/ko.weird)/ create_nv.symvers.sh
s/xz -d/xz -k/ create_nv.symvers.sh
s/xz -d/weird -d/ create_nv.symvers.sh
s/^case .*/case $1 in/ create_nv.symvers.sh
s/sR/sX/ create_nv.symvers.sh
s/__crc"/__weird"/ create_nv.symvers.sh
s/grep -qe/awk/ create_nv.symvers.sh
EDITS
}

@test "a mended file that lost one of its mends is not called mended" {
    "$PATCH" --apply --src "$SRC"
    rm "$SRC"/*.before-kernel7
    mv "$SRC" "$BOX/whole"
    while IFS= read -r edit; do
        refuses_edit "$edit"
    done <<'EDITS'
s/vm_flags = vma->vm_flags; .*/vm_flags = ACCESS_PRIVATE(vma, weird);/ nvfs-mmap.c
/vm_flags = vma->vm_flags; .*/d nvfs-mmap.c
s/nvfs_map_next_gpu_segment(struct/renamed(struct/ nvfs-dma.c
/nvfs_peek_next_bvec(__typeof/s/__typeof__.*iter) \*/struct weird */ nvfs-dma.c
/^\t__typeof/s/__typeof__.*iter) \*/struct weird */ nvfs-dma.c
/^static void nvfs_advance_bvec/,/^}/d nvfs-dma.c
s/xz -f -d/weird -f -d/ create_nv.symvers.sh
s/zstd -d -f/weird -d -f/ create_nv.symvers.sh
s/\[Rr\]/[Xx]/ create_nv.symvers.sh
EDITS
}

@test "a file that is missing, a link, or holds NUL bytes: exit 4" {
    rm "$SRC/nvfs-dma.c"
    ORIGINAL=$(fingerprint "$SRC")
    run "$PATCH" --apply --src "$SRC"
    exits 4
    unchanged
    new_source
    mv "$SRC/nvfs-dma.c" "$BOX/elsewhere.c"
    ln -s "$BOX/elsewhere.c" "$SRC/nvfs-dma.c"
    run "$PATCH" --apply --src "$SRC"
    exits 4
    grep -q 'nvfs_peek_next_bvec(struct req_iterator' "$BOX/elsewhere.c"
    new_source
    printf '\0' >>"$SRC/nvfs-dma.c"
    run "$PATCH" --apply --src "$SRC"
    exits 4
    : >"$SRC/nvfs-mmap.c"
    run "$PATCH" --apply --src "$SRC"
    exits 4
}

@test "files mended by hand are accepted, in several spellings" {
    sed -i 's/ACCESS_PRIVATE(vma, __vm_flags)/vma->vm_flags/' "$SRC/nvfs-mmap.c"
    sed -i '/^static int nvfs_peek_next_bvec/,$s/struct req_iterator \*req_iter/typeof( ((struct blk_dma_iter *)NULL)->iter ) *req_iter/' "$SRC/nvfs-dma.c"
    sed -i 's/xz -d/xz -df/; s/grep -qe/grep -qie/' "$SRC/create_nv.symvers.sh"
    sed -i 's/^esac/\t*.ko.zst)\n\t\tcp -f "$nvidia_mod" .\n\t\tnvidia_mod=$(basename "$nvidia_mod" .zst)\n\t\tzstd -d --force "$nvidia_mod.zst"\n\t\t;;\nesac/' "$SRC/create_nv.symvers.sh"
    ORIGINAL=$(fingerprint "$SRC")
    run "$PATCH" --check --src "$SRC"
    exits 0
    run "$PATCH" --apply --src "$SRC"
    exits 0
    says 'already applied'
    unchanged
    sed -i 's/grep -qie "\\sR/grep -qe "\\s[rR]/' "$SRC/create_nv.symvers.sh"
    run "$PATCH" --check --src "$SRC"
    exits 0
}

@test "one file mended by hand: the others are mended, and it keeps no original" {
    sed -i 's/ACCESS_PRIVATE(vma, __vm_flags)/vma->vm_flags/' "$SRC/nvfs-mmap.c"
    ORIGINAL=$(fingerprint "$SRC")
    run "$PATCH" --apply --src "$SRC"
    exits 0
    says 'mended nvfs-dma.c create_nv.symvers.sh'
    [ ! -e "$SRC/nvfs-mmap.c.before-kernel7" ]
    builds_on 700
    run "$PATCH" --revert --src "$SRC"
    exits 0
    unchanged
}

@test "struct blk_map_iter named outright breaks 6.17, and is mended" {
    sed -i '/^static int nvfs_peek_next_bvec/,/^#endif .*ITER/s/struct req_iterator \*/struct blk_map_iter */' "$SRC/nvfs-dma.c"
    if builds_on 617; then false; fi
    run "$PATCH" --check --src "$SRC"
    exits 3
    "$PATCH" --apply --src "$SRC"
    builds_on 617
    builds_on 700
}

@test "half forced: a .ko.zst branch that would ask is forced" {
    sed -i 's/^esac/\t*ko.zst)\n\t\tcp -f "$nvidia_mod" .\n\t\tnvidia_mod=$(basename "$nvidia_mod" .zst)\n\t\tunzstd -q "$nvidia_mod.zst"\n\t\t;;\nesac/' "$SRC/create_nv.symvers.sh"
    "$PATCH" --apply --src "$SRC"
    grep -q 'unzstd -f -q' "$SRC/create_nv.symvers.sh"
    [ "$(grep -c 'ko.zst)' "$SRC/create_nv.symvers.sh")" -eq 1 ]
}

# Runs the source's own script in a folder with a stale nvidia.ko.
unpack_over_stale() {
    local packed=$1 terminal=$2 work=$BOX/unpacked
    rm -rf "$work"
    mkdir "$work"
    printf 'stale' >"$work/nvidia.ko"
    (cd "$work" && python3 - "$SRC/create_nv.symvers.sh" "$packed" "$terminal" <<'PY'
import os, pty, subprocess, sys
script, packed, terminal = sys.argv[1:]
stdio = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
if terminal == "yes":
    # Nobody types: a question would wait until the time is over.
    master, slave = pty.openpty()
    stdio = {"stdin": slave, "stdout": slave, "stderr": slave}
subprocess.run(["bash", script, packed], timeout=15, check=False, start_new_session=True, **stdio)
PY
    )
}

make_modules() {
    mkdir -p "$BOX/mod"
    printf '.globl __crc_nvidia_p2p_get_pages\n.set __crc_nvidia_p2p_get_pages, 0x1a2b3c4d\n' | as -o "$BOX/mod/nvidia.ko" -
    xz -k "$BOX/mod/nvidia.ko"
    zstd -q "$BOX/mod/nvidia.ko"
}

@test "a stale nvidia.ko: without the mend the old one is read" {
    make_modules
    unpack_over_stale "$BOX/mod/nvidia.ko.xz" no
    if grep -q 1a2b3c4d "$BOX/unpacked/nv.symvers"; then false; fi
}

@test "a stale nvidia.ko: mended, xz and zst, with and without a terminal" {
    make_modules
    "$PATCH" --apply --src "$SRC"
    for packed in xz zst; do
        for terminal in no yes; do
            unpack_over_stale "$BOX/mod/nvidia.ko.$packed" $terminal
            grep -q '0x000000001a2b3c4d nvidia_p2p_get_pages' "$BOX/unpacked/nv.symvers"
        done
    done
}

@test "relative CRCs are known by r as by R" {
    mkdir "$BOX/mod"
    for bind in local globl; do
        printf '.section "__kcrctab","a"\n.%s __crc_nvidia_p2p_get_pages\n__crc_nvidia_p2p_get_pages:\n.long 0x1a2b3c4d\n' $bind |
            as -o "$BOX/mod/$bind.ko" -
    done
    (cd "$BOX/mod" && bash "$SRC/create_nv.symvers.sh" "$BOX/mod/local.ko" && grep -q 0x0000 nv.symvers)
    "$PATCH" --apply --src "$SRC"
    for bind in local globl; do
        (cd "$BOX/mod" && bash "$SRC/create_nv.symvers.sh" "$BOX/mod/$bind.ko" && [ "$(cat nv.symvers)" = relative ])
    done
}

@test "a disk that fills up: nothing changes, nothing is left, exit 3" {
    for fail in 1 2 4 5; do
        # The n-th cp fails, as on a full disk: half of the file is there.
        cat >"$BOX/trap/cp" <<SH
#!/bin/bash
n=\$(cat "$BOX/count" 2>/dev/null || echo 0)
n=\$((n + 1))
echo \$n >"$BOX/count"
if [ \$n -eq $fail ]; then head -c 20 "\${@: -2:1}" >"\${@: -1}"; exit 1; fi
exec /bin/cp "\$@"
SH
        chmod +x "$BOX/trap/cp"
        rm -f "$BOX/count"
        run "$PATCH" --apply --src "$SRC"
        exits 3
        says 'nothing was changed'
        unchanged
    done
}

@test "a rename that fails: the files already renamed go back" {
    cat >"$BOX/trap/mv" <<SH
#!/bin/bash
case "\${@: -1}" in *create_nv.symvers.sh) exit 1 ;; esac
exec /bin/mv "\$@"
SH
    chmod +x "$BOX/trap/mv"
    run "$PATCH" --apply --src "$SRC"
    exits 3
    unchanged
}

@test "killed on the way: no file is half written, and a second run finishes" {
    cat >"$BOX/trap/mv" <<SH
#!/bin/bash
case "\${@: -1}" in *nvfs-dma.c) kill -KILL \$PPID; exit 1 ;; esac
exec /bin/mv "\$@"
SH
    chmod +x "$BOX/trap/mv"
    run "$PATCH" --apply --src "$SRC"
    exits 137
    rm "$BOX/trap/mv"
    grep -q 'nvfs_peek_next_bvec(struct req_iterator' "$SRC/nvfs-dma.c"
    run "$PATCH" --apply --src "$SRC"
    exits 0
    builds_on 700
    run "$PATCH" --revert --src "$SRC"
    exits 0
    unchanged
}

@test "the folder above src/ may be given" {
    mkdir "$BOX/checkout"
    mv "$SRC" "$BOX/checkout/src"
    run "$PATCH" --src "$BOX/checkout/"
    exits 3
}

@test "--json in every state can be read" {
    read_json() { python3 -c 'import json,sys; r=json.load(sys.stdin); print(r["result"], r["exit_code"], r["version"], r["src"] == sys.argv[1])' "$SRC" <<<"$output"; }
    run "$PATCH" --json --src "$SRC"
    [ "$(read_json)" = 'not-applied 3 2.28.4 True' ]
    run "$PATCH" --json --apply --src "$SRC"
    [ "$(read_json)" = 'applied 0 2.28.4 True' ]
    run "$PATCH" --json --apply --src "$SRC"
    [ "$(read_json)" = 'already 0 2.28.4 True' ]
    run "$PATCH" --json --revert --src "$SRC"
    [ "$(read_json)" = 'reverted 0 2.28.4 True' ]
    new_source 2.29.1
    run "$PATCH" --json --src "$SRC"
    [ "$(read_json)" = 'not-needed 0 2.29.1 True' ]
    new_source 2.20.1
    run "$PATCH" --json --src "$SRC"
    [ "$(read_json)" = 'unknown 4 2.20.1 True' ]
}

@test "wrong usage: one line, exit 2" {
    run "$PATCH"
    one_clear_line
    says '--src DIR'
    run "$PATCH" --src
    one_clear_line
    run "$PATCH" --src "$BOX/none"
    one_clear_line
    says "$BOX/none"
    run "$PATCH" --src "$BOX"
    one_clear_line
    says 'nvfs-vers.h'
    run "$PATCH" --check --apply --src "$SRC"
    one_clear_line
    run "$PATCH" --force --apply --src "$SRC"
    one_clear_line
    run "$PATCH" nonsense --src "$SRC"
    one_clear_line
    says "'nonsense'"
    unchanged
}

@test "--help names the actions and exit codes" {
    run "$PATCH" --help
    exits 0
    for word in --check --apply --revert --dry-run '2 wrong' '3 not applied' '4 unknown'; do says "$word"; done
}

@test "killed at any copy or rename: a later run finishes, and revert still restores all" {
    # The Nth cp or mv does half of its work, and the script is killed.
    for tool in cp mv; do
        cat >"$BOX/trap/$tool" <<SH
#!/bin/bash
n=\$((\$(cat "$BOX/count") + 1)); echo "\$n" >"$BOX/count"
if [ "\$n" -eq "\$(cat "$BOX/kill")" ]; then
    [ $tool = mv ] || [ "\$1" = --attributes-only ] || head -c 100 "\${@: -2:1}" >"\${@: -1}"
    kill -KILL \$PPID; exit 1
fi
exec /bin/$tool "\$@"
SH
        chmod +x "$BOX/trap/$tool"
    done
    killed=0
    for n in $(seq 1 2 40); do
        echo 0 >"$BOX/count"
        echo "$n" >"$BOX/kill"
        run "$PATCH" --apply --src "$SRC"
        [ "$status" -ne 0 ] || break
        exits 137
        killed=$((killed + 1))
        echo 0 >"$BOX/kill"
        run "$PATCH" --apply --src "$SRC"
        exits 0
        run "$PATCH" --revert --src "$SRC"
        exits 0
        unchanged
    done
    [ "$killed" -ge 5 ]
}

@test "two runs at once: the second waits for nobody and changes nothing" {
    exec 9<"$SRC"
    flock -n 9
    run "$PATCH" --apply --src "$SRC"
    exits 3
    says 'another run is at work'
    [ "${#lines[@]}" -eq 1 ]
    run "$PATCH" --revert --src "$SRC"
    exits 3
    run "$PATCH" --apply --dry-run --src "$SRC"
    exits 0
    exec 9<&-
    unchanged
    run "$PATCH" --apply --src "$SRC"
    exits 0
}

@test "read-only files and an ordinary user; a folder whose name starts with a dash" {
    chmod a-w "$SRC"/nvfs-*.c "$SRC/create_nv.symvers.sh"
    before=$(fingerprint "$SRC")
    name=-${SRC##*/}
    mv -- "$SRC" "${SRC%/*}/$name"
    cd "${SRC%/*}"
    as_user=()
    if [ "$(id -u)" -eq 0 ]; then
        chown -R 65534 "./$name"
        chmod 755 "$BOX" "${SRC%/*}"
        : >"$TRAP_LOG" && chmod 666 "$TRAP_LOG"
        as_user=(setpriv --reuid=65534 --clear-groups)
    fi
    # The checkout itself may be closed to that user.
    cp -r "$SETUP_DIR" "$BOX/scripts"
    chmod -R a+rX "$BOX/scripts"
    run "${as_user[@]}" "$BOX/scripts/nvfs_kernel7_patch.sh" --apply --src "$name"
    exits 0
    [ "$(stat -c %a "./$name/nvfs-dma.c")" = 444 ]
    run "${as_user[@]}" "$BOX/scripts/nvfs_kernel7_patch.sh" --revert --src "$name"
    exits 0
    [ ! -s "$TRAP_LOG" ] && rm -f "$TRAP_LOG"
    mv -- "./$name" "$SRC"
    [ "$before" = "$(fingerprint "$SRC")" ]
}

@test "(R|r) by hand is accepted; noclobber does no harm" {
    run env SHELLOPTS=noclobber "$PATCH" --apply --src "$SRC"
    exits 0
    for text in '(R|r)' '\\(R\\|r\\)'; do
        sed -i "/__crc\"/s/\\[Rr\\]\\|(R|r)/$text/" "$SRC/create_nv.symvers.sh"
        run "$PATCH" --check --src "$SRC"
        exits 0
    done
}
