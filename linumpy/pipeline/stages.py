"""The stages of the pipeline, each a call of the library, from files to files.

In: a :class:`Task`: a stage, its options, and the paths of its inputs and outputs by role. Out: the outputs, each
written completely or not at all. A role names the content of a path. The role ``image`` is the volume of a slice: many
stages read one ``image`` and make the next. Further roles are ``projection``, ``surface``, ``shifts`` and others.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.device import to_host
from linumpy.io.output.results import read_result, write_result
from linumpy.mosaic.aip import project_mosaic
from linumpy.mosaic.alignment.register import register_slices
from linumpy.mosaic.alignment.stack import stack_registered
from linumpy.mosaic.attenuation import compensate_attenuation
from linumpy.mosaic.beam import estimate_brain_light
from linumpy.mosaic.focal import correct_mosaic
from linumpy.mosaic.galvo import GalvoShift, find_galvo_shift, fix_galvo_shift
from linumpy.mosaic.grid import resample_mosaic_grid, tile_of
from linumpy.mosaic.illumination import estimate_illumination, fix_illumination, read_fields, write_fields
from linumpy.mosaic.io.image import open_mosaic
from linumpy.mosaic.io.slice_table import find_slices
from linumpy.mosaic.io.tiles import boxes, read_box
from linumpy.mosaic.options import Alignment, FocalCorrection, Galvo, SurfaceMethod
from linumpy.mosaic.stitching import stitch_mosaic
from linumpy.mosaic.surface import find_mosaic_surface
from linumpy.mosaic.tile_positions import estimate_positions
from linumpy.pipeline.settings import Focal
from linumpy.quality.report import write_report
from linumpy.resample.tile_work import TileWork

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Common:
    """Settings of the run that outputs depend on.

    - `slicing_interval_mm`: thickness that is cut off between slices; None for tasks of a slice.
    - `tile_shape` ((int, int) or None): voxels of a tile of the mosaics; None: from their metadata.
    """

    levels: int
    codec: str | None
    slicing_interval_mm: float | None = None
    tile_shape: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """One stage of one slice, or of the brain.

    - `name`: name of the slice, or ``"brain"``.
    - `options`: one of :mod:`linumpy.pipeline.settings`.
    - `common`: settings that all tasks share.
    - `inputs`: by role. In a task of a slice a role has one path; in a task of the brain it has one path for each
      slice, or one path that belongs to the brain.
    """

    stage: str
    name: str
    options: Any
    common: Common
    inputs: Mapping[str, tuple[Path, ...]]
    outputs: Mapping[str, Path]

    def one(self, role: str) -> Path:
        """Return the only input of a role."""
        (path,) = self.inputs[role]
        return path


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage.

    - `makes`: role of each output, and the suffix of its name, or its whole name if that begins with no dot.
    - `of_brain`: whether a task of the stage takes all slices together.
    - `optional`: roles of further inputs, which may be missing.
    """

    call: Callable[[Task, TileWork], object]
    needs: tuple[str, ...]
    makes: Mapping[str, str]
    of_brain: bool = False
    optional: tuple[str, ...] = ()


def carry_out(task: Task, work: TileWork) -> None:
    """Carry out a task, a task of the brain also on a cluster; existing outputs are replaced."""
    for path in task.outputs.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    STAGES[task.stage].call(task, work)


def _shared(task: Task, work: TileWork) -> dict[str, Any]:
    """Return the parameters of all steps."""
    return {"device": work.device, "overwrite": True, "distributed": work.client}


def _map(task: Task, work: TileWork) -> dict[str, Any]:
    """Return the parameters of all steps that write an image of one resolution."""
    return _shared(task, work) | {"codec": task.common.codec}


def _volume(task: Task, work: TileWork) -> dict[str, Any]:
    """Return the parameters of all steps that write a volume."""
    return _map(task, work) | {"levels": task.common.levels}


def _unlink(output: Path) -> None:
    """Remove a link of an earlier run, which the writer would follow to the source."""
    if output.is_symlink():
        output.unlink()


def _link(source: Path, output: Path) -> None:
    """Make an output a link to what it would be a copy of."""
    _unlink(output)
    if output.exists():
        shutil.rmtree(output)
    output.symlink_to(source.resolve())


def _galvo(task: Task, work: TileWork) -> None:
    """Rotate the columns of a mosaic's tiles back.

    A mosaic whose shift is 0, or cannot be detected because there is no clear seam, is not copied: the output is a link
    to it.
    """
    settings: Galvo = task.options
    tile_shape = task.common.tile_shape
    source, output = task.one("image"), task.outputs["image"]
    _unlink(output)
    shift = find_galvo_shift(source, tile_shape=tile_shape, device=work.device)
    if settings.columns is not None or shift.contrast < settings.min_contrast:
        shift = GalvoShift(settings.columns or 0, shift.contrast)
    if shift.columns:
        columns = Galvo(columns=shift.columns)
        fix_galvo_shift(source, output, columns, tile_shape=tile_shape, **_map(task, work))
    else:
        _link(source, output)
    write_result(task.outputs["galvo"], asdict(shift), overwrite=True)


def _resample(task: Task, work: TileWork) -> None:
    resample_mosaic_grid(
        task.one("image"), task.outputs["image"], tile_shape=task.common.tile_shape, **asdict(task.options),
        **_volume(task, work),
    )  # fmt: skip


def _survey(task: Task, work: TileWork) -> None:
    """Write which tiles of a mosaic grid were recorded: those with more than one value."""
    image = open_mosaic(task.one("image"))
    tile = tile_of(image)
    grid = tuple(-(-image.array.shape[axis] // tile[axis]) for axis in image.lateral_axes)
    recorded = np.zeros(grid, bool).ravel()
    for volume in image.volumes.values():
        for number, box in enumerate(boxes(image.array.shape, tile)):
            voxels = read_box(volume, box, work.device)
            recorded[number] |= bool(to_host((voxels != voxels.ravel()[0]) & (voxels == voxels)).any())
    write_result(task.outputs["survey"], {"tiles": recorded.reshape(grid).tolist()}, overwrite=True)


def is_empty(survey: Path) -> bool:
    """Return whether no tile of a slice was recorded."""
    return not np.any(read_result(survey)["tiles"])


def _focal(task: Task, work: TileWork) -> None:
    settings: Focal = task.options
    correct_mosaic(
        task.one("image"), task.outputs["image"], method=SurfaceMethod(s_xy=settings.s_xy, s_z=settings.s_z),
        correction=FocalCorrection(interpolate=settings.interpolate), report=task.outputs["focal_picture"],
        **_volume(task, work),
    )  # fmt: skip


def _shading(task: Task, work: TileWork) -> None:
    """Estimate the illumination that the tiles of all slices share."""
    fields = estimate_illumination(
        task.inputs["image"], None, task.options,
        report=task.outputs["shading_picture"], **_shared(task, work),
    )  # fmt: skip
    write_fields(fields, task.outputs["fields"], task.outputs["shading"], overwrite=True)


def _illumination(task: Task, work: TileWork) -> None:
    """Correct the illumination; if the fields are left out, the output is a link."""
    source, output, fields = task.one("image"), task.outputs["image"], read_fields(task.one("fields"))
    if fields.evidence.left_out:
        _link(source, output)
        return
    _unlink(output)
    fix_illumination(source, output, fields=fields, **_volume(task, work))


def _aip(task: Task, work: TileWork) -> None:
    project_mosaic(task.one("image"), task.outputs["projection"], **_map(task, work))


def _surface(task: Task, work: TileWork) -> None:
    method = SurfaceMethod(**asdict(task.options))
    find_mosaic_surface(
        task.one("image"), task.outputs["surface"], method, overlay=task.outputs["surface_picture"],
        **_map(task, work),
    )  # fmt: skip


def _positions(task: Task, work: TileWork) -> None:
    estimate_positions(
        task.one("image"), task.outputs["positions"], task.options, **_shared(task, work),
    )  # fmt: skip


def _stitch(task: Task, work: TileWork) -> None:
    stitch_mosaic(
        task.one("image"), task.one("positions"), task.outputs["image"], task.options, **_volume(task, work),
    )  # fmt: skip


def _beam(task: Task, work: TileWork) -> None:
    """Estimate the beam and the attenuation that all slices share."""
    images, interval = task.inputs["image"], task.common.slicing_interval_mm
    assert interval is not None
    slices = {number: path for number, path in find_slices(images[0].parent).items() if path in images}
    estimate_brain_light(
        slices, task.outputs["beam"], task.options, interval_um=1e3 * interval,
        device=work.device_here, overwrite=True,
    )  # fmt: skip


def _attenuation(task: Task, work: TileWork) -> None:
    compensate_attenuation(
        task.one("image"), task.outputs["image"], light=task.one("beam") if "beam" in task.inputs else None,
        report=task.outputs["attenuation"], **asdict(task.options), **_volume(task, work),
    )  # fmt: skip


def _link_slices(folder: Path, slices: Sequence[Path]) -> None:
    """Replace a folder by one with a link to each slice."""
    if folder.exists():
        shutil.rmtree(folder)  # removes the links, not their targets
    folder.mkdir()
    for path in slices:
        (folder / path.name).symlink_to(os.path.relpath(path, folder))


def _register(task: Task, work: TileWork) -> None:
    folder = task.outputs["transforms"].parent / "slices"
    _link_slices(folder, task.inputs["image"])
    interval = task.common.slicing_interval_mm
    assert interval is not None
    register_slices(
        folder, task.outputs["transforms"], Alignment(interval_mm=interval, **asdict(task.options)),
        shifts=task.one("shifts") if "shifts" in task.inputs else None,
        **_shared(task, work),
    )  # fmt: skip


def _stack(task: Task, work: TileWork) -> None:
    folder = task.outputs["stack"].parent / "slices"
    _link_slices(folder, task.inputs["image"])
    stack_registered(
        folder, task.one("transforms"), task.outputs["stack"], **asdict(task.options), **_volume(task, work),
    )  # fmt: skip


def _report(task: Task, work: TileWork) -> None:
    page = task.outputs["report"]
    write_report(page.parent.parent, page, device=work.device, overwrite=True)


_IMAGE = ".ome.zarr"
#: The stages by name, in the order in which they run, which is also that of :data:`linumpy.pipeline.settings.OPTIONS`.
STAGES: dict[str, Stage] = {
    "galvo": Stage(call=_galvo, needs=("image",), makes={"image": _IMAGE, "galvo": ".json"}),
    "resample": Stage(call=_resample, needs=("image",), makes={"image": _IMAGE}),
    "survey": Stage(call=_survey, needs=("image",), makes={"survey": ".json"}),
    "focal": Stage(call=_focal, needs=("image",), makes={"image": _IMAGE, "focal_picture": ".png", "focal": ".json"}),
    "shading": Stage(
        call=_shading,
        needs=("image",),
        makes={"fields": ".npz", "shading": "brain.json", "shading_picture": ".png"},
        of_brain=True,
    ),
    "illumination": Stage(call=_illumination, needs=("image", "fields"), makes={"image": _IMAGE}),
    "positions": Stage(call=_positions, needs=("image",), makes={"positions": ".json"}),
    "aip": Stage(call=_aip, needs=("image",), makes={"projection": _IMAGE}),
    "surface": Stage(call=_surface, needs=("image",), makes={"surface": _IMAGE, "surface_picture": ".png"}),
    "stitch": Stage(call=_stitch, needs=("image", "positions"), makes={"image": _IMAGE}),
    "beam": Stage(call=_beam, needs=("image",), makes={"beam": "brain.json"}, of_brain=True),
    "attenuation": Stage(
        call=_attenuation, needs=("image",), makes={"image": _IMAGE, "attenuation": ".json"}, optional=("beam",)
    ),
    "register": Stage(
        call=_register, needs=("image",), makes={"transforms": ".json"}, of_brain=True, optional=("shifts",)
    ),
    "stack": Stage(call=_stack, needs=("image", "transforms"), makes={"stack": _IMAGE}, of_brain=True),
}
#: Roles of all outputs besides ``image``: the report depends on them.
_REPORTED_ROLES = tuple(sorted({role for stage in STAGES.values() for role in stage.makes} - {"image"}))
STAGES["report"] = Stage(
    call=_report, needs=("image",), makes={"report": ".html"}, of_brain=True, optional=_REPORTED_ROLES
)
