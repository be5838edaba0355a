"""The Warp kernels of masks and capsules; import this module inside functions, because it imports Warp.

Warp compiles the kernels for a device at the first launch and caches them on disk. Fused multiply-add is off and
distances are in float64, so that a kernel gives the same result as NumPy with the same operations in the same order.

A brick is a cube of voxels whose capsules are found together. A word is 8 bytes of a mask (``boolean_words``), 64
voxels along x, one bit each (``pack`` to ``unpack``), or 32 capsules, one bit each (``cull_capsules``).
"""

# ruff: noqa: D103
# mypy: ignore-errors
# (Warp's kernels are another language: numbers are not converted, and `and` evaluates both sides.)

# No postponed annotations in this module: Warp reads the types of a kernel's parameters from them.

import sys

import warp as wp

wp.set_module_options({"enable_backward": False, "fuse_fp": False}, module=sys.modules[__name__])

#: Voxels of a brick along each axis.
BRICK = wp.constant(16)

#: Voxels along x that a thread of ``subtract_capsules`` tests.
RUN = wp.constant(8)

_ONES = wp.constant(wp.uint64(0x0101010101010101))
_LOW_BITS = wp.constant(wp.uint64(0x7F7F7F7F7F7F7F7F))


@wp.func
def truth(word: wp.uint64):
    """Return a word with 1 in each byte that is not 0 in `word`, and 0 in the others."""
    return ((((word & _LOW_BITS) + _LOW_BITS) | word) >> wp.uint64(7)) & _ONES


@wp.func
def combined(operation: wp.int32, a: wp.uint64, b: wp.uint64):
    x, y = truth(a), truth(b)
    result = x | y
    if operation == 1:
        result = x & y
    if operation == 2:
        result = x & (_ONES ^ y)
    return result


@wp.kernel
def boolean_words(
    operation: wp.int32,
    words: wp.int32,
    a: wp.array(dtype=wp.uint64),
    b: wp.array(dtype=wp.uint64),
    out: wp.array(dtype=wp.uint64),
):
    # 32 threads combine 64 neighbouring words of 8 bytes, two each, so the loads of a warp are contiguous
    t = wp.tid()
    i = (t // 32) * 64 + t % 32
    j = i + 32
    if j < words:
        left = combined(operation, a[i], b[i])
        right = combined(operation, a[j], b[j])
        out[i] = left
        out[j] = right
    elif i < words:
        out[i] = combined(operation, a[i], b[i])


@wp.kernel
def pack(
    mask: wp.array3d(dtype=wp.uint8),
    inverted: wp.int32,
    outside: wp.uint64,
    margin: wp.int32,
    bits: wp.array3d(dtype=wp.uint64),
):
    # a word is 64 voxels along x; `margin` words on either side, and the bits beyond the mask, are `outside`
    z, y, w = wp.tid()
    word = outside
    first = (w - margin) * 64
    if first >= 0 and first < mask.shape[2]:
        word = wp.uint64(0)
        for k in range(64):
            bit = outside & wp.uint64(1)
            if first + k < mask.shape[2]:
                bit = wp.uint64(inverted)
                if mask[z, y, first + k] != wp.uint8(0):
                    bit = wp.uint64(1 - inverted)
            word = word | (bit << wp.uint64(k))
    bits[z, y, w] = word


@wp.func
def word_at(bits: wp.array3d(dtype=wp.uint64), outside: wp.uint64, z: wp.int32, y: wp.int32, w: wp.int32):
    word = outside
    if w < bits.shape[2]:
        word = bits[z, y, w]
    return word


@wp.func
def word_from(bits: wp.array3d(dtype=wp.uint64), outside: wp.uint64, z: wp.int32, y: wp.int32, x: wp.int32):
    """Return 64 bits from bit `x` on; `x` is not negative."""
    w, shift = x // 64, wp.uint64(x % 64)
    word = word_at(bits, outside, z, y, w)
    if shift != wp.uint64(0):
        word = (word >> shift) | (word_at(bits, outside, z, y, w + 1) << (wp.uint64(64) - shift))
    return word


@wp.kernel
def widen(bits: wp.array3d(dtype=wp.uint64), outside: wp.uint64, shift: wp.int32, out: wp.array3d(dtype=wp.uint64)):
    # a bit of `out` is set if the same bit of `bits`, or the bit `shift` voxels further along x, is set
    z, y, w = wp.tid()
    out[z, y, w] = bits[z, y, w] | word_from(bits, outside, z, y, 64 * w + shift)


@wp.kernel
def gather(
    bits: wp.array3d(dtype=wp.uint64),
    outside: wp.uint64,
    margin: wp.int32,
    runs: wp.array2d(dtype=wp.int32),
    first: wp.int32,
    last: wp.int32,
    out: wp.array3d(dtype=wp.uint64),
):
    # unites the words at the offsets (dz, dy, dx) of runs `first` to `last` with the words of `out`
    z, y, w = wp.tid()
    every = ~wp.uint64(0)
    word = out[z, y, w]
    for r in range(first, last):
        if word == every:
            break
        zz, yy = z + runs[r, 0], y + runs[r, 1]
        if zz >= 0 and zz < bits.shape[0] and yy >= 0 and yy < bits.shape[1]:
            word = word | word_from(bits, outside, zz, yy, 64 * (w + margin) + runs[r, 2])
        else:
            word = word | outside
    out[z, y, w] = word


@wp.kernel
def unpack(bits: wp.array3d(dtype=wp.uint64), inverted: wp.int32, out: wp.array3d(dtype=wp.uint8)):
    z, y, x = wp.tid()
    bit = wp.int32((bits[z, y, x // 64] >> wp.uint64(x % 64)) & wp.uint64(1))
    out[z, y, x] = wp.uint8(bit ^ inverted)


@wp.func
def squared_distance(capsules: wp.array2d(dtype=wp.float64), i: wp.int32, at: wp.vec3d):
    vx, vy, vz = at[0] - capsules[i, 0], at[1] - capsules[i, 1], at[2] - capsules[i, 2]
    dx, dy, dz = capsules[i, 3], capsules[i, 4], capsules[i, 5]
    t = wp.float64(0.0)
    if capsules[i, 6] > wp.float64(0.0):
        t = ((vx * dx + vy * dy) + vz * dz) / capsules[i, 6]
        t = wp.min(wp.max(t, wp.float64(0.0)), wp.float64(1.0))
    ex, ey, ez = vx - t * dx, vy - t * dy, vz - t * dz
    return (ex * ex + ey * ey) + ez * ez


@wp.func
def centre(origin: wp.vec3d, pitch: wp.vec3d, x: wp.int32, y: wp.int32, z: wp.int32):
    half = wp.float64(0.5)
    return wp.vec3d(
        origin[0] + (wp.float64(x) + half) * pitch[0],
        origin[1] + (wp.float64(y) + half) * pitch[1],
        origin[2] + (wp.float64(z) + half) * pitch[2],
    )


@wp.kernel
def cull_capsules(
    capsules: wp.array2d(dtype=wp.float64),
    origin: wp.vec3d,
    pitch: wp.vec3d,
    z_offset: wp.int32,
    slack: wp.float64,
    bricks_y: wp.int32,
    bricks_x: wp.int32,
    near: wp.array2d(dtype=wp.uint32),
    words: wp.array2d(dtype=wp.int32),
):
    # bit k of word w of a brick: whether capsule 32 w + k may touch the brick; `slack` exceeds half its diagonal.
    # Threads of a warp test the same capsules. `words[0]` is the number of words from the first nonzero word to the
    # end, `words[1]` the number of words up to the last nonzero word.
    w, b = wp.tid()
    bz, by, bx = b // (bricks_y * bricks_x), (b // bricks_x) % bricks_y, b % bricks_x
    size = wp.float64(BRICK)
    middle = wp.vec3d(
        origin[0] + (wp.float64(bx) + wp.float64(0.5)) * size * pitch[0],
        origin[1] + (wp.float64(by) + wp.float64(0.5)) * size * pitch[1],
        origin[2] + ((wp.float64(bz) + wp.float64(0.5)) * size + wp.float64(z_offset)) * pitch[2],
    )
    word = wp.uint32(0)
    for k in range(32):
        i = w * 32 + k
        if i < capsules.shape[0]:
            reach = capsules[i, 7] + slack
            if squared_distance(capsules, i, middle) <= reach * reach:
                word = word | (wp.uint32(1) << wp.uint32(k))
    near[w, b] = word
    if word != wp.uint32(0):
        wp.atomic_max(words, 0, b, near.shape[0] - w)
        wp.atomic_max(words, 1, b, w + 1)


@wp.func
def run_inside(
    capsules: wp.array2d(dtype=wp.float64),
    i: wp.int32,
    candidates: wp.uint32,
    origin: wp.vec3d,
    pitch: wp.vec3d,
    x: wp.int32,
    y: wp.int32,
    z: wp.int32,
):
    """Return the bits of the candidate voxels along x that lie in a capsule by :func:`squared_distance`."""
    px, dx = capsules[i, 0], capsules[i, 3]
    dy, dz = capsules[i, 4], capsules[i, 5]
    squared_length, squared_radius = capsules[i, 6], capsules[i, 8]
    at = centre(origin, pitch, x, y, z)
    vy, vz = at[1] - capsules[i, 1], at[2] - capsules[i, 2]
    along_y, along_z = vy * dy, vz * dz
    hits = wp.uint32(0)
    bits, k = candidates, wp.int32(0)
    # not a loop over `run`, which Warp unrolls: eight distances at a time take 128 registers
    while bits != wp.uint32(0):
        if (bits & wp.uint32(1)) != wp.uint32(0):
            vx = (origin[0] + (wp.float64(x + k) + wp.float64(0.5)) * pitch[0]) - px
            t = wp.float64(0.0)
            if squared_length > wp.float64(0.0):
                t = ((vx * dx + along_y) + along_z) / squared_length
                t = wp.min(wp.max(t, wp.float64(0.0)), wp.float64(1.0))
            ex, ey, ez = vx - t * dx, vy - t * dy, vz - t * dz
            if (ex * ex + ey * ey) + ez * ez <= squared_radius:
                hits = hits | (wp.uint32(1) << wp.uint32(k))
        bits = bits >> wp.uint32(1)
        k = k + 1
    return hits


@wp.kernel
def subtract_capsules(
    mask: wp.array3d(dtype=wp.uint8),
    capsules: wp.array2d(dtype=wp.float64),
    near: wp.array2d(dtype=wp.uint32),
    words: wp.array2d(dtype=wp.int32),
    origin: wp.vec3d,
    pitch: wp.vec3d,
    z_offset: wp.int32,
    bricks_y: wp.int32,
    bricks_x: wp.int32,
    removed: wp.array(dtype=wp.int32),
):
    # The threads of a warp are in one brick and test the same capsules. Most bricks touch no capsule, so this test
    # comes first: even a division of the thread's index takes longer.
    b, lane = wp.tid()
    last = words[1, b]
    if last == 0:
        return
    bz, by, bx = b // (bricks_y * bricks_x), (b // bricks_x) % bricks_y, b % bricks_x
    runs = BRICK // RUN
    x = bx * BRICK + (lane % runs) * RUN
    y = by * BRICK + (lane // runs) % BRICK
    z = bz * BRICK + lane // (runs * BRICK)
    if z >= mask.shape[0] or y >= mask.shape[1]:
        return
    candidates = wp.uint32(0)
    for k in range(wp.min(RUN, mask.shape[2] - x)):
        if mask[z, y, x + k] != wp.uint8(0):
            candidates = candidates | (wp.uint32(1) << wp.uint32(k))
    count = wp.int32(0)
    for w in range(near.shape[0] - words[0, b], last):
        word = near[w, b]
        i = w * 32
        while word != wp.uint32(0) and candidates != wp.uint32(0):
            if (word & wp.uint32(1)) != wp.uint32(0):
                hits = run_inside(capsules, i, candidates, origin, pitch, x, y, z + z_offset)
                candidates = candidates & ~hits
                k = wp.int32(0)
                while hits != wp.uint32(0):
                    if (hits & wp.uint32(1)) != wp.uint32(0):
                        mask[z, y, x + k] = wp.uint8(0)
                        count = count + 1
                    hits = hits >> wp.uint32(1)
                    k = k + 1
            word = word >> wp.uint32(1)
            i = i + 1
    if count > 0:
        wp.atomic_add(removed, b, count)
