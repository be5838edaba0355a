"""The Warp kernels of meshes, under the rules of :mod:`linumpy.voxel.backends.warp_kernels`."""

# ruff: noqa: D103
# mypy: ignore-errors

# No postponed annotations in this module: Warp reads the types of a kernel's parameters from them.

import math
import sys

import warp as wp

from linumpy.voxel.backends.warp_kernels import centre
from linumpy.voxel.caps import DIPOLE_RADII

wp.set_module_options({"enable_backward": False, "fuse_fp": False}, module=sys.modules[__name__])

_DIPOLE_RADII = wp.constant(wp.float64(DIPOLE_RADII))
_HALF_SPHERE = wp.constant(wp.float64(2 * math.pi))


@wp.func
def area(ua: wp.int64, va: wp.int64, ub: wp.int64, vb: wp.int64, u: wp.int64, v: wp.int64):
    return (ub - ua) * (v - va) - (vb - va) * (u - ua)


@wp.func
def sign_of(value: wp.int64):
    sign = wp.int32(0)
    if value > wp.int64(0):
        sign = wp.int32(1)
    if value < wp.int64(0):
        sign = wp.int32(-1)
    return sign


@wp.func
def side(value: wp.int64, ua: wp.int64, va: wp.int64, ub: wp.int64, vb: wp.int64):
    sign = sign_of(value)
    if sign == 0:
        sign = sign_of(va - vb)
    if sign == 0:
        sign = sign_of(ub - ua)
    return sign


@wp.func
def first_column(value: wp.int64, bits: wp.int64, offset: wp.int32, n: wp.int32):
    """Return the first column of the box whose centre is not before a coordinate."""
    unit = wp.int64(1)
    up = (unit << bits) - unit - (unit << (bits - unit))
    return wp.int32(wp.clamp(((value + up) >> bits) - wp.int64(offset), wp.int64(0), wp.int64(n)))


@wp.kernel
def cross_columns(
    corners: wp.array3d(dtype=wp.int64),
    bits: wp.int64,
    scale: wp.float64,
    axis: wp.int32,
    lanes: wp.int32,
    z_offset: wp.int32,
    marks: wp.array3d(dtype=wp.uint8),
    change: wp.array3d(dtype=wp.int32),
    solid: wp.int32,
):
    # `lanes` threads share the columns of a triangle. If `solid`, ±1 is added to `change` at the first centre above
    # a crossing along z; else `marks` becomes 1 in the voxel of a crossing along `axis`.
    t, lane = wp.tid()
    iu, iv = (axis + 1) % 3, (axis + 2) % 3
    ua, va, ha = corners[t, 0, iu], corners[t, 0, iv], corners[t, 0, axis]
    ub, vb, hb = corners[t, 1, iu], corners[t, 1, iv], corners[t, 1, axis]
    uc, vc, hc = corners[t, 2, iu], corners[t, 2, iv], corners[t, 2, axis]
    total = (ub - ua) * (vc - va) - (vb - va) * (uc - ua)
    if total == wp.int64(0):
        return
    sizes = wp.vec3i(marks.shape[2], marks.shape[1], marks.shape[0])
    if solid != 0:
        sizes = wp.vec3i(change.shape[2], change.shape[1], change.shape[0])
    offsets = wp.vec3i(0, 0, z_offset)
    u0 = first_column(wp.min(wp.min(ua, ub), uc), bits, offsets[iu], sizes[iu])
    u1 = first_column(wp.max(wp.max(ua, ub), uc), bits, offsets[iu], sizes[iu])
    v0 = first_column(wp.min(wp.min(va, vb), vc), bits, offsets[iv], sizes[iv])
    v1 = first_column(wp.max(wp.max(va, vb), vc), bits, offsets[iv], sizes[iv])
    width = u1 - u0
    if width <= 0 or v1 <= v0:
        return
    columns = wp.int64(width) * wp.int64(v1 - v0)
    number = wp.int64(lane)
    while number < columns:
        cu = u0 + wp.int32(number % wp.int64(width))
        cv = v0 + wp.int32(number // wp.int64(width))
        u = wp.int64(2 * (cu + offsets[iu]) + 1) << (bits - wp.int64(1))
        v = wp.int64(2 * (cv + offsets[iv]) + 1) << (bits - wp.int64(1))
        ab, bc, ca = area(ua, va, ub, vb, u, v), area(ub, vb, uc, vc, u, v), area(uc, vc, ua, va, u, v)
        sign = side(ab, ua, va, ub, vb)
        if sign != 0 and sign == side(bc, ub, vb, uc, vc) and sign == side(ca, uc, vc, ua, va):
            part = wp.float64(ca) * wp.float64(hb - ha) + wp.float64(ab) * wp.float64(hc - ha)
            height = (wp.float64(ha) + part / wp.float64(total)) * scale
            if solid != 0:
                k = wp.max(wp.int64(wp.ceil(height - wp.float64(0.5))) - wp.int64(z_offset), wp.int64(0))
                if k < wp.int64(sizes[2]):
                    wp.atomic_add(change, wp.int32(k), cv, cu, -sign)
            else:
                k = wp.int64(wp.floor(height)) - wp.int64(offsets[axis])
                if k >= wp.int64(0) and k < wp.int64(sizes[axis]):
                    if axis == 0:
                        marks[cv, cu, wp.int32(k)] = wp.uint8(1)
                    elif axis == 1:
                        marks[cu, wp.int32(k), cv] = wp.uint8(1)
                    else:
                        marks[wp.int32(k), cv, cu] = wp.uint8(1)
        number = number + wp.int64(lanes)


@wp.kernel
def wind(change: wp.array3d(dtype=wp.int32), odd: wp.int32, out: wp.array3d(dtype=wp.uint8)):
    # the winding number of a voxel is the sum of the changes up to it
    y, x = wp.tid()
    winding = wp.int32(0)
    for z in range(change.shape[0]):
        winding = winding + change[z, y, x]
        value = wp.uint8(0)
        if (odd == 0 and winding != 0) or (winding & odd) != 0:
            value = wp.uint8(1)
        out[z, y, x] = value


@wp.func
def solid_angle(caps: wp.array3d(dtype=wp.float64), i: wp.int32, at: wp.vec3d):
    a = wp.vec3d(caps[i, 0, 0], caps[i, 0, 1], caps[i, 0, 2]) - at
    b = wp.vec3d(caps[i, 1, 0], caps[i, 1, 1], caps[i, 1, 2]) - at
    c = wp.vec3d(caps[i, 2, 0], caps[i, 2, 1], caps[i, 2, 2]) - at
    la, lb, lc = wp.length(a), wp.length(b), wp.length(c)
    below = la * lb * lc + wp.dot(a, b) * lc + wp.dot(b, c) * la + wp.dot(c, a) * lb
    return wp.float64(2.0) * wp.atan2(wp.dot(a, wp.cross(b, c)), below)


@wp.kernel
def wind_open(
    winding: wp.array3d(dtype=wp.int32),
    caps: wp.array3d(dtype=wp.float64),
    groups: wp.array2d(dtype=wp.float64),
    shift: wp.vec3d,
    pitch: wp.vec3d,
    z_offset: wp.int32,
    on_limit: wp.float64,
    out: wp.array3d(dtype=wp.uint8),
):
    # `winding` is that of the closed mesh. The solid angle of the caps is summed only where it may be 2 pi.
    z, y, x = wp.tid()
    at = centre(shift, pitch, x, y, z + z_offset)
    bound, i = wp.float64(0.0), wp.int32(0)
    while i < groups.shape[0] and bound < _HALF_SPHERE:
        distance = wp.length(wp.vec3d(groups[i, 0], groups[i, 1], groups[i, 2]) - at) - groups[i, 3]
        angle = _HALF_SPHERE
        if distance > wp.float64(0.0):
            angle = groups[i, 4] / (distance * distance)
        bound = bound + angle
        i = i + 1
    closed = winding[z, y, x]
    value = wp.uint8(0)
    if closed != 0:
        value = wp.uint8(1)
    if bound >= _HALF_SPHERE * (wp.float64(1.0) - on_limit):
        total = wp.float64(0.0)
        for j in range(groups.shape[0]):
            away = wp.vec3d(groups[j, 0], groups[j, 1], groups[j, 2]) - at
            squared = wp.dot(away, away)
            near = _DIPOLE_RADII * groups[j, 3]
            if squared > near * near:
                vector = wp.vec3d(groups[j, 5], groups[j, 6], groups[j, 7])
                total = total + wp.dot(away, vector) / (squared * wp.sqrt(squared))
            else:
                for k in range(wp.int32(groups[j, 8]), wp.int32(groups[j, 9])):
                    total = total + solid_angle(caps, k, at)
        number = wp.abs(wp.float64(closed) - total / (wp.float64(2.0) * _HALF_SPHERE))
        if closed != 0 and number < wp.float64(0.5) - on_limit:
            value = wp.uint8(0)
        if closed == 0 and number > wp.float64(0.5) + on_limit:
            value = wp.uint8(1)
    out[z, y, x] = value
