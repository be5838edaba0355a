"""Slow references of the operations: loops over voxels, in integers or fractions."""

from fractions import Fraction

import numpy as np


def offsets_of(structure):
    """The offsets of an element whose origin is ``shape // 2``."""
    return [tuple(np.array(index) - np.array(structure.shape) // 2) for index in np.argwhere(structure)]


def ball_offsets(radius, pitch):
    """The offsets (dz, dy, dx) within a radius, in exact arithmetic; `pitch` is (x, y, z)."""
    limit, steps = Fraction(radius) ** 2, [Fraction(step) for step in reversed(pitch)]
    reach = [int(Fraction(radius) / step) + 1 for step in steps]
    offsets = []
    for index in np.ndindex(*(2 * n + 1 for n in reach)):
        offset = [i - n for i, n in zip(index, reach, strict=True)]
        if sum((k * step) ** 2 for k, step in zip(offset, steps, strict=True)) <= limit:
            offsets.append(tuple(offset))
    return offsets


def dilated(mask, offsets, border=False):
    """Voxel x is true if any voxel x - b is."""
    out = np.zeros_like(mask)
    for index in np.ndindex(*mask.shape):
        out[index] = any(at(mask, np.array(index) - b, border) for b in offsets)
    return out


def eroded(mask, offsets, border=False):
    """Voxel x is true if all voxels x + b are."""
    out = np.zeros_like(mask)
    for index in np.ndindex(*mask.shape):
        out[index] = all(at(mask, np.array(index) + b, border) for b in offsets)
    return out


def at(mask, index, border):
    if all(0 <= i < n for i, n in zip(index, mask.shape, strict=True)):
        return bool(mask[tuple(index)])
    return border


def in_capsule(shape, p0, p1, radius, origin, pitch, z_offset=0):
    """The voxels whose centres lie within a radius of a segment, in exact arithmetic."""
    a, b = ([Fraction(coordinate) for coordinate in point] for point in (p0, p1))
    d = [q - p for p, q in zip(a, b, strict=True)]
    length2, limit = sum(step * step for step in d), Fraction(radius) ** 2
    out = np.zeros(shape, bool)
    for z, y, x in np.ndindex(*shape):
        c = [
            Fraction(o) + (i + Fraction(1, 2)) * Fraction(s)
            for o, i, s in zip(origin, (x, y, z + z_offset), pitch, strict=True)
        ]
        v = [q - p for q, p in zip(c, a, strict=True)]
        t = Fraction(0)
        if length2:
            t = min(max(sum(p * q for p, q in zip(v, d, strict=True)) / length2, Fraction(0)), Fraction(1))
        out[z, y, x] = sum((p - t * q) ** 2 for p, q in zip(v, d, strict=True)) <= limit
    return out


def winding_numbers(shape, vertices, triangles, origin, pitch):
    """The winding number of a mesh around each centre, by solid angles (Van Oosterom and Strackee 1983)."""
    z, y, x = np.indices(shape).reshape(3, -1) + 0.5
    centres = np.stack([x, y, z], axis=1) * pitch + origin
    total = np.zeros(len(centres))
    for corners in np.asarray(vertices, float)[np.asarray(triangles)]:
        a, b, c = (corner - centres for corner in corners)
        la, lb, lc = (np.linalg.norm(vector, axis=1) for vector in (a, b, c))
        volume = np.einsum("ij,ij->i", a, np.cross(b, c))
        denominator = (
            la * lb * lc
            + np.einsum("ij,ij->i", a, b) * lc
            + np.einsum("ij,ij->i", b, c) * la
            + np.einsum("ij,ij->i", c, a) * lb
        )
        total += 2 * np.arctan2(volume, denominator)
    return (total / (4 * np.pi)).reshape(shape)


def on_surface(shape, vertices, triangles, origin, pitch):
    """The voxels whose centres lie on a triangle, by barycentric coordinates."""
    z, y, x = np.indices(shape).reshape(3, -1) + 0.5
    centres = np.stack([x, y, z], axis=1) * pitch + origin
    out = np.zeros(len(centres), bool)
    for a, b, c in np.asarray(vertices, float)[np.asarray(triangles)]:
        normal = np.cross(b - a, c - a)
        if not normal.any():
            continue
        parts = [np.cross(q - p, centres - p) @ normal / (normal @ normal) for p, q in ((a, b), (b, c), (c, a))]
        out |= (np.abs((centres - a) @ normal) < 1e-9) & (np.min(parts, axis=0) > -1e-9)
    return out.reshape(shape)


def components(mask, connectivity):
    """Number parts by flooding, in the order of their first voxels."""
    reach = {6: 1, 18: 2, 26: 3}[connectivity]
    steps = [np.array(s) - 1 for s in np.ndindex(3, 3, 3) if 0 < np.abs(np.array(s) - 1).sum() <= reach]
    out, count = np.zeros(mask.shape, np.int32), 0
    for index in np.ndindex(*mask.shape):
        if not mask[index] or out[index]:
            continue
        count += 1
        todo = [index]
        out[index] = count
        while todo:
            here = todo.pop()
            for step in steps:
                there = tuple(np.array(here) + step)
                if at(mask, there, False) and not out[there]:
                    out[there] = count
                    todo.append(there)
    return out, count


def filled(mask):
    """The mask, and the voxels that no path of face neighbours outside it connects with the border."""
    labels, _ = components(np.pad(~mask, 1, constant_values=True), 6)
    return (labels != labels[0, 0, 0])[1:-1, 1:-1, 1:-1]
