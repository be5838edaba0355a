"""If this fails, the scripts that project a mosaic write wrong images, or a killed one leaves something that looks
finished.
"""

import numpy as np
import pytest
import zarr
from PIL import Image

from linumpy.io.ome import open_image, read_omezarr
from linumpy.mosaic import aip
from linumpy.resample.blocks.overlap import work_through
from linumpy.write.writer import write_omezarr
from tests.support.budget import matrix
from tests.support.script_runs import load, run_script

SCRIPTS = {"linum_aip": "linum-aip", "linum_aip_png": "linum-aip-png"}


def volume(seed=0, shape=(21, 50, 70)):
    rng = np.random.default_rng(seed)
    return (rng.gamma(2, 300, shape) * np.linspace(0.2, 2, shape[2])).astype("u2")


@pytest.fixture
def mosaic(tmp_path):
    return write_omezarr(tmp_path / "m.ome.zarr", volume(), (5, 10, 12), chunks=(8, 16, 16), origin=(0, 100, 200))


def test_a_run(mosaic, tmp_path):
    out = tmp_path / "aip.ome.zarr"
    done = run_script("linum_aip", mosaic, out, "--device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{mosaic} -> {out} on CPU: ")
    pixels, spacing = read_omezarr(out)
    assert (pixels.dtype, spacing) == (np.float32, (10.0, 12.0))
    assert [axis.name for axis in open_image(out).axes] == ["y", "x"]
    assert np.allclose(pixels[...], volume().mean(axis=0), rtol=1e-6)


def test_a_picture(mosaic, tmp_path):
    done = run_script("linum_aip_png", mosaic, tmp_path / "aip.png", "--device=cpu")
    assert done.returncode == 0, done.stderr
    got = np.asarray(Image.open(tmp_path / "aip.png"))
    mean = volume().mean(axis=0)
    black, white = np.percentile(mean, (0.1, 99.9))
    assert done.stdout.startswith(f"black is {black:.6g}, white {white:.6g}: percentiles 0.1 and 99.9")
    expected = np.clip((mean - black) / (white - black), 0, 1) * 65535
    assert got.shape == mean.shape
    assert np.abs(got.astype(float) - expected).max() < 4


@pytest.mark.parametrize(("axes", "tile_bytes"), matrix(["zyx", "yxz", "xzy"], [1, 20_000, 2**30]))
def test_the_same_however_it_is_cut(tmp_path, axes, tile_bytes):
    turned = np.moveaxis(volume(), (0, 1, 2), [axes.index(c) for c in "zyx"])
    source = write_omezarr(tmp_path / "m.zarr", turned, (5, 5, 5), axes=axes, chunks=(8, 9, 10))
    aip.project_mosaic(source, tmp_path / "a.zarr", tile_bytes=tile_bytes)
    expected = turned.astype("f8").mean(axis=axes.index("z"))
    assert np.allclose(zarr.open_group(tmp_path / "a.zarr", mode="r")["0"][...], expected, rtol=1e-6)


def test_flat_and_empty_pictures():
    for pixels in (np.full((4, 5), 7, "f4"), np.full((4, 5), np.nan, "f4")):
        picture, _ = aip.stretch(np, pixels)
        assert picture.dtype == np.uint16
        assert not picture.any()
    some = np.array([[0, np.nan, 10, np.inf]], "f4")
    assert aip.stretch(np, some)[0].tolist() == [[0, 0, 65535, 65535]]


def test_tiles_overlap_and_stay_in_order():
    log = []
    work_through(
        range(5),
        lambda n: log.append(("read", n)) or n,
        lambda n, tile: log.append(("compute", n)) or tile * 10,
        lambda n, result: log.append(("write", n, result)),
    )
    assert [one for one in log if one[0] == "write"] == [("write", n, n * 10) for n in range(5)]
    for n in range(4):  # the next tile is asked for before this one is computed, and no further one
        assert log.index(("read", n)) < log.index(("compute", n))
        assert n < 2 or log.index(("read", n)) > log.index(("compute", n - 2))


@pytest.mark.parametrize("step", ["read", "compute", "write"])
def test_an_error_in_any_step_is_raised_once_and_stops_the_rest(step):
    done = []

    def fail(at):
        def work(n, value=None):
            done.append((at, n))
            if at == step and n == 2:
                raise OSError(f"{at} {n}")
            return n

        return work

    with pytest.raises(OSError, match=f"{step} 2"):
        work_through(range(50), fail("read"), fail("compute"), fail("write"))
    assert max(n for _, n in done) <= 5


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_same_on_a_gpu(name, mosaic, tmp_path):
    main = load(name).main
    suffix = ".png" if name == "linum_aip_png" else ""
    places = {device: tmp_path / f"{device}{suffix}" for device in ("cuda", "cpu")}
    for device, place in places.items():
        assert main([str(mosaic), str(place), "--device", device]) == 0
    if name == "linum_aip":
        gpu, cpu = (zarr.open_group(place, mode="r")["0"][...] for place in places.values())
        assert np.allclose(gpu, cpu, rtol=1e-6)
    else:
        gpu, cpu = (np.asarray(Image.open(place)).astype(int) for place in places.values())
        assert np.abs(gpu - cpu).max() <= 2
