"""Pictures of images and curves: panels with axes, scale bars, colour bars and legends, drawn by Pillow.

In: host arrays. Out: a :class:`Picture`, which :func:`save` writes as PNG, PDF or SVG. Matplotlib took 0.5 to 1 s for
such a picture, mostly for measuring texts; a pipeline draws several for each slice.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_DPI = 120
#: In pixels: sizes of texts, width of a colour bar, gap, length of a tick, length of a line in the legend.
_TEXT, _SMALL, _BAR, _GAP, _TICK, _SWATCH = 18, 14, 22, 8, 6, 32
#: Axes are drawn with so many times the pixels along each axis, and then averaged, which makes edges of lines smooth.
_OVERSAMPLING = 2
_ABOVE = _TEXT + 3 * _GAP
#: Of each style, the pixels that are drawn and left out in turn.
_DASHES = {"--": (11, 6), ":": (3, 5)}
#: Colours at equal distances, between which is interpolated.
_COLORS = {
    "gray": ("#000000", "#ffffff"),
    "viridis": (
        "#440154", "#481769", "#472a7a", "#433d84", "#3d4e8a", "#355e8d", "#2e6d8e", "#297b8e", "#23898e",
        "#1f978b", "#21a585", "#2eb37c", "#46c06f", "#65cb5e", "#89d548", "#b0dd2f", "#d8e219", "#fde725",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Colors:
    """How values become colours.

    - `limits` (float, float): values of the first and the last colour.
    - `label`: label of the colour bar.
    - `name` ("viridis", "gray"): the colours.
    """

    limits: tuple[float, float]
    label: str
    name: str = "viridis"


@dataclass(frozen=True)
class Line:
    """A line, points or an area, in the units of the axes; without the points that are not finite.

    - `x`, `y` (N,): the points.
    - `color`: As ``"#rrggbb"``.
    - `label`: text in the legend; a line without text is not there.
    - `style` ("-", "--", ":", ".", "fill"): a line, long or short dashes, single points, or the area that the points
      surround.
    """

    x: np.ndarray
    y: np.ndarray
    color: str
    label: str = ""
    style: str = "-"
    width: float = 2.0


@dataclass(frozen=True)
class Panel:
    """Axes with an image, lines or both.

    - `title`, `x_label`, `y_label`: texts above, below and on the left.
    - `size` (float, float): width and height of the axes, without texts, in inches of 120 pixels.
    - `x_limits`, `y_limits` (float, float): coordinates of the left and right edge, and of the upper and lower edge.
    - `image` (rows, columns): values, which fill the axes; values that are not finite are white.
    - `colors`: colours of the image. The title of the colour bar is the share of values that its limits clip.
    - `lines`: in the order in which they are drawn.
    - `has_scale_bar`: whether to draw a scale bar, for x in µm.
    """

    title: str
    x_label: str
    y_label: str
    size: tuple[float, float]
    x_limits: tuple[float, float]
    y_limits: tuple[float, float]
    image: np.ndarray | None = None
    colors: Colors | None = None
    lines: tuple[Line, ...] = ()
    has_scale_bar: bool = False


@dataclass(frozen=True)
class Picture:
    """Rows of panels, below the name of the image that they show."""

    rows: tuple[tuple[Panel, ...], ...]
    source: str = ""


def save(picture: Picture, path: str | Path, suffix: str = "") -> None:
    """Write a picture.

    - `suffix`: ``".png"``, or ``".pdf"`` or ``".svg"``, which contain the same pixels; by default the suffix of the
      path.
    """
    pixels, suffix, source = render(picture), (suffix or Path(path).suffix).lower(), _printable(picture.source)
    if suffix == ".pdf":
        pixels.save(path, format="PDF", resolution=_DPI, quality=95, title=source)
        return
    content = png(pixels)
    if suffix == ".svg":
        size = f"width='{pixels.width}' height='{pixels.height}'"
        content = (
            f"<?xml version='1.0' encoding='UTF-8'?>\n<svg xmlns='http://www.w3.org/2000/svg' {size}>"
            f"<title>{html.escape(source)}</title>"
            f"<image {size} href='{data_url(content)}'/></svg>\n"
        ).encode()
    Path(path).write_bytes(content)


def png(pixels: Image.Image) -> bytes:
    """Encode pixels as PNG."""
    file = io.BytesIO()
    pixels.save(file, format="PNG", dpi=(_DPI, _DPI), compress_level=1)  # three times as fast as the default
    return file.getvalue()


def data_url(content: bytes, kind: str = "png") -> str:
    """Return the URL by which a page holds the file of a picture."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def render(picture: Picture) -> Image.Image:
    """Return the pixels of a picture, as an image of Pillow."""
    rows = [[_Axes(panel) for panel in row] for row in picture.rows]
    heights = [max(axes.height for axes in row) + max(axes.below for axes in row) + _ABOVE for row in rows]
    top = _TEXT + 2 * _GAP if picture.source else 0
    width = max(sum(axes.before + axes.width + axes.after for axes in row) for row in rows)
    canvas = Image.new("RGB", (max(width, _width(picture.source) + 2 * _GAP), top + sum(heights)), "white")
    _write(canvas, (canvas.width / 2, _GAP), picture.source, "ma")
    for row, height in zip(rows, heights, strict=True):
        left = 0
        for axes in row:
            axes.draw(canvas, left + axes.before, top + _ABOVE)
            left += axes.before + axes.width + axes.after
        top += height
    return canvas


class _Axes:
    """A panel in pixels.

    - `before`, `after`, `below`: space for texts on the left, on the right and below; above, it is :data:`_ABOVE`.
    """

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.width, self.height = (max(1, round(inches * _DPI)) for inches in panel.size)
        self.x_ticks, self.y_ticks = (
            _ticks(panel.x_limits, self.width // 100),
            _ticks(panel.y_limits, self.height // 45),
        )
        self.bar_ticks = [] if panel.colors is None else _ticks(panel.colors.limits, self.height // 45)
        self.legend = self._legend()
        self.before = _TICK + _widest(self.y_ticks) + _TEXT + 3 * _GAP
        self.below = _TICK + 2 * _TEXT + 4 * _GAP + len(self.legend) * (_SMALL + _GAP)
        bar = 0 if panel.colors is None else _BAR + _TICK + _widest(self.bar_ticks) + _TEXT + 3 * _GAP
        texts = [_width(panel.title), *(_width_of_legend(row) for row in self.legend)]
        self.after = max(bar, max(texts) - self.width) + 2 * _GAP

    def _legend(self) -> list[list[Line]]:
        """Distribute the lines that have a label over rows."""
        rows: list[list[Line]] = []
        for line in (line for line in self.panel.lines if line.label):
            if not rows or _width_of_legend([*rows[-1], line]) > self.width:
                rows.append([])
            rows[-1].append(line)
        return rows

    def draw(self, canvas: Image.Image, left: int, top: int) -> None:
        """Draw the panel; `left` and `top` are the corner of the axes."""
        panel, draw = self.panel, ImageDraw.Draw(canvas)
        right, bottom = left + self.width, top + self.height
        canvas.paste(self._inside(), (left, top))
        draw.rectangle((left - 1, top - 1, right, bottom), outline="black")
        if panel.has_scale_bar:
            self._draw_scale_bar(canvas, right, bottom)
        for share, text in self.x_ticks:
            x = left + share * self.width
            draw.line((x, bottom, x, bottom + _TICK), "black")
            _write(canvas, (x, bottom + _TICK + 2), text, "ma")
        for share, text in self.y_ticks:
            y = top + share * self.height
            draw.line((left - _TICK, y, left, y), "black")
            _write(canvas, (left - _TICK - 4, y), text, "rm")
        _write(canvas, (left, top - _GAP), panel.title, "ld")
        _write(canvas, ((left + right) / 2, bottom + _TICK + _TEXT + _GAP), panel.x_label, "ma")
        _write_upwards(canvas, left - self.before + _GAP, (top + bottom) / 2, panel.y_label)
        for number, row in enumerate(self.legend):
            _draw_legend(canvas, left, bottom + self.below - (len(self.legend) - number) * (_SMALL + _GAP), row)
        if panel.colors is not None:
            self._draw_bar(canvas, right + 2 * _GAP, top, panel.colors)

    def _inside(self) -> Image.Image:
        """Return the pixels of the axes: image and lines."""
        panel, size = self.panel, (self.width * _OVERSAMPLING, self.height * _OVERSAMPLING)
        if panel.image is None or panel.colors is None:
            inside = Image.new("RGB", size, "white")
        else:
            pixels = Image.fromarray(colored(panel.image, panel.colors.limits, panel.colors.name))
            inside = pixels.resize(size, Image.Resampling.NEAREST)
        draw = ImageDraw.Draw(inside)
        for line in panel.lines:
            x, y = (
                (np.asarray(values, np.float64) - begin) / (end - begin) * length
                for values, (begin, end), length in zip(
                    (line.x, line.y), (panel.x_limits, panel.y_limits), size, strict=True
                )
            )
            _draw_line(draw, np.stack([x, y], axis=1), line)
        return inside.reduce(_OVERSAMPLING)

    def _draw_scale_bar(self, canvas: Image.Image, right: int, bottom: int) -> None:
        draw, extent = ImageDraw.Draw(canvas), abs(self.panel.x_limits[1] - self.panel.x_limits[0])
        label = scale_bar_label(scale_bar_um(extent))
        length = scale_bar_um(extent) / extent * self.width
        half = max(length, _width(label)) / 2 + _GAP
        middle, top = right - half - _GAP / 2, bottom - _TEXT - 3 * _GAP
        draw.rectangle((middle - half, top, middle + half, bottom - _GAP / 2), "#303030")
        draw.line((middle - length / 2, top + _GAP, middle + length / 2, top + _GAP), "white", 3)
        draw.text((middle, top + _GAP + 4), label, "white", _font(_TEXT), "ma")

    def _draw_bar(self, canvas: Image.Image, left: int, top: int, colors: Colors) -> None:
        """Draw a colour bar with its ticks and its label, and below it the share of values that its limits clip."""
        draw, bottom, right = ImageDraw.Draw(canvas), top + self.height, left + _BAR
        ramp = Image.fromarray(_table(colors.name)[::-1, None].copy())
        canvas.paste(ramp.resize((_BAR, self.height)), (left, top))
        draw.rectangle((left - 1, top - 1, right, bottom), outline="black")
        for share, text in self.bar_ticks:
            y = bottom - share * self.height
            draw.line((right, y, right + _TICK, y), "black")
            _write(canvas, (right + _TICK + 4, y), text, "lm")
        _write_upwards(canvas, right + _TICK + _widest(self.bar_ticks) + 2 * _GAP, (top + bottom) / 2, colors.label)
        if self.panel.image is not None:
            clipped, _ = clipping(self.panel.image, colors.limits)
            _write(canvas, (left, bottom + _TICK + _TEXT + _GAP), clipped, "la", _SMALL)


def _ticks(limits: tuple[float, float], count: int) -> list[tuple[float, str]]:
    """Return about `count` round numbers within limits: their share of the way to the second limit, and their text."""
    low, high = min(limits), max(limits)
    if not 1e-9 * max(-low, high, 1e-280) < high - low < math.inf:
        return [(0.5, f"{low:g}")]
    count = max(2, count)
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power * count >= high - low)
    numbers = np.arange(math.ceil(low / step), math.floor(high / step) + 1) * step
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    form = f".{digits}f" if digits < 5 and max(-low, high) < 1e6 else ".6g"
    return [((number - limits[0]) / (limits[1] - limits[0]), format(number + 0.0, form)) for number in numbers.tolist()]


def _draw_line(draw: ImageDraw.ImageDraw, points: np.ndarray, line: Line) -> None:
    """Draw a line at points in pixels."""
    finite = np.isfinite(points).all(axis=1)
    points, width = np.clip(points, -1e5, 1e5), round(line.width * _OVERSAMPLING)
    if line.style == "fill" and np.count_nonzero(finite) > 1:
        draw.polygon(points[finite].ravel().tolist(), line.color)
    if line.style == "fill":
        return
    breaks = np.flatnonzero(np.diff(finite)) + 1
    for run, is_finite in zip(np.split(points, breaks), np.split(finite, breaks), strict=True):
        if not is_finite.any():
            continue
        if line.style == "." or len(run) == 1:
            for x, y in run.tolist():
                draw.ellipse((x - width / 2, y - width / 2, x + width / 2, y + width / 2), line.color)
            continue
        for part in [run] if line.style == "-" else _dashes(run, *_DASHES[line.style]):
            draw.line(part.ravel().tolist(), line.color, width)


def _dashes(points: np.ndarray, drawn: int, left_out: int) -> Iterator[np.ndarray]:
    """Cut a line into dashes of `drawn` pixels."""
    distance = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])
    for begin in np.arange(0, distance[-1], (drawn + left_out) * _OVERSAMPLING):
        end = min(begin + drawn * _OVERSAMPLING, distance[-1])
        corners = distance[(distance > begin) & (distance < end)]
        at = np.concatenate([[begin], corners, [end]])
        yield np.stack([np.interp(at, distance, column) for column in points.T], axis=1)


def _draw_legend(canvas: Image.Image, left: float, top: float, row: list[Line]) -> None:
    draw = ImageDraw.Draw(canvas)
    for line in row:
        y = top + _SMALL / 2
        if line.style == "fill":
            draw.rectangle((left, top, left + _SWATCH, top + _SMALL), line.color)
        elif line.style == ".":
            draw.ellipse((left + _SWATCH / 2 - 3, y - 3, left + _SWATCH / 2 + 3, y + 3), line.color)
        else:
            drawn, left_out = _DASHES.get(line.style, (_SWATCH, 0))
            for x in range(0, _SWATCH, drawn + left_out):
                draw.line((left + x, y, left + min(x + drawn, _SWATCH), y), line.color, math.ceil(line.width))
        _write(canvas, (left + _SWATCH + _GAP, y), line.label, "lm", _SMALL)
        left += _width_of_legend([line])


def _width_of_legend(row: list[Line]) -> int:
    return sum(_SWATCH + 3 * _GAP + _width(line.label, _SMALL) for line in row)


def _write(canvas: Image.Image, position: tuple[float, float], text: str, anchor: str, size: int = _TEXT) -> None:
    """Write a text; `anchor` is Pillow's name of the point of the text that is at `position`."""
    draw = ImageDraw.Draw(canvas)
    for number, line in enumerate(text.split("\n")):
        draw.text((position[0], position[1] + number * (size + 4)), _printable(line), "black", _font(size), anchor)


def _write_upwards(canvas: Image.Image, left: float, middle: float, text: str) -> None:
    """Write a text from the bottom to the top; `left` is its left edge, `middle` its centre along y."""
    turned = Image.new("RGB", (_width(text) + 2, _TEXT + 8), "white")
    _write(turned, (1, 1), text, "la")
    turned = turned.transpose(Image.Transpose.ROTATE_90)
    canvas.paste(turned, (round(left), round(middle - turned.height / 2)))


def _width(text: str, size: int = _TEXT) -> int:
    return math.ceil(_font(size).getlength(_printable(text)))


def _widest(ticks: list[tuple[float, str]]) -> int:
    return max((_width(text) for _, text in ticks), default=0)


def _printable(text: str) -> str:
    """Return a text without control characters and bytes of names that are no text."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """Return the font of matplotlib, which unlike Pillow's own has Greek letters, accents and subscripts."""
    matplotlib = importlib.util.find_spec("matplotlib")  # this does not import it
    assert matplotlib is not None
    assert matplotlib.origin is not None
    return ImageFont.truetype(Path(matplotlib.origin).parent / "mpl-data/fonts/ttf/DejaVuSans.ttf", size)


def colored(values: np.ndarray, limits: tuple[float, float], name: str = "gray") -> np.ndarray:
    """Return the colours of values, uint8 of shape (rows, columns, 3); white where a value is not finite."""
    low, high = limits
    finite = np.isfinite(values)
    scaled = (np.where(finite, values, low) - low) * (255 / (high - low) if high > low else 0)
    pixels: np.ndarray = _table(name)[np.clip(scaled, 0, 255).astype(np.uint8)]
    pixels[~finite] = 255
    return pixels


def color_of(value: float, colors: Colors) -> str:
    """Return the colour of a value, as ``"#rrggbb"``."""
    return "#" + colored(np.array([[value]]), colors.limits, colors.name).tobytes().hex()


@lru_cache
def _table(name: str) -> np.ndarray:
    """Return 256 colours, uint8 of shape (256, 3)."""
    nodes = np.array([list(bytes.fromhex(color[1:])) for color in _COLORS[name]])
    shares = np.linspace(0, len(nodes) - 1, 256)
    return np.rint([np.interp(shares, np.arange(len(nodes)), channel) for channel in nodes.T]).T.astype(np.uint8)


def percentiles(values: np.ndarray, percents: tuple[float, float]) -> tuple[float, float]:
    """Return two percentiles of the finite values, as colour limits; (0, 1) without finite values."""
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, percents) if finite.size else (0.0, 1.0)
    return float(low), float(high)


def clipping(values: np.ndarray, limits: tuple[float, float]) -> tuple[str, str]:
    """Return the share of finite values outside of colour limits as text, and matplotlib's option `extend` for it."""
    finite = values[np.isfinite(values)]
    below, above = (int(np.sum(outside)) / max(1, finite.size) for outside in (finite < limits[0], finite > limits[1]))
    lines = [f"{share:.2g} % {side}" for share, side in ((100 * above, "above"), (100 * below, "below")) if share]
    arrows = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    return "\n".join(lines), arrows[below > 0, above > 0]


def extent_um(shape: tuple[int, ...], spacing: tuple[float, ...]) -> tuple[float, ...]:
    """Return the length of an image along each axis in µm."""
    return tuple(n * s for n, s in zip(shape, spacing, strict=True))


def scale_bar_um(width_um: float) -> float:
    """Return the length of a scale bar in µm: 1, 2 or 5 times a power of ten, at most a fifth of the picture."""
    max_length = width_um / 5
    power = 10.0 ** np.floor(np.log10(max_length))
    return float(max(step * power for step in (1, 2, 5) if step * power <= max_length))


def scale_bar_label(length_um: float) -> str:
    """Return the length of a scale bar as text."""
    return f"{length_um / 1000:g} mm" if length_um >= 1000 else f"{length_um:g} µm"
