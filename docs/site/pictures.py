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

from linumpy import open_image, read_zarr
from linumpy_scripts.linum_demo import main as run_demo

DOCS = Path(__file__).parents[1]


def _section(axes: Any, volume: np.ndarray, index: Any, masks: Any, title: str, steps: tuple[float, float]) -> None:
    grey = np.log10(np.maximum(volume, np.percentile(volume, 1)))[index]
    width, depth = (n * step for n, step in zip(grey.shape[::-1], steps, strict=True))
    axes.imshow(grey, cmap="gray", extent=(0, width, depth, 0), aspect="equal")
    for mask, color in masks:
        axes.contour(mask[index], [0.5], colors=color, linewidths=1.2, extent=(0, width, 0, depth))
    axes.set(title=title, xlabel="X (µm)")


def draw_brain() -> None:
    """Draw the picture of README.md: a plane of the demo's brain as its microscope gives it, and in the stack."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
    with tempfile.TemporaryDirectory() as folder:
        run_demo(["--pipeline", "--out", folder])
        for axis, path, plane, title in (
            (axes[0], "brain/mosaics/slice_z01.ome.zarr", 22, "a slice as acquired: 3×3 tiles, side by side"),
            (axes[1], "results/stack/stack.ome.zarr", 35, "the same tissue in the stack of all slices"),
        ):
            image = open_image(Path(folder, path))
            grey = read_zarr(image.levels[0], region=plane, device="cpu").astype(np.float32)
            height, width = (n * step for n, step in zip(grey.shape, image.spacing[0][1:], strict=True))
            low, high = np.percentile(grey, (2, 99.5))
            axis.imshow(grey, cmap="gray", vmin=low, vmax=high, extent=(0, width, height, 0))
            axis.set(title=title, xlabel="X (µm)", xlim=(0, 2880), ylim=(2880, 0), facecolor="black")
    axes[0].set_ylabel("Y (µm)")
    with tempfile.TemporaryDirectory() as folder:
        figure.savefig(Path(folder, "whole.png"), dpi=100)
        picture = Image.open(Path(folder, "whole.png")).convert("RGB")
    picture.quantize(64).save(DOCS / "brain.png", optimize=True)  # speckle compresses badly


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
    draw_brain()
    draw_voxel()
