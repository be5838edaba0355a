"""Random calls of the resampling functions, each with what SciPy makes of it in float64.

A kind is what kernels are compiled for: dtypes, rank, order, mode. A call of it has a shape, a layout, coordinates. So
a GPU compiles few kernels for many calls.
"""

from dataclasses import dataclass, field

import numpy as np
from scipy import ndimage

from linumpy.gpu import interpolation

MODES = ("constant", "grid-constant", "nearest", "reflect", "mirror", "wrap", "grid-wrap", "grid-mirror")
INTEGERS = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
REALS = (*INTEGERS, "f2", "f4", "f8", "b1")
FUNCTIONS = (
    *("map_coordinates", "map_coordinates", "affine_transform", "affine_transform", "shift", "zoom", "rotate"),
    *("geometric_transform", "spline_filter", "spline_filter1d", "apply_displacement_field"),
)
_CONSTANT = ("constant", "grid-constant")
_NEAR = 1e-6


@dataclass(frozen=True)
class Kind:
    """What a call is compiled for."""

    name: str
    dtype: str
    output: str | None
    rank: int
    order: int
    mode: str
    prefilter: bool
    places: str


def kind_of(seed):
    """Draw a kind."""
    rng = np.random.default_rng([seed, 0])
    name = str(rng.choice(FUNCTIONS))
    is_complex = rng.random() < 0.08
    dtype = str(rng.choice(["c8", "c16"])) if is_complex else str(rng.choice([*REALS, "f4", "u2", "u1", "f8"]))
    output = None if rng.random() < 0.5 else str(rng.choice(["c8", "c16"] if is_complex else REALS))
    if name.startswith("spline_filter"):
        output = str(rng.choice(["c8", "c16"] if is_complex else ["f4", "f8"]))
    rank = int(rng.choice([1, 2, 2, 3, 3, 3, 4, 5])) if name != "rotate" else int(rng.choice([2, 3, 4]))
    order = int(rng.integers(2 if name == "spline_filter" else 0, 6 if rank < 5 else 4))
    mode, places = str(rng.choice(MODES)), str(rng.choice(["f4", "f8", "i4", "f2"]))
    return Kind(name, dtype, output, rank, order, mode, bool(rng.random() < 0.7), places)


@dataclass
class Call:
    """A call: arguments for linumpy, the truth, and where rounding may decide otherwise."""

    kind: Kind
    image: np.ndarray
    args: tuple
    options: dict
    expected: np.ndarray
    loose: np.ndarray = field(repr=False)
    layout: str = "C"

    def run(self, convert=lambda a: a):
        """Call linumpy, with arrays as `convert` makes them."""
        args = tuple(convert(a) if isinstance(a, np.ndarray) and a.ndim > 1 else a for a in self.args)
        if self.kind.name == "affine_transform":
            args = self.args
        return getattr(interpolation, self.kind.name)(laid_out(convert(self.image), self.layout), *args, **self.options)

    def wrong(self, got):
        """Count the numbers that are off."""
        if got.shape != self.expected.shape:
            return f"shape {got.shape} where {self.expected.shape} is right"
        off = ~(agree(got, self.expected, self.scale, self.kind) | self.loose)
        if not off.any():
            return ""
        where = tuple(int(i) for i in np.argwhere(off)[0])
        return f"{off.sum()} of {off.size} off, the first at {where}: {got[where]!r}, not {self.expected[where]!r}"

    @property
    def scale(self):
        """The largest number that goes in."""
        image = self.image.astype("c16" if self.image.dtype.kind == "c" else "f8")
        finite = np.abs(image[np.isfinite(image)]).max(initial=0)
        if self.kind.name.startswith("spline_filter"):  # coefficients are larger than what they are of
            finite = max(finite, np.abs(self.expected).max(initial=0))
        return max(float(finite), abs(complex(self.options.get("cval", 0))), 1e-30)


def laid_out(image, layout):
    """Give an image another layout in memory, and the same numbers."""
    if layout == "F":
        return image.copy(order="F")
    if layout == "reversed":
        return image[::-1].copy()[::-1]
    if layout == "gaps":
        return image.repeat(2, axis=image.ndim - 1)[..., ::2]
    return image


def in_float32(kind):
    """Say whether kernels compute in single precision."""
    narrow = {"b1", "i1", "u1", "i2", "u2", "f2", "f4", "c8"}
    if kind.name.startswith("spline_filter"):  # what lies between two axes is of the dtype of the result
        return kind.output in narrow
    return kind.dtype in narrow and (kind.output or kind.dtype) in narrow


def agree(got, expected, scale, kind):
    """Say which numbers are right: near enough for the precision, and of a rounded integer half a unit more."""
    # Where an axis is short, SciPy's filter for mode reflect is off; it filters axes that linumpy leaves alone.
    short = kind.order > 1 and kind.mode in ("reflect", "grid-mirror") and kind.rank > 2 and kind.prefilter
    if short and kind.name in ("affine_transform", "shift", "zoom", "rotate"):
        tolerance = 2e-2 * scale
    else:
        tolerance = (1e-5 if in_float32(kind) else 1e-8) * scale
    if got.dtype.kind == "c":
        expected = expected.astype("c16")
        return agree(got.real, expected.real, scale, kind) & agree(got.imag, expected.imag, scale, kind)
    if got.dtype.kind == "b":
        return (got == (np.abs(expected) >= 1)) | (np.abs(np.abs(expected) - 1) <= tolerance)
    if got.dtype.kind in "iu":
        limits = np.iinfo(got.dtype)
        truth = np.clip(np.nan_to_num(expected, nan=0, posinf=1e300, neginf=-1e300), limits.min, limits.max)
        return np.abs(got.astype("f8") - truth) <= 0.5 + tolerance + 1e-12 * np.abs(truth)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = expected.astype(got.dtype).astype("f8")
        relative = {"f2": 1e-3, "f4": 1e-6, "f8": 1e-12}[got.dtype.str[1:]]
        wide = got.astype("f8")
        near = np.abs(wide - cast) <= tolerance + relative * np.abs(cast)
        near |= np.isinf(wide) & (np.abs(expected) > 65500) if got.dtype == "f2" else False
    return near | (wide == cast) | (np.isnan(wide) & np.isnan(cast))


def call_of(kind, seed, most=7):
    """Draw a call of a kind; `most` is the largest size of an axis of three."""
    rng = np.random.default_rng([seed, 1])
    largest = {1: 60, 2: 3 * most, 3: most + 4, 4: most, 5: 3}[kind.rank]
    shape = tuple(int(n) for n in rng.integers(1, largest + 1, kind.rank))
    image = _image(kind, shape, rng)
    options = {"order": kind.order, "mode": kind.mode}
    if kind.name.startswith("spline_filter"):
        return _filter_call(kind, image, options, rng)
    options |= {"cval": _cval(kind, image.dtype, rng), "prefilter": kind.prefilter}
    if kind.output:
        options["output"] = np.dtype(kind.output)
    args, more, places, exact = _MAKERS[kind.name](kind, image, rng)
    wide = image.astype("c16" if image.dtype.kind == "c" else "f8")
    if kind.mode == "grid-constant" and kind.order > 1 and kind.prefilter:  # SciPy pads what the dtype holds of it
        wide = image if image.dtype.kind in "iubc" else wide
    expected = _truth(wide, places, options)
    if kind.name == "rotate" and kind.rank > 2 and kind.order > 1 and not kind.prefilter:
        # Without the filter a spline does not go through its voxels, and SciPy turns one plane after another.
        expected = ndimage.rotate(wide, *args, **{**options, **more, "output": wide.dtype})
    loose = _loose(places, shape, kind, exact, image)
    layout = str(rng.choice(["C", "C", "F", "reversed", "gaps"]))
    return Call(kind, image, args, options | more, expected, loose, layout)


def _image(kind, shape, rng):
    dtype = np.dtype(kind.dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind == "c":
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        low, high = (limits.min, limits.max) if rng.random() < 0.5 else (max(limits.min, -100), min(limits.max, 200))
        return rng.integers(low, high, shape, dtype, endpoint=True)
    image = rng.normal(size=shape) * float(rng.choice([1, 300]))
    if kind.order < 2 and rng.random() < 0.15:
        image[rng.random(shape) < 0.1] = rng.choice([np.nan, np.inf])
    return image.astype(dtype)


def _cval(kind, dtype, rng):
    value = float(rng.choice([0, 0, 7, -3.5, 300]))
    if kind.mode == "grid-constant" and kind.order > 1 and dtype.kind in "iub":
        value = float(rng.choice([0, 1]))  # SciPy pads with it, and refuses what the dtype does not hold
    return complex(value, 2.0) if dtype.kind == "c" and rng.random() < 0.5 else value


def _filter_call(kind, image, options, rng):
    args, axis = (), int(rng.integers(-image.ndim, image.ndim))
    options["output"] = np.dtype(kind.output)
    wide = image.astype("c16" if image.dtype.kind == "c" else "f8")
    truth = {**options, "output": wide.dtype}
    if kind.name == "spline_filter1d":
        options["axis"] = truth["axis"] = axis
    expected = getattr(ndimage, kind.name)(wide, **truth)
    return Call(kind, image, args, options, expected, np.zeros(image.shape, bool), str(rng.choice(["C", "F", "gaps"])))


def _far(shape, rng):
    """Coordinates around and in an image of this shape."""
    far = float(rng.choice([0.4, 3.0, 40.0]))
    count = tuple(int(n) for n in rng.integers(1, 9, int(rng.integers(1, 4))))
    if rng.random() < 0.3:  # what is taken for a grid
        count = (*count, 9, 17)
    places = np.stack([rng.uniform(-far, n - 1 + far, count) for n in shape])
    whole = rng.random(count) < 0.3
    places[:, whole] = np.round(places[:, whole])
    halves = rng.random(count) < 0.1
    places[:, halves] = np.round(places[:, halves]) + 0.5
    ends = rng.random(count) < 0.1
    places[:, ends] = np.reshape(shape, (-1, 1)) - 1.0
    return places


def _map(kind, image, rng):
    places = _far(image.shape, rng)
    with np.errstate(over="ignore"):
        places = places.astype(kind.places)
    if places.dtype.kind == "f":
        lost = rng.random(places.shape) < 0.03
        places[lost] = rng.choice([np.nan, np.inf, -np.inf, 6e4 if kind.places == "f2" else 1e30])
    return (places,), {}, places.astype("f8"), True


def _grid(shape):
    return np.stack(np.meshgrid(*(np.arange(n, dtype="f8") for n in shape), indexing="ij"))


def _affine(kind, image, rng):
    rank = image.ndim
    form = str(rng.choice(["diagonal", "square", "with offset", "homogeneous", "rectangular", "alone"]))
    columns = max(1, rank + int(rng.choice([-1, 2]))) if form == "rectangular" and rank < 4 else rank
    matrix = rng.normal(0, 0.3, (rank, columns)) * (form != "diagonal")
    matrix[range(min(rank, columns)), range(min(rank, columns))] += rng.choice([1.0, 0.5, 2.0, -1.0, 0.73, 1.9])
    offset = np.round(rng.uniform(-3, 3, rank), int(rng.integers(0, 4)))
    shape = tuple(int(n) for n in rng.integers(1, {1: 50, 2: 15, 3: 9}.get(columns, 4), columns))
    if form == "alone":
        for axis in rng.permutation(rank)[: int(rng.integers(0, rank))]:
            matrix[axis], matrix[:, axis], offset[axis] = 0, 0, 0
            matrix[axis, axis] = 1
            shape = (*shape[:axis], image.shape[axis], *shape[axis + 1 :])
    given, more = matrix, {"output_shape": shape}
    if form == "diagonal":
        given = np.diag(matrix).copy()
    elif form == "with offset":
        given = np.column_stack([matrix, offset])
    elif form == "homogeneous":
        given = np.vstack([np.column_stack([matrix, offset]), [0] * rank + [1]])
    places = offset.reshape(-1, *[1] * columns) + np.tensordot(matrix, _grid(shape), 1)
    return (given, 0.0 if form in ("with offset", "homogeneous") else offset), more, places, False


def _shift(kind, image, rng):
    by = np.round(rng.uniform(-4, 4, image.ndim), int(rng.integers(0, 3)))
    return (by.tolist(),), {}, _grid(image.shape) - by.reshape(-1, *[1] * image.ndim), False


def _zoom(kind, image, rng):
    factors = rng.choice([0.5, 1.0, 1.3, 2.0, 3.1], image.ndim)
    factors[0] = 0.77 if set(factors) == {1.0} else factors[0]
    shape = tuple(round(n * f) for n, f in zip(image.shape, factors.tolist(), strict=True))
    grid_mode = bool(rng.random() < 0.5) and kind.mode not in ("constant", "wrap")
    places = _grid(shape)
    for row, n, m in zip(places, image.shape, shape, strict=True):
        if grid_mode:
            row[...] = (row + 0.5) * (n / m if m else 1) - 0.5
        else:
            row *= (n - 1) / (m - 1) if m > 1 else 1
    return (factors.tolist(),), {"grid_mode": grid_mode}, places, False


def _rotate(kind, image, rng):
    first, second = sorted(int(a) for a in rng.permutation(image.ndim)[:2])
    angle, reshape = float(rng.choice([17.3, 90, -45, 180, 200.5])), bool(rng.random() < 0.5)
    turned = ndimage.rotate(np.zeros(image.shape), angle, (first, second), reshape, order=0)
    places = _grid(turned.shape)
    turn = np.deg2rad(angle)
    cos, sin = (np.cos(turn), np.sin(turn)) if angle % 90 else np.round((np.cos(turn), np.sin(turn)))
    a = places[first] - (turned.shape[first] - 1) / 2
    b = places[second] - (turned.shape[second] - 1) / 2
    places[first] = cos * a + sin * b + (image.shape[first] - 1) / 2
    places[second] = -sin * a + cos * b + (image.shape[second] - 1) / 2
    return (angle, (first, second)), {"reshape": reshape}, places, False


def _geometric(kind, image, rng):
    rank = image.ndim
    by, columns = np.round(rng.uniform(-2, 2, rank), 2).tolist(), int(rng.integers(1, 4))
    shape = tuple(int(n) for n in rng.integers(1, 7, columns))

    def mapping(o, factor):
        return tuple(factor * o[axis % len(o)] + by[axis] for axis in range(rank))

    places = np.stack([0.7 * _grid(shape)[axis % columns] + by[axis] for axis in range(rank)])
    return (mapping, shape), {"extra_arguments": (0.7,)}, places, True


def _displaced(kind, image, rng):
    rank = image.ndim
    grid = tuple(int(n) for n in rng.integers(1, {1: 40, 2: 20, 3: 9}.get(rank, 4), rank))
    with np.errstate(over="ignore"):
        moved = np.round(rng.uniform(-3, 3, (rank, *grid)), 1).astype(kind.places)
    spacing = tuple(rng.uniform(0.3, 2, rank).tolist()) if rng.random() < 0.5 else None
    places = moved.astype("f8") / np.reshape(spacing or [1.0] * rank, (-1, *[1] * rank)) + _grid(grid)
    return (moved,), {"spacing": spacing}, places, False


_MAKERS = {
    "map_coordinates": _map,
    "affine_transform": _affine,
    "shift": _shift,
    "zoom": _zoom,
    "rotate": _rotate,
    "geometric_transform": _geometric,
    "apply_displacement_field": _displaced,
}


def _truth(image, places, options):
    """SciPy's numbers in float64; by linumpy's rules where a coordinate is none."""
    places = np.clip(places, -1e9, 1e9) if options["mode"] == "nearest" else places
    lost = ~(np.abs(places) < 2.0**52).all(0)
    known = np.where(lost, 0, places)
    flat = known.reshape(len(known), -1)
    how = {key: options[key] for key in ("order", "mode", "cval", "prefilter")}
    out = "c16" if image.dtype.kind == "c" else "f8"
    expected = ndimage.map_coordinates(image, flat, output=out, **how).reshape(lost.shape)
    nothing = complex(np.nan, np.nan) if out == "c16" else np.nan
    expected[lost] = options["cval"] if options["mode"] in _CONSTANT else nothing
    return expected


def _loose(places, shape, kind, exact, image):
    """Where rounding of a coordinate decides between two numbers: at ends and ties, and around what is not finite."""
    loose = np.zeros(places.shape[1:], bool)
    with np.errstate(invalid="ignore"):
        for row, n in zip(places, shape, strict=True):
            half = np.abs(row - np.floor(row) - 0.5)
            if kind.order == 0:
                loose |= (half < _NEAR) & ((half > 0) | (not exact))
            whole = np.abs(row - np.round(row))
            jumps = kind.mode in ("constant", "wrap") or (kind.order == 0 and kind.mode != "nearest")
            if jumps and not exact:
                loose |= (whole < _NEAR) | (half < _NEAR if kind.order == 0 else False)
            if not np.isfinite(image).all():
                loose |= (whole < _NEAR) | (half < _NEAR)
            if kind.mode == "wrap" and n > 1:  # one period after another, the ends are alike
                loose |= (np.abs(row) > n) & (whole < _NEAR)
    return loose
