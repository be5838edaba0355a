"""Options that several commands share, and their values as parameters of the library.

In: a parser, or parsed arguments. Out: options in the parser, or parameters. Errors: ``ValueError`` for a value that
makes no sense, :class:`~linumpy.errors.GpuUnavailableError` if a GPU is requested and there is none.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linumpy import device as devices

log = logging.getLogger(__name__)


def source(text: str) -> str | Path:
    """Parse a source: return a URL as text, since ``Path`` would change it, and any other text as a path."""
    return text if "://" in text else Path(text)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--verbose`` and ``--overwrite``."""
    parser.add_argument("-v", "--verbose", action="count", default=0, help="Log more; twice, with tracebacks.")
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing output.")


class _Levels(argparse.Action):
    """Store the number of resolution levels; log a warning for the old name of the option."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        if option == "--n_levels":
            log.warning("--n_levels is called --levels now")
        setattr(namespace, self.dest, values)


def add_levels_argument(parser: argparse.ArgumentParser, default_text: str = "") -> None:
    """Add ``--levels``, the number of resolution levels to write.

    The default is 1; with `default_text`, which describes the default in the help, it is None.
    """
    parser.add_argument(
        "--levels", "--n_levels", action=_Levels, type=int, default=None if default_text else 1, metavar="N",
        help=f"Number of resolutions to write. [{default_text or 1}]",
    )  # fmt: skip


def add_codec_argument(parser: argparse.ArgumentParser, default_text: str = "as the input's") -> None:
    """Add ``--codec``, how chunks are compressed; `default_text` describes the default in the help."""
    parser.add_argument(
        "--codec", metavar="NAME",
        help="How chunks are compressed: zstd, lz4, gzip, none, blosc:lz4 or blosc:zstd with :byte, :bit or :none for "
        f"the shuffle; then :small for fewer bytes and more time, +crc32c for a checksum. [{default_text}]",
    )  # fmt: skip


def add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--use_gpu`` and ``--no-use_gpu``; the default is as ``LINUMPY_DEVICE`` says, or else the GPU if any."""
    parser.add_argument(
        "--use_gpu", action=argparse.BooleanOptionalAction, default=None,
        help="Work on the GPU, or on the CPU. [as LINUMPY_DEVICE=cpu or cuda; without it the GPU if there is one]",
    )  # fmt: skip


def add_cluster_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--cluster``; with it :func:`choose_device` asks the workers whether they have GPUs."""
    parser.add_argument(
        "--cluster", dest="distributed", metavar="ADDRESS",
        help="Work on the workers of a dask cluster, whose scheduler has this address. [here]",
    )  # fmt: skip


def add_tile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the last options of every command that works in tiles: cluster, GPU, and the options of all commands."""
    add_cluster_argument(parser)
    add_gpu_arguments(parser)
    add_common_arguments(parser)


def add_image_arguments(parser: argparse.ArgumentParser, *, all_of_them: bool = False) -> None:
    """Add the last options of a command that writes an image in tiles: levels, codec, volume, cluster, GPU and others.

    `all_of_them` is as for :func:`add_volume_arguments`.
    """
    add_levels_argument(parser)
    add_codec_argument(parser)
    add_volume_arguments(parser, all_of_them=all_of_them)
    add_tile_arguments(parser)


def add_tile_shape_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--tile_shape``; the default is the tile shape in the metadata."""
    parser.add_argument(
        "--tile_shape", type=int, nargs=2, metavar=("A", "B"),
        help="Voxels of a tile along the lateral axes, in their order in the array (usually y, then x). "
        "[from the metadata that linumpy writes]",
    )  # fmt: skip


def add_slice_config_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--slice_config``, the table of the slices that are used."""
    parser.add_argument(
        "--slice_config", type=Path, metavar="CSV",
        help="Table with the columns slice_id and use (true or false): slices that are not used are left out. [all]",
    )  # fmt: skip


def add_memory_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--memory``, which :func:`memory_bytes` returns in bytes."""
    parser.add_argument(
        "--memory", dest="memory_bytes", type=float, metavar="GIB",
        help="Memory of the blocks in the pipeline, on the GPU or the host. [80 %% of the free; on the CPU at most 8]",
    )  # fmt: skip


def add_volume_arguments(parser: argparse.ArgumentParser, *, all_of_them: bool) -> None:
    """Add the options that select a channel and a time of an image and replace its voxel spacing.

    Parameters
    ----------
    parser : ArgumentParser
        Parser of a command that reads OME-Zarr.
    all_of_them : bool
        Whether the command processes all times and channels if none is selected; otherwise the image may have only one.
    """
    default = "all" if all_of_them else "the only one"
    group = parser.add_argument_group("input")
    group.add_argument("--channel", type=int, metavar="C", help=f"Channel to read, counted from 0. [{default}]")
    group.add_argument("--time", type=int, metavar="T", help=f"Time to read, counted from 0. [{default}]")
    add_spacing_argument(group)


def add_spacing_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add ``--spacing``, which replaces the spacing in the metadata."""
    parser.add_argument(
        "--spacing", type=float, nargs=3, metavar=("Z", "Y", "X"),
        help="Voxel spacing of the finest resolution in µm. [from the metadata]",
    )  # fmt: skip


def volume_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :func:`add_volume_arguments` as parameters of the library."""
    return {"channel": parsed.channel, "time": parsed.time, "spacing": parsed.spacing and tuple(parsed.spacing)}


def spacing_of_axes(parsed: argparse.Namespace) -> Mapping[str, float] | None:
    """Return ``--spacing`` by the names of the axes, so that an image of y and x uses two of the numbers."""
    return parsed.spacing and dict(zip("zyx", parsed.spacing, strict=True))


def new_spacing(parsed: argparse.Namespace) -> float | Sequence[float] | None:
    """Return ``--resolution`` as a parameter of the library: a number for all axes, or a number for each axis."""
    wanted: list[float] | None = parsed.resolution
    return wanted[0] if wanted is not None and len(wanted) == 1 else wanted


def add_surface_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of surface detection."""
    group = parser.add_argument_group("surface detection")
    group.add_argument(
        "--s_xy", type=int, default=15, metavar="N", help="Lateral mean over N × N voxels. [%(default)s]"
    )
    group.add_argument(
        "--s_z", type=float, default=2.0, metavar="S", help="Standard deviation of the Gaussian along z, voxels. [2]"
    )
    group.add_argument("--no_log", action="store_true", help="Use the intensity, not its logarithm.")
    group.add_argument(
        "--detect_cutting_errors", action="store_true",
        help="Where the smoothed intensity has its maximum above the surface, take the maximum as the surface.",
    )  # fmt: skip
    group.add_argument(
        "--definition", choices=("linumpy", "edge"), default="linumpy",
        help="linumpy: s_z / 2 below the voxel of the steepest rise, that is about s_z / 2 + 1 voxels below the edge. "
        "edge: the edge itself, to fractions of a voxel, where its contrast suffices. [%(default)s]",
    )  # fmt: skip
    group.add_argument(
        "--min_contrast", type=float, default=5.0, metavar="C",
        help="Minimum contrast of an edge: its rise over the noise along its A-line. [%(default)s]",
    )  # fmt: skip


def surface_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :func:`add_surface_arguments` as parameters of the library."""
    names = ("s_xy", "s_z", "detect_cutting_errors", "definition", "min_contrast")
    return {name: getattr(parsed, name) for name in names} | {"use_log": not parsed.no_log}


def add_light_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the known parameters of light, beam and instrument; those that are not given are estimated."""
    group = parser.add_argument_group("light")
    group.add_argument(
        "--focus", type=float, metavar="UM", help="Depth of the focus along z, in µm; with --rayleigh. [estimated]"
    )
    group.add_argument(
        "--rayleigh", type=float, metavar="UM",
        help="Rayleigh length in tissue, in µm; inf for no beam. [estimated if it can be told from the attenuation]",
    )  # fmt: skip
    group.add_argument(
        "--falloff", type=float, default=0.0, metavar="F",
        help="Fall-off of sensitivity in 1/mm: exp(-(F z)²). [%(default)s]",
    )  # fmt: skip
    group.add_argument(
        "--end", type=float, metavar="MU",
        help="Attenuation below the recorded range in 1/mm; 0 for no light from there. [estimated]",
    )  # fmt: skip
    group.add_argument(
        "--background", type=float, metavar="I", help="Intensity without light. [estimated from speckle]"
    )
    group.add_argument(
        "--max_gain", type=float, metavar="G",
        help="Maximum factor of compensation. [with which the background is as bright as tissue at the surface; 50]",
    )  # fmt: skip


def light_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :func:`add_light_arguments` as parameters of the library."""
    focus = 0.0 if parsed.focus is None and parsed.rayleigh == math.inf else parsed.focus
    return {
        "focus_um": focus, "rayleigh_um": parsed.rayleigh, "falloff_per_mm": parsed.falloff,
        "end_per_mm": parsed.end, "background": parsed.background, "max_gain": parsed.max_gain,
    }  # fmt: skip


def add_illumination_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of estimating illumination."""
    group = parser.add_argument_group("estimating illumination")
    group.add_argument("--dark", action="store_true", help="Estimate an offset, too, from planes without light.")
    group.add_argument(
        "--smoothness", type=float, default=1.0, metavar="S",
        help="How much tiles are taken to differ by themselves: a larger S makes the fields more even. [%(default)s]",
    )  # fmt: skip
    group.add_argument(
        "--max_tiles", type=int, default=256, metavar="N", help="Maximum number of tiles to use. [%(default)s]"
    )
    group.add_argument("--force", action="store_true", help="Use fields that are too uncertain to be of use.")


def illumination_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :func:`add_illumination_arguments` as parameters of the library."""
    from linumpy.correction.shading import ShadingOptions

    options = ShadingOptions(dark=parsed.dark, smoothness=parsed.smoothness, force=parsed.force)
    return {"options": options, "max_tiles": parsed.max_tiles}


def choose_device(parsed: argparse.Namespace) -> bool:
    """Choose the device by the options of :func:`add_gpu_arguments`.

    Returns
    -------
    bool
        Whether to use the GPU. With ``--cluster``, whether each worker uses its GPU: by default if all workers have
        GPUs.

    Raises
    ------
    GpuUnavailableError
        ``--use_gpu`` (or ``LINUMPY_DEVICE=cuda``) without a CUDA device and without ``--cluster``; the message gives
        the reason.
    ValueError
        ``LINUMPY_DEVICE`` names no device.
    """
    wish, cluster = wished_device(parsed), getattr(parsed, "distributed", None)
    if cluster is None:
        return devices.resolve(wish).is_cuda
    if wish is not None:
        return wish == "cuda"
    from linumpy.resample.tile_work import workers_have_gpus

    return workers_have_gpus(cluster)


def device_and_name(parsed: argparse.Namespace) -> tuple[str, str]:
    """Return the parameter `device` of a function that also takes `distributed`, and its name for the last line."""
    if parsed.distributed is None:
        return ("cuda", "GPU") if choose_device(parsed) else ("cpu", "CPU")
    return wished_device(parsed) or "auto", "the workers"


def wished_device(parsed: argparse.Namespace) -> str | None:
    """Return the device that the options of :func:`add_gpu_arguments` name; None without such an option."""
    return {None: None, True: "cuda", False: "cpu"}[parsed.use_gpu]


def memory_bytes(parsed: argparse.Namespace) -> int | None:
    """Return ``--memory`` in bytes; None if it was not passed, ``ValueError`` if it is not above 0."""
    gib: float | None = parsed.memory_bytes
    if gib is None:
        return None
    if not 1 <= gib * 2**30 < 2**60:
        raise ValueError(f"--memory {gib:g}: pass a number of GiB above 0")
    return int(gib * 2**30)
