"""Builds a small source tree that looks like nvidia-fs to nvfs_kernel7_patch.sh.

Written for these tests. It shares nothing with nvidia-fs but the short anchors that the
script looks for, and it compiles, against the pretended kernel headers beside it, on the
kernels that it was made for. ``python3 fakesource.py DIR [VERSION]``.
"""

import sys
from pathlib import Path

VERS = """\
#ifndef PRETENDED_VERS
#define PRETENDED_VERS
#define NVFS_DRIVER_MAJOR_VERSION   {0} //2-bytes
#define NVFS_DRIVER_MINOR_VERSION   {1} //2-bytes
#define NVFS_DRIVER_PATCH_VERSION  {2}
#endif
"""

# The version here lags behind, as it does in the real one.
DKMS = 'PACKAGE_NAME="nvidia-fs"\nPACKAGE_VERSION="2.7"\n'

MMAP = """\
#include "pretended-kernel.h"
/* __vm_flags in a comment is nobody's business; nor in "a string of __vm_flags". */
static const char *note = "__vm_flags";

int pretended_mmap(struct vm_area_struct *vma)
{
\tvm_flags_t vm_flags;

#ifdef PRETENDED_OLD
\tvm_flags = vma->vm_flags;
#else
\tvm_flags = ACCESS_PRIVATE(vma, __vm_flags); // of the area
#endif
\treturn note && (vm_flags & 3) == 3;
}
"""

DMA = """\
#include "pretended-kernel.h"

#ifdef HAVE_BLK_RQ_DMA_MAP_ITER_START
static int pretended_ops = 2;
#else
static int pretended_ops = 1;
#endif

/* The older path: its own iterator is right on every kernel. */
static unsigned long older_walk(struct req_iterator *position)
{
\tstruct req_iterator iter = *position;
\treturn iter.iter.bi_size;
}

#ifdef HAVE_BLK_RQ_DMA_MAP_ITER_START
#ifdef PRETENDED_DEBUG
#define trace(x) (x)
#else
#define trace(x) (0)
#endif
static int nvfs_peek_next_bvec(struct req_iterator *req_iter, unsigned *size)
{
\t*size = req_iter->iter.bi_size;
\treturn trace(*size) == 0;
}

static void nvfs_advance_bvec(struct req_iterator *req_iter, unsigned size)
{
\treq_iter->iter.bi_size -= size;
}

static void nvfs_coalesce_gpu_pages(unsigned *length,
                                    struct req_iterator *req_iter)
{
\tunsigned size;
\tif (nvfs_peek_next_bvec(req_iter, &size))
\t\tnvfs_advance_bvec(req_iter, size);
\t*length += size;
}

int nvfs_map_next_gpu_segment(struct blk_dma_iter *iter)
{
\tstruct req_iterator *req_iter = &iter->iter;
\tunsigned length = 0;
\tnvfs_coalesce_gpu_pages(&length, req_iter);
\treturn (int)length;
}
#endif /* HAVE_BLK_RQ_DMA_MAP_ITER_START */

int pretended_use(struct req_iterator *position)
{
\treturn pretended_ops + (int)older_walk(position);
}
"""

SYMVERS = """\
#!/bin/bash
# Pretended: writes the checksums of the module $1 to nv.symvers in this folder.
nvidia_mod=$1
list=nv.symvers
: >"$list"

case "$nvidia_mod" in
\t*ko.xz)
\t\tcp -f "$nvidia_mod" .
\t\tnvidia_mod=$(basename "$nvidia_mod" .xz)
\t\txz -d ${nvidia_mod}.xz
\t\t;;
esac

# Relative CRCs: nm shows offsets, and the checksums must come from elsewhere.
if (nm "$nvidia_mod" | grep -qe "\\sR\\s*__crc"); then
\techo relative >"$list"
\texit 0
fi
nm "$nvidia_mod" | grep __crc_nvidia_p2p_ | while read -r value kind name; do
\techo "0x$value ${name#__crc_}" >>"$list"
done
"""

KERNEL = """\
/* Pretended kernel, of the version KVER (608, 617, 700): only what the source above uses. */
typedef unsigned long vm_flags_t;
#define ACCESS_PRIVATE(p, member) ((p)->member)
struct bvec_iter { unsigned bi_size; };
struct bio { int unused; };
struct req_iterator { struct bvec_iter iter; struct bio *bio; };
#if KVER >= 700
struct vm_area_struct { vm_flags_t vm_flags; };
#else
struct vm_area_struct { union { const vm_flags_t vm_flags; vm_flags_t __vm_flags; }; };
#endif
#if KVER >= 618
struct blk_map_iter { struct bvec_iter iter; struct bio *bio; int is_integrity; };
struct blk_dma_iter { struct blk_map_iter iter; };
#elif KVER >= 617
struct blk_dma_iter { struct req_iterator iter; };
#endif
#if KVER >= 617
#define HAVE_BLK_RQ_DMA_MAP_ITER_START 1
#endif
"""


def build(folder, version="2.28.4"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "nvfs-vers.h": VERS.format(*version.split(".")),
        "dkms.conf": DKMS,
        "nvfs-mmap.c": MMAP,
        "nvfs-dma.c": DMA,
        "create_nv.symvers.sh": SYMVERS,
        "pretended-kernel.h": KERNEL,
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "nvfs-mmap.c").chmod(0o640)
    (folder / "nvfs-dma.c").chmod(0o644)
    (folder / "create_nv.symvers.sh").chmod(0o755)
    return folder


if __name__ == "__main__":
    build(*sys.argv[1:])
