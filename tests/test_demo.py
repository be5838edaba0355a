"""If this fails, the demo's results are off from the truth."""

import numpy as np
import pytest
from PIL import Image

from linumpy import demo
from linumpy.demo import run_demo
from linumpy.errors import GpuUnavailableError
from linumpy.gpu.interpolation import resample_volume
from linumpy.io.ome import open_image
from linumpy.mosaic.io import figures
from linumpy.pictures import scale_bar_um
from linumpy.testing import synthetic
from linumpy.testing.synthetic import surface_depth


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run_demo(tmp_path_factory.mktemp("demo") / "out", "small", "cpu")


def test_the_surface_is_near_the_truth(result):
    assert result.error_voxels < 0.25
    assert abs(result.bias_voxels) < 0.1
    assert result.error_um == pytest.approx(result.error_voxels * 5)


def test_what_it_writes(result):
    mosaic, volume, depth = (open_image(path) for path in result.outputs[:3])
    spec = synthetic.SIZES["small"]
    assert mosaic.levels[0].shape == spec.shape
    assert volume.spacing == ((10.0, 10.0, 10.0),)
    raw = mosaic.levels[0][...]
    expected, _ = resample_volume(raw, spec.spacing_um, 10.0)
    assert np.array_equal(volume.levels[0][...], expected)
    assert depth.levels[0].dtype == np.float32
    error = depth.levels[0][...] - surface_depth(spec) * 5
    assert np.nanmedian(np.abs(error)) == pytest.approx(result.error_um, abs=0.01)
    assert np.nanmedian(error) == pytest.approx(result.bias_voxels * 5, abs=0.01)
    for picture in result.outputs[3:]:
        image = np.asarray(Image.open(picture))
        assert image.shape[0] > 300
        assert len(np.unique(image.reshape(-1, image.shape[-1]), axis=0)) > 100, "a picture of something"


def test_what_it_prints(result):
    text = str(result)
    for part in (
        "stage",
        "read it to the CPU",
        "GiB/s",
        "median absolute error",
        "bias",
        "voxels",
        "µm",
        "section_xz.png",
    ):
        assert part in text
    assert sum(stage.seconds for stage in result.stages) < 60


def test_a_second_run(result, tmp_path, monkeypatch):
    with pytest.raises(FileExistsError, match=r"mosaic\.ome\.zarr exists"):
        run_demo(result.outputs[0].parent, "small", "cpu")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    run_demo(tmp_path / "out", "small", "cpu")
    drawn, draw = [], figures.draw_section
    monkeypatch.setattr("linumpy.demo.draw_section", lambda *a, **k: drawn.append(a) or draw(*a, **k))
    run_demo(tmp_path / "out", "small", "cpu", overwrite=True)
    (section, found, truth, *_), row = drawn[0], open_image(result.outputs[1]).levels[0].shape[1] // 2
    depths = surface_depth(synthetic.SIZES["small"])[row], open_image(result.outputs[2]).levels[0][row] / 5
    for line, expected in zip((truth, found), depths, strict=True):  # in voxels of 5 µm, which become 10 µm
        np.testing.assert_allclose(line, (expected + 0.5) / 2 - 0.5, atol=1e-4)
    assert section.shape[1] == len(truth)
    assert (tmp_path / "out/notes.txt").read_text() == "mine"
    assert len(list((tmp_path / "out").iterdir())) == 6


def test_bad_input(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="size 'huge' is unknown: choose one of small, medium, large"):
        run_demo(tmp_path, "huge")
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    with pytest.raises(GpuUnavailableError, match="there is none"):
        run_demo(tmp_path / "out", "small", "cuda")
    assert not (tmp_path / "out").exists()


def test_scale_bars_are_round():
    assert [scale_bar_um(width) for width in (2560, 1000, 99, 7.5, 120_000)] == [500, 200, 10, 1, 20_000]


@pytest.mark.gpu
def test_on_a_gpu(result, tmp_path, cupy, monkeypatch):
    """Nothing but the results and one plane leaves the device, and they are those of the CPU."""
    from linumpy.write.device_chunks import pinned_copies

    fetched, real = [], cupy.ndarray.get

    def count(array):
        fetched.append((array.shape, array.nbytes))
        return real(array)

    monkeypatch.setattr("linumpy.device.to_host", lambda x: count(x) if isinstance(x, cupy.ndarray) else np.asarray(x))
    monkeypatch.setattr("linumpy.demo.to_host", lambda x: count(x) if isinstance(x, cupy.ndarray) else np.asarray(x))
    monkeypatch.setattr(
        "linumpy.write.chunks.to_host", lambda x: count(x) if isinstance(x, cupy.ndarray) else np.asarray(x)
    )

    def count_landed(arena, pieces, stream):
        fetched.append(("stored", sum(end - begin for begin, end in pieces)))
        return pinned_copies(arena, pieces, stream)

    monkeypatch.setattr("linumpy.write.device_chunks.pinned_copies", count_landed)
    on_gpu = run_demo(tmp_path / "out", "small", "cuda")
    assert on_gpu.read_by.startswith("linumpy: ")
    volume = 4 * np.prod(on_gpu.shape)
    assert 0 < sum(nbytes for _, nbytes in fetched) < 1.3 * volume
    assert any(kind == "stored" for kind, _ in fetched)
    assert on_gpu.error_voxels == pytest.approx(result.error_voxels, abs=0.02)
    for mine, other in zip(on_gpu.outputs[1:3], result.outputs[1:3], strict=True):
        got, expected = open_image(mine).levels[0][...], open_image(other).levels[0][...]
        assert np.allclose(got, expected, rtol=1e-4, atol=0.05) or (np.abs(got - expected) > 10.1).mean() < 1e-3


def test_stages_are_all_timed(result):
    names = [stage.name for stage in result.stages]
    assert len(names) == len(set(names)) == 6
    assert demo.DemoResult.__dataclass_params__.frozen
