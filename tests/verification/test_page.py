"""If this fails, the page of a verification hides what was found, shows it elsewhere, or runs what a path says."""

import base64
import io
import re

import numpy as np
import pytest
import zarr
from PIL import Image

from linumpy.verification import page as module
from linumpy.verification.findings import STATES, ArrayResult, Finding, Verification, in_order
from linumpy.verification.page import COLORS, write_page
from linumpy.write.writer import write_omezarr
from tests.quality.test_report import Page

HOSTILE = "a/<script>alert(1)</script>'\"&amp;\n\x00\u202e\udcff/0"
SHOWN = HOSTILE.replace("\n", "\\n").replace("\x00", "\\x00").replace("\u202e", "\\u202e").replace("\udcff", "\\udcff")


class Pictures(Page):
    """Also all tags, all texts, and the attributes of pictures by their `alt`."""

    def __init__(self, text):
        self.tags, self.texts, self.pictures = set(), [], {}
        super().__init__(text)

    def handle_starttag(self, tag, attributes):
        super().handle_starttag(tag, attributes)
        self.tags.add(tag)
        if tag in ("img", "meta"):
            self._open.pop()  # elements without an end
        if tag == "img":
            self.pictures.setdefault(dict(attributes)["alt"], []).append(dict(attributes))

    def handle_data(self, data):
        super().handle_data(data)
        self.texts.append(data)


def array_of(states, path="0"):
    grid = () if states is None else states.shape
    return ArrayResult(
        path,
        tuple(4 * n for n in grid),
        (4,) * len(grid),
        "uint16",
        7,
        damaged=3,
        missing=2,
        zero=1,
        made_by="mean",
        states=states,
    )


def write(tmp_path, arrays=(), findings=(), notes=(), source=None):
    source = tmp_path / "none.zarr" if source is None else source
    verification = Verification(str(source), tuple(arrays), in_order(list(findings)), tuple(notes), 2**30, 2.0)
    write_page(verification, source, tmp_path / "page.html", overwrite=True)
    text = (tmp_path / "page.html").read_text("utf-8")
    page = Pictures(text)
    assert not page._open, "all elements are closed"
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not re.search(r"https?://|url\(|@import", text)
    assert not page.tags & {"script", "link", "iframe"}
    assert len(text) < 2e6
    return page


def pixels(picture, mode="RGB"):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["src"].split(",")[1]))).convert(mode))


def states_at(picture):
    """The states that the colours of a map say."""
    colors = np.array([list(bytes.fromhex(color[1:])) for color in COLORS])
    same = (pixels(picture)[:, :, None] == colors).all(axis=-1)
    assert (same.sum(axis=-1) == 1).all()
    return same.argmax(axis=-1)


def test_hostile_texts_are_texts(tmp_path):
    long = "x" * 5000 + "the end"
    findings = [
        Finding("leftover", HOSTILE, HOSTILE, "effect", "advice"),
        Finding("damaged", "0/c/1", long, HOSTILE, "<img src=x onerror=alert(1)>", 2),
    ]
    states = np.full((2, 2), 4, "u1")
    page = write(tmp_path, [array_of(states, HOSTILE)], findings, [HOSTILE], tmp_path / HOSTILE.replace("\x00", ""))
    rows = [row for row in page.rows if len(row) == 5][1:]
    assert [row[0] for row in rows] == ["damaged", "leftover"], "in order of harm"
    assert rows[1] == ["leftover", SHOWN, SHOWN, "effect", "advice"]
    assert rows[0][3:] == [SHOWN, "<img src=x onerror=alert(1)>"]
    assert rows[0][2].startswith("xxx")
    assert rows[0][2].endswith("the end")
    assert len(rows[0][2]) < 400
    assert [SHOWN] in page.rows, "the note"
    assert [SHOWN, "8 × 8", "uint16", "4 × 4", "7", "3", "0", "2", "1", "mean"] in page.rows
    assert f"array {SHOWN}" in page.texts
    assert any("Verification of" in text and "<script>" in text for text in page.texts)
    assert set(page.pictures) == {"map of chunks"}


def test_a_sound_source_and_a_file_that_exists(tmp_path):
    page = write(tmp_path, [array_of(np.zeros((2, 2), "u1")), array_of(None, "1")])
    assert "Sound: nothing was found." in page.texts
    assert not page.pictures
    before = (tmp_path / "page.html").read_bytes()
    with pytest.raises(FileExistsError, match=r"page\.html"):
        write_page(Verification("x", (), ()), tmp_path / "none.zarr", tmp_path / "page.html")
    with pytest.raises(ValueError, match="inside the source"):
        write_page(Verification("x", (), ()), tmp_path, tmp_path / "new.html")
    assert (tmp_path / "page.html").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def worst(states, along):
    """The worst states along an axis of the last three, and of blocks where the map would be too large."""
    grid = states.reshape((1,) * max(0, 3 - states.ndim) + states.shape)
    rows, columns = (n for axis, n in enumerate(grid.shape[-3:]) if axis != along)
    steps = [max(1, -(-n // 512)) for n in (rows, columns)]
    plane = np.zeros((-(-rows // steps[0]), -(-columns // steps[1])), int)
    for index in np.argwhere(grid):
        row, column = (i // s for i, s in zip(np.delete(index[-3:], along), steps, strict=True))
        plane[row, column] = max(plane[row, column], grid[tuple(index)])
    return plane


@pytest.mark.parametrize(
    ("shape", "maps"),
    [
        ((), [0]), ((1,), [0]), ((5,), [0]), ((1300,), [0]), ((4, 6), [0]), ((1, 40, 30), [0]), ((7, 1, 6), [1]),
        ((9, 8, 1), [2]), ((3, 4, 5), [0, 1, 2]), ((2, 1100, 513), [0, 1, 2]), ((2, 3, 4, 5, 6), [0, 1, 2]),
        ((3, 2, 1, 1, 1), [0]),
    ],
)  # fmt: skip
def test_maps(tmp_path, shape, maps):
    rng = np.random.default_rng(len(shape))
    states = np.zeros(shape, "u1")
    for number in range(1, len(STATES)):
        states[tuple(rng.integers(0, n, 3) for n in shape)] = number
    page = write(tmp_path, [array_of(np.zeros((2, 2), "u1"), "sound"), array_of(states)])
    pictures = page.pictures["map of chunks"]
    assert len(pictures) == len(maps)
    for picture, along in zip(pictures, maps, strict=True):
        found = states_at(picture)
        np.testing.assert_array_equal(found, worst(states, along))
        width, height = int(picture["width"]), int(picture["height"])
        assert max(width, height) <= 512
        assert width >= found.shape[1]
        assert height >= found.shape[0]
    for number, name in enumerate(STATES):
        assert f"{np.count_nonzero(states == number):,} {name}" in page.texts
    assert "array sound" not in page.texts
    names, sizes = ["", "", "", *(f"axis {axis}" for axis in range(len(shape)))][-3:], (1, 1, 1, *shape)[-3:]
    corners = [
        f"{names[axis]} = {end}"
        for along in maps
        for axis in (2, 1, 0)  # from left to right, then downwards
        for end in dict.fromkeys((0, sizes[axis] - 1))
        if axis != along and names[axis]
    ]
    assert [text for text in page.texts if re.fullmatch(r"axis \d = \d+", text)] == corners


def test_the_page_of_a_million_chunks_is_small(tmp_path):
    rng = np.random.default_rng(0)
    arrays = [array_of(rng.integers(0, 5, (100, 100, 100), "u1") >> k, str(k)) for k in range(3)]
    arrays += [array_of(rng.integers(0, 5, (1, 1000, 1000), "u1"), f"flat {k}") for k in range(40)]
    arrays += [array_of(None, "a/" * 90 + str(k)) for k in range(1500)]
    text = "voxels 1024:1152, 0:128, 256:384 cannot be read: the checksum is 0x01234567, and not 0x89abcdef"
    findings = [Finding("damaged", f"0/c/{k}/77/99", text, text, text) for k in range(30_000)]
    page = write(tmp_path, arrays, findings)
    assert "29,000 more rows are left out." in page.texts
    assert "543 more rows are left out." in page.texts
    assert "Others are left out: the page would become too large." in page.texts
    assert sum(row[0] == "damaged" for row in page.rows) == 1000
    assert len(page.pictures["map of chunks"]) > 10


def levels_of(page):
    captions = [text for text in page.texts if "steps" in text]
    return captions, page.pictures.get("middle plane", [])


def style(picture):
    return {name: float(value) for name, value in re.findall(r"(\w+): ([-\d.]+)px", picture["style"])}


@pytest.fixture
def image(tmp_path):
    rng = np.random.default_rng(1)
    volume = rng.integers(100, 1000, (12, 440, 80), "u2")
    write_omezarr(tmp_path / "i.ome.zarr", volume, (10, 10, 10), chunks=(4, 16, 16), levels=3)
    folder = tmp_path / "i.ome.zarr"
    levels = [zarr.open_array(folder / str(level), mode="r+") for level in range(3)]
    return folder, levels, [array_of(None, str(level)) for level in range(3)]


def test_levels_have_one_scale(tmp_path, image):
    folder, levels, arrays = image
    levels[1][:] = 60_000  # the values of another image
    captions, pictures = levels_of(write(tmp_path, arrays, source=folder))
    assert len(captions) == len(pictures) == 3
    assert captions[1].startswith("1: 6 × 220 × 40, steps 20 × 20 × 20")
    low, high = np.percentile(levels[2][levels[2].shape[0] // 2], (0.5, 99.5))
    for level, picture in zip(levels, pictures, strict=True):
        plane = level[level.shape[0] // 2].astype(float)
        step = max(1, plane.shape[0] // 220)
        means = plane.reshape(plane.shape[0] // step, step, plane.shape[1] // step, step).mean(axis=(1, 3))
        wanted = ((means - low) * 255 / (high - low)).clip(0, 255)
        np.testing.assert_allclose(pixels(picture, "L"), wanted, atol=1)
        assert style(picture) == pytest.approx({"left": 0, "top": 0, "width": 40, "height": 220}, abs=0.2)


@pytest.mark.parametrize(("moved", "placed"), [(100.0, True), (1e9, False), (float("nan"), False)])
def test_a_level_lies_where_its_metadata_say(tmp_path, image, moved, placed):
    folder, _, arrays = image
    group = zarr.open_group(folder, mode="r+")
    ome = group.attrs["ome"]
    transforms = ome["multiscales"][0]["datasets"][2]["coordinateTransformations"]
    transforms[1]["translation"][2] += moved
    group.attrs["ome"] = ome
    page = write(tmp_path, arrays, source=folder)
    captions, pictures = levels_of(page)
    if np.isnan(moved):  # such an image cannot be opened
        assert not captions
        assert any(text.startswith("Not drawn:") for text in page.texts)
        return
    zoom = 220 / 4400
    assert [style(picture)["left"] for picture in pictures] == pytest.approx([0, 0, 100 * zoom * placed], abs=0.1)
    assert any(("where its metadata say" in text) == placed for text in page.texts if "black is" in text)


def test_planes_that_cannot_be_drawn(tmp_path, image, monkeypatch):
    folder, _, arrays = image
    for path in (folder / "1").rglob("c/*/*/*"):
        path.write_bytes(b"\0" * 20)
    captions, pictures = levels_of(write(tmp_path, arrays, source=folder))
    assert ["not drawn" in caption for caption in captions] == [False, True, False]
    assert "zstd" in captions[1].lower()
    assert len(pictures) == 2
    monkeypatch.setattr(module, "_PLANE", 440 * 80 - 1)
    captions, pictures = levels_of(write(tmp_path, arrays, source=folder))
    assert "its plane is large, 35,200 voxels" in captions[0]
    assert len(pictures) == 1
    (folder / "2/zarr.json").write_text("{")
    page = write(tmp_path, arrays, source=folder)
    assert any(text.startswith("Not drawn:") for text in page.texts)
    assert not page.pictures
