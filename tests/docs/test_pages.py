"""If this fails, a snippet of README.md or of a page in docs does not run as it stands, or not as the page says."""

import re

import numpy as np
import pytest
import zarr

from linumpy.core import native
from linumpy.device import DEVICE_VARIABLE, is_device_array, to_host
from linumpy.errors import ChunkError
from linumpy.io.ome import open_image, read_omezarr
from linumpy.testing.synthetic import SIZES, surface_depth
from tests.support.budget import some
from tests.support.pages import DOCS, ROOT, load_site, pages

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not installed with the package")
snippets = load_site("snippets") if DOCS.exists() else None


def readme(names, folder):
    """Of first_volume.md too, which begins alike."""
    volume, report, spec = names["volume"], names["report"], SIZES["small"]
    assert report.shape == volume.shape == spec.shape
    written, _ = read_omezarr(folder / "isotropic.ome.zarr")
    np.testing.assert_array_equal(written[...], to_host(names["isotropic"]))
    error = to_host(names["surface"]) - surface_depth(spec)
    assert np.nanmedian(np.abs(error)) < 0.25


def first_volume(names, folder):
    readme(names, folder)
    source, spacing = read_omezarr(folder / "demo-out/mosaic.ome.zarr")
    for crop, region in zip(names["crops"], (np.s_[0:32, 0:64, 0:64], np.s_[0:32, 32:96, 0:64]), strict=True):
        np.testing.assert_array_equal(crop, source[region])
    batch = np.stack([source[box] for box in names["boxes"]])
    np.testing.assert_allclose(names["mean"], batch.mean(dtype=np.float64), rtol=1e-4)
    halfway = (source[:, 2:-3] + source[:, 3:-2]) / 2  # 25 µm are 2.5 voxels
    np.testing.assert_allclose(to_host(names["moved"])[:, :-5], halfway, rtol=1e-4)
    assert names["small"].shape == (56, 96, 96)
    if "section" in names:
        expected = source[round(100 / spacing[0])]
        np.testing.assert_array_equal(names["section"], expected)
        assert names["brightness"] == pytest.approx(expected.mean(dtype=np.float64), rel=1e-4)


def larger_than_memory(names, folder):
    source, spacing = read_omezarr(folder / "mosaic.ome.zarr")
    flat = open_image(folder / "flat.ome.zarr")
    assert (len(flat.levels), flat.spacing[0]) == (4, spacing)
    np.testing.assert_array_equal(flat.levels[0][...], source[...].clip(0, 2000))
    assert open_image(folder / "mosaic-25um.ome.zarr").spacing[0] == pytest.approx((25, 25, 25), rel=0.02)
    assert 0.2 * source[...].max() < float(names["brightest"]) < source[...].max()


def chunks(names, folder):
    cubes = open_image(folder / "cubes.ome.zarr").levels[0]
    assert (cubes.chunks, cubes.shards) == ((32, 32, 32), (128, 128, 128))
    np.testing.assert_array_equal(cubes[...], names["volume"])
    assert names["plan"].chunk_count == 9


def commands(names, folder):
    bash = "".join(
        one.code for one in snippets.snippets(DOCS / "commands.md") if one.language == "bash" and not one.reason
    )
    written = re.findall(r"^\S+ .* (\S+\.(?:ome\.zarr|png))(?= --|$)", bash, re.M)
    written += ["surface.png", "focal.png"]
    assert len(written) == 18
    for name in written:
        assert (folder / name).exists(), name
        if name.endswith(".zarr"):
            assert open_image(folder / name).levels[0][...].any()


def reader(names, folder):
    values = np.random.default_rng(0).integers(0, 60_000, (128, 128, 128)).astype("uint16")
    for crop, region in zip(names["crops"], names["regions"], strict=True):
        np.testing.assert_array_equal(crop, values[region])
    np.testing.assert_array_equal(names["stack"][0], values[:64, :64, :64])
    np.testing.assert_array_equal(names["stack"][1], values[64:, 64:, :64])
    assert isinstance(names["error"], ChunkError)
    assert "c/0/0/0" in str(names["error"])
    np.testing.assert_array_equal(names["rest"], values[32:])
    if native.why_no_core() is None:  # zarr-python counts nothing, and its errors name the file alone
        assert (names["stats"].boxes, names["stats"].chunks) == (4, 3)
        assert "chunk (0, 0, 0)" in str(names["error"])


def streaming(names, folder):
    brain = zarr.open_array(folder / "brain.ome.zarr/0", mode="r")[...]
    last = np.stack([brain[z : z + 32, :64, :64] for z in range(32, 40)])
    assert names["mean"] == pytest.approx(last.mean(dtype=np.float64), rel=1e-2)
    assert names["shown"] == dict.fromkeys(("image", "labels", "context"), (1, 32, 64, 64))
    assert 0.5 < names["share"] < 1
    assert names["state"]
    predicted = zarr.open_array(folder / "predicted.ome.zarr/0", mode="r")[...]
    np.testing.assert_allclose(predicted, brain > 300, atol=1e-5)


def sampling(names, folder):
    assert names["slopes"].shape == (1, 3, 500)
    assert names["values"].shape == (1, 1000)


def sampling_files(names, folder):
    x, y, z = 2 * names["coords"].T  # ids grow by 1, 3 and 9
    np.testing.assert_allclose(names["values"][0], x + 3 * y + 9 * z, atol=1e-4)


def rays(names, folder):
    samples = names["samples"]
    assert samples.n_rays > 500
    # A field of density 1: opacity follows from the length of each ray inside the box.
    lengths = np.bincount(np.repeat(np.arange(len(samples.n_steps)), samples.n_steps), samples.dt)
    assert np.allclose(names["rgba"][:, 3], 1 - np.exp(-lengths), atol=1e-5)
    assert 0 < names["loss"] < 1


def voxel(names, folder):
    mask, pitch, spec = names["mask"], np.array(names["pitch"]), names["spec"]
    z, y, x = np.indices(mask.shape) + 0.5
    truth = surface_depth(spec)  # voxels
    points = np.stack([x, y, z], axis=-1) * pitch
    distance = np.full(mask.shape, np.inf)
    for a, b in zip(names["track"][:-1], names["track"][1:], strict=True):
        t = np.clip((points - a) @ (b - a) / ((b - a) @ (b - a)), 0, 1)
        distance = np.minimum(distance, np.linalg.norm(points - a - t[..., None] * (b - a), axis=-1))
    assert not mask[distance < 60].any()
    differ = mask != ((z - 0.5 >= truth) & (distance > 60))
    assert differ[distance > 60.001].mean() < 0.01
    away = np.abs(z - truth) > 8  # more than the lateral mean moves the surface
    assert differ[away & (distance > 60.001)].mean() < 1e-3
    volume = 4 / 3 * np.pi * 600 * 450 * 150
    assert names["inside"].sum() * np.prod(pitch) == pytest.approx(volume, rel=0.01)
    assert np.array_equal(names["both"], names["inside"] & mask)
    image = open_image(folder / "out.ome.zarr")
    assert len(image.levels) == 3
    assert np.array_equal(image.levels[0][...], (mask & ~names["inside"]) * np.uint8(3))
    labels = open_image(folder / "region.ome.zarr").levels[0][...]
    assert set(np.unique(labels)) == {0, 7}
    assert (labels == 7).sum() * np.prod(pitch) == pytest.approx(volume, rel=0.01)


def interop(names, folder):
    np.testing.assert_array_equal(names["crop"], names["values"][10:40, 20:84, 20:84])


def gallery(names, folder):
    shown = set(re.findall(r"\]\((pictures/.*?)\)", (DOCS / "gallery.md").read_text(encoding="utf-8")))
    assert shown == {f"pictures/{path.name}" for path in (folder / "pictures").iterdir() if path.suffix == ".png"}


#: What a page's snippets must have done, beside running.
CHECKS = {
    "README.md": readme,
    **{f"{f.__name__}.md": f for f in (first_volume, larger_than_memory, chunks, commands, reader, streaming)},
    **{f"{f.__name__}.md": f for f in (sampling, sampling_files, rays, voxel, interop, gallery)},
}
#: What pages need beside the base install.
NEEDS = {"voxel.md": ("trimesh",), "commands.md": ("trimesh",), "larger_than_memory.md": ("dask",)}
RUN = [
    page for page in pages()
    if any(one.reason is None and one.language in ("python", "bash") for one in snippets.snippets(page))
]  # fmt: skip


def run(page, folder, monkeypatch, device):
    for package in NEEDS.get(page.name, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(folder)
    monkeypatch.setenv(DEVICE_VARIABLE, device)
    try:
        import xarray  # noqa: F401
    except ImportError:
        return snippets.run(page, without="import xarray")
    return snippets.run(page)


@pytest.mark.parametrize("page", some(RUN, lambda page: page.name != "gallery.md"), ids=lambda page: page.name)
def test_the_snippets_of_a_page_run_without_a_gpu(page, tmp_path, monkeypatch):
    from matplotlib import pyplot

    before = pyplot.get_backend()
    pyplot.switch_backend("agg")
    try:
        names = run(page, tmp_path, monkeypatch, "cpu")
    finally:
        pyplot.close("all")
        pyplot.switch_backend(before)
    CHECKS.get(page.name, lambda *_: None)(names, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["README.md", "docs/first_volume.md", "docs/larger_than_memory.md"])
def test_the_snippets_of_a_page_run_on_a_gpu(name, tmp_path, monkeypatch):
    page = ROOT / name
    names = run(page, tmp_path, monkeypatch, "cuda")
    if "volume" in names:
        assert is_device_array(names["volume"])
        assert is_device_array(names["surface"])
    CHECKS[page.name](names, tmp_path)


def test_each_snippet_is_run_or_says_why_not():
    for page in pages():
        text = page.read_text(encoding="utf-8")
        found = list(snippets.snippets(page))
        assert len(re.findall(r"^\s*(?:```|~~~)", text, re.M)) == 2 * len(found), f"{page.name}: a fence is not found"
        assert len(re.findall("^<!-- not run: ", text, re.M)) == len(re.findall(r"<!-- not run: .*? -->\n```", text)), (
            page.name
        )
        for one in found:
            assert one.language in ("python", "bash", "text"), one
            assert one.reason is None or one.reason in snippets.REASONS, one
            assert one.reason is None or one.language != "python" or one.reason.startswith("without "), one
