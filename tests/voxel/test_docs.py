"""If this fails, a snippet of docs/voxel.md does not run, or does something else than the page says.

With VOXEL_PICTURES=1 its pictures are drawn again."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from linumpy.io.ome import open_image
from linumpy.testing.synthetic import surface_depth

PAGE = Path(__file__).parents[2] / "docs/voxel.md"


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    pytest.importorskip("trimesh", reason="trimesh is not installed: pip install trimesh")
    made, here = {}, Path.cwd()
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINUMPY_DEVICE", "cpu")
        os.chdir(folder)
        try:
            for number, code in enumerate(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)):
                exec(compile(code, f"voxel.md, snippet {number}", "exec"), made)
        finally:
            os.chdir(here)
    return made | {"folder": folder}


def test_the_mask_is_the_tissue_without_the_track(names):
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


def test_the_region_has_its_volume(names):
    volume = 4 / 3 * np.pi * 600 * 450 * 150
    assert names["inside"].sum() * np.prod(names["pitch"]) == pytest.approx(volume, rel=0.01)
    assert np.array_equal(names["both"], names["inside"] & names["mask"])


def test_the_image_is_written(names):
    image = open_image(names["folder"] / "out.ome.zarr")
    assert len(image.levels) == 3
    assert np.array_equal(image.levels[0][...], (names["mask"] & ~names["inside"]) * np.uint8(3))


@pytest.mark.skipif("VOXEL_PICTURES" not in os.environ, reason="pictures are drawn on request: VOXEL_PICTURES=1")
def test_the_pictures(names):
    import matplotlib.pyplot as plt

    volume, pitch = names["volume"], names["pitch"]
    grey = np.log10(np.maximum(volume, np.percentile(volume, 1)))

    def section(axes, index, masks, title):
        width, depth = (n * step for n, step in zip(grey[index].shape[::-1], (pitch[0], names["height"]), strict=True))
        extent = (0, width, depth, 0)
        axes.imshow(grey[index], cmap="gray", extent=extent, aspect="equal")
        for mask, color in masks:
            axes.contour(mask[index], [0.5], colors=color, linewidths=1.2, extent=(0, width, 0, depth))
        axes.set(title=title, xlabel="X (µm)")

    names["height"] = pitch[2]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 2.6), layout="constrained")
    row = np.s_[:, 96]
    section(left, row, [(names["tissue"], "tab:cyan")], "tissue below its surface, Y = 965 µm")
    section(right, row, [(names["mask"], "tab:orange")], "gaps closed, track of 60 µm radius removed")
    left.set_ylabel("depth Z (µm)")
    figure.savefig(PAGE.parent / "voxel-track.png", dpi=90)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.1), layout="constrained", width_ratios=(1.6, 1))
    masks = [(names["inside"], "tab:red"), (names["both"], "tab:orange")]
    section(left, row, masks, "region (red), tissue of it beside the track (orange)")
    left.set_ylabel("depth Z (µm)")
    names["height"] = pitch[1]
    section(right, np.s_[54], masks, "the same at Z = 272 µm")
    right.set_ylabel("Y (µm)")
    figure.savefig(PAGE.parent / "voxel-mesh.png", dpi=90)
