"""Rays and their samples by the definition, one after another, in plain Python: for tests of linumpy.rays."""

import math

import numpy as np

MASK = 2**64 - 1


class SlowPcg32:
    """O'Neill's pcg32_srandom_r and pcg32_random_r, by integers of Python, a step at a time."""

    def __init__(self, seed, stream):
        self.state, self.inc = 0, (stream << 1 | 1) & MASK
        self.next()
        self.state = self.state + seed & MASK
        self.next()

    def next(self):
        old = self.state
        self.state = (old * 6364136223846793005 + self.inc) & MASK
        shifted = (((old >> 18) ^ old) >> 27) & 0xFFFFFFFF
        turn = old >> 59
        return (shifted >> turn | shifted << (-turn & 31)) & 0xFFFFFFFF

    def unit(self):
        return np.float32((self.next() >> 8) / 2**24)


def quaternion_of(turn):
    """A unit quaternion (w, x, y, z), by SciPy."""
    from scipy.spatial.transform import Rotation

    x, y, z, w = Rotation.from_matrix(turn).as_quat()
    return np.array([w, x, y, z])


def slerp(a, b, t):
    """Rotation matrix between two of them, by the formula of Shoemake (1985) on quaternions."""
    from scipy.spatial.transform import Rotation

    p, q = quaternion_of(a), quaternion_of(b)
    if p @ q < 0:
        q = -q
    omega = math.acos(min(1.0, p @ q))
    if omega < 1e-9:
        return a
    w, x, y, z = (math.sin((1 - t) * omega) * p + math.sin(t * omega) * q) / math.sin(omega)
    return Rotation.from_quat([x, y, z, w]).as_matrix()


def linear_of_srgb(value):
    value = value / 255
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def pixel_of(image, u, v, snap):
    """Pixel (column, row), u, v, and their density, of numbers in [0, 1)."""
    pdf = 1.0
    height, width = image.pixels.shape[:2]
    if image.pixel_cdf is not None:
        y, x = image.pixel_cdf.y, image.pixel_cdf.x
        row = next(k for k in range(len(y)) if y[k] > v)
        below = y[row - 1] if row else 0
        v = (row + (float(v) - below) / (float(y[row]) - below)) / len(y)
        pdf *= (float(y[row]) - below) * len(y)
        line = x[row]
        column = next(k for k in range(len(line)) if line[k] > u)
        below = line[column - 1] if column else 0
        u = (column + (float(u) - below) / (float(line[column]) - below)) / len(line)
        pdf *= (float(line[column]) - below) * len(line)
    column, row = int(np.float32(u) * np.float32(width)), int(np.float32(v) * np.float32(height))
    if snap:
        u, v = (column + 0.5) / width, (row + 0.5) / height
    return column, row, float(u), float(v), pdf


def color_of(pixel, alpha=None):
    """Linear, premultiplied RGBA, or None where it is masked; `alpha` as of Image."""
    if pixel.dtype == np.uint8:
        if tuple(pixel) == (255, 0, 255, 0):
            return None
        rgb, a = [linear_of_srgb(float(c)) for c in pixel[:3]], pixel[3] / 255
    elif pixel[0] < 0:
        return None
    else:
        *rgb, a = (float(c) for c in pixel)
    straight = alpha == "straight" or (alpha is None and pixel.dtype == np.uint8)
    return [*(c * a for c in rgb), a] if straight else [*rgb, a]


def world_ray(image, direction, origin, u, v, t):
    """A ray of the camera (float64) in the world, its direction as long as it was."""
    s = image.shutter
    when = s[0] + s[1] * u + s[2] * v + s[3] * t
    start = np.asarray(image.start_pose, float)
    end = start if image.end_pose is None else np.asarray(image.end_pose, float)
    turn = slerp(start[:, :3], end[:, :3], when)
    moved = start[:, 3] + when * (end[:, 3] - start[:, 3])
    return turn @ origin + moved, turn @ direction


def voxel_of(x, mip):
    """Index of a coordinate's voxel, in the grid's coordinates."""
    return min(max(math.floor(x / 2.0**mip) + 64, 0), 127)


def mip_of(position, step, mips):
    """The finest mip that holds a point and whose voxels are no shorter than a step (all in voxels of mip 0)."""
    for mip in range(mips):
        if max(abs(c) for c in position) <= 64 * 2**mip and step <= 2**mip:
            return mip
    return mips - 1


def float32_samples(occupied, origin, direction, start, step, leave, limit):
    """Points start + k · step of a ray that lie in occupied voxels, in float32; equal steps.

    All in the grid's coordinates, but t, step and leave, in the world's units.
    """
    f = np.float32
    mips, samples, k = len(occupied), [], 0
    scale = abs(np.linalg.norm(direction.astype(float)))
    while f(start + f(k) * step) < leave and len(samples) < limit:
        t = f(start + f(k) * step)
        position = [f(origin[a] + f(t * direction[a])) for a in range(3)]
        mip = mip_of(position, float(step) * scale, mips)
        x, y, z = (voxel_of(float(c), mip) for c in position)
        if occupied[mip, z, y, x]:
            samples.append(k)
        k += 1
    return samples


def distances(first, count, cone, shortest, longest):
    """t of points whose steps are t · cone between two bounds, by adding them up in float64."""
    t = [first]
    for _ in range(count - 1):
        t.append(t[-1] + min(max(t[-1] * cone, shortest), longest))
    return np.array(t)
