"""Meshes of known shapes: vertices (x, y, z) and triangles that face outwards."""

import itertools

import numpy as np

FACES = [(0, 2, 1), (0, 3, 2), (4, 5, 6), (4, 6, 7), (0, 1, 5), (0, 5, 4), (1, 2, 6), (1, 6, 5)]
FACES += [(2, 3, 7), (2, 7, 6), (3, 0, 4), (3, 4, 7)]
BOX = np.array([(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)], float)


def box(low, high):
    return np.array(low) + BOX * (np.array(high) - low), np.array(FACES)


def torus(major, minor, n=14, m=8):
    u, v = np.meshgrid(np.arange(n) * 2 * np.pi / n, np.arange(m) * 2 * np.pi / m, indexing="ij")
    x, y = ((major + minor * np.cos(v)) * trig(u) for trig in (np.cos, np.sin))
    points = np.stack([x, y, minor * np.sin(v)], axis=-1).reshape(-1, 3)
    faces = []
    for i, j in itertools.product(range(n), range(m)):
        a, b = i * m + j, (i + 1) % n * m + j
        c, d = i * m + (j + 1) % m, (i + 1) % n * m + (j + 1) % m
        faces += [(a, b, c), (b, d, c)]
    return points, np.array(faces)


def sphere(radius, n=9):
    """Rings of triangles between two poles."""
    rings = [np.array([[0, 0, radius]])]
    for k in range(1, n):
        t, p = np.pi * k / n, np.arange(2 * n) * np.pi / n
        rings.append(
            radius * np.stack([np.sin(t) * np.cos(p), np.sin(t) * np.sin(p), np.full(2 * n, np.cos(t))], axis=1)
        )
    rings.append(np.array([[0, 0, -radius]]))
    faces, start = [], 1
    for i in range(2 * n):
        faces.append((0, 1 + i, 1 + (i + 1) % (2 * n)))
    for _ in range(n - 2):
        for i in range(2 * n):
            a, b = start + i, start + (i + 1) % (2 * n)
            faces += [(a, a + 2 * n, b), (b, a + 2 * n, b + 2 * n)]
        start += 2 * n
    last = start + 2 * n
    faces += [(start + i, last, start + (i + 1) % (2 * n)) for i in range(2 * n)]
    return np.concatenate(rings), np.array(faces)


def joined(*meshes):
    count, points, faces = 0, [], []
    for vertices, triangles in meshes:
        points.append(vertices)
        faces.append(triangles + count)
        count += len(vertices)
    return np.concatenate(points), np.concatenate(faces)


def moved(mesh, shift):
    return mesh[0] + np.array(shift), mesh[1]


def inside_out(mesh):
    return mesh[0], mesh[1][:, ::-1]


CLOSED = {
    "box": box((-3.1, -2.2, -4.3), (3.7, 2.9, 1.4)),
    "sphere": moved(sphere(4.6), (0.11, -0.07, 0.03)),
    "torus": moved(torus(4.1, 1.6), (0.013, 0.027, -0.31)),
    "two that overlap": joined(box((-4.1, -3.2, -2.3), (1.2, 1.3, 1.4)), box((-1.7, -1.6, -1.5), (3.8, 3.9, 3.6))),
    "one in another": joined(moved(sphere(4.9), (0.1, 0.2, 0.3)), moved(sphere(2.2), (0.03, 0.05, 0.01))),
    "a cavity": joined(box((-4.1, -4.2, -4.3), (4.4, 4.5, 4.6)), inside_out(box((-1.2, -1.3, -1.4), (1.3, 1.2, 1.1)))),
    "a bow tie": joined(box((-4.1, -3.2, -2.3), (0.1, 1.3, 1.4)), inside_out(box((0.1, -1.6, -1.5), (3.8, 3.9, 3.6)))),
}  # fmt: skip
