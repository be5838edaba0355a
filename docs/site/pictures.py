#!/usr/bin/env python3
"""Draw the pictures again that lie in docs: of README.md and voxel.md. Those of the gallery are drawn for each site."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from snippets import run

from linumpy import show
from linumpy.testing.synthetic import MosaicSpec, block

DOCS = Path(__file__).parents[1]


def _section(axes: Any, volume: np.ndarray, index: Any, masks: Any, title: str, steps: tuple[float, float]) -> None:
    grey = np.log10(np.maximum(volume, np.percentile(volume, 1)))[index]
    width, depth = (n * step for n, step in zip(grey.shape[::-1], steps, strict=True))
    axes.imshow(grey, cmap="gray", extent=(0, width, depth, 0), aspect="equal")
    for mask, color in masks:
        axes.contour(mask[index], [0.5], colors=color, linewidths=1.2, extent=(0, width, 0, depth))
    axes.set(title=title, xlabel="X (µm)")


def draw_first_volume() -> None:
    """Draw the picture of README.md."""
    spec = MosaicSpec(tile_shape=(112, 128, 128))
    volume = np.log10(np.maximum(block(spec, (0, 0, 0), spec.shape), 20))
    sections = show(volume, spec.spacing_um, position=(60, 100, 160))
    sections.figure.suptitle("log₁₀ intensity of a synthetic OCT mosaic", fontsize=9)
    with tempfile.TemporaryDirectory() as folder:
        sections.figure.savefig(Path(folder, "whole.png"), dpi=70)
        picture = Image.open(Path(folder, "whole.png")).convert("RGB")
    picture.quantize(32).save(DOCS / "first-volume.png", optimize=True)  # speckle compresses badly


def draw_voxel() -> None:
    """Draw the pictures of voxel.md by the names that its snippets leave."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        names = run(DOCS / "voxel.md")
    volume, (x, y, z), row = names["volume"], names["pitch"], np.s_[:, 96]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 2.6), layout="constrained")
    _section(left, volume, row, [(names["tissue"], "tab:cyan")], "tissue below its surface, Y = 965 µm", (x, z))
    _section(right, volume, row, [(names["mask"], "tab:orange")], "gaps closed, track of 60 µm radius removed", (x, z))
    left.set_ylabel("depth Z (µm)")
    figure.savefig(DOCS / "voxel-track.png", dpi=90)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.1), layout="constrained", width_ratios=(1.6, 1))
    masks = [(names["inside"], "tab:red"), (names["both"], "tab:orange")]
    _section(left, volume, row, masks, "region (red), tissue of it beside the track (orange)", (x, z))
    left.set_ylabel("depth Z (µm)")
    _section(right, volume, np.s_[54], masks, "the same at Z = 272 µm", (x, y))
    right.set_ylabel("Y (µm)")
    figure.savefig(DOCS / "voxel-mesh.png", dpi=90)


if __name__ == "__main__":
    os.environ["LINUMPY_DEVICE"] = "cpu"
    plt.switch_backend("agg")
    draw_first_volume()
    draw_voxel()
