"""Settings of a run of the pipeline, from a TOML, YAML or JSON file.

In: the path of the file. Out: a :class:`Run`, whose options are frozen records, one for each stage, with the parameters
and defaults of the library. A record is checked when it is made (:mod:`linumpy.declared`), which is before the first
stage of a run. Errors name the key and the valid keys or values.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from linumpy.correction.shading import ShadingOptions
from linumpy.declared import Count, Declared, Parsed, Positive, check_value
from linumpy.mosaic.options import (
    AttenuationMethod,
    Definition,
    Galvo,
    Positions,
    Registration,
    Smoothing,
    Spacing,
    Stitch,
)
from linumpy.plan.codecs import parse_codec

#: Keys whose values are paths.
_PATHS = ("mosaics", "output", "shifts", "slice_config")
#: Stages that need the results of another stage.
_NEEDED = {"illumination": "shading", "stitch": "positions", "stack": "register"}
#: Stages that need stitched slices. Where positions are left out, too, the mosaics may be stitched slices.
_STITCHED = ("beam", "attenuation", "register")


@dataclass(frozen=True)
class NoOptions(Declared):
    """Of a stage without options."""


@dataclass(frozen=True)
class Resample(Declared):
    """Options of ``resample``: :func:`linumpy.mosaic.grid.resample_mosaic_grid`."""

    new_spacing: Spacing = 10.0


@dataclass(frozen=True, kw_only=True)
class Focal(Smoothing):
    """Options of ``focal``: :class:`linumpy.mosaic.options.SurfaceMethod` and ``FocalCorrection``."""

    interpolate: bool = True


@dataclass(frozen=True, kw_only=True)
class Surface(Smoothing):
    """Options of ``surface``: :class:`linumpy.mosaic.options.SurfaceMethod`."""

    definition: Definition = "linumpy"


@dataclass(frozen=True)
class Attenuation(Declared):
    """Options of ``attenuation``: :func:`linumpy.mosaic.attenuation.compensate_attenuation`."""

    dtype: Literal["float32", "uint8", "uint16"] | None = None


@dataclass(frozen=True)
class Stack(Declared):
    """Options of ``stack``: :func:`linumpy.mosaic.alignment.stack.stack_registered`."""

    new_spacing: Spacing | None = None


#: The type of each stage's record, in the order in which stages run.
OPTIONS: dict[str, type] = {
    "galvo": Galvo,
    "resample": Resample,
    "survey": NoOptions,
    "focal": Focal,
    "shading": ShadingOptions,
    "illumination": NoOptions,
    "positions": Positions,
    "aip": NoOptions,
    "surface": Surface,
    "stitch": Stitch,
    "beam": AttenuationMethod,
    "attenuation": Attenuation,
    "register": Registration,
    "stack": Stack,
    "report": NoOptions,
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of the pipeline.

    Attributes
    ----------
    mosaics : Path
        Folder of mosaic grids, one for each slice: ``slice_z00.ome.zarr`` and so on, from the top down.
    output : Path
        Folder of the results, one folder for each stage.
    slicing_interval_mm : float
        Thickness that is cut off between slices.
    shifts : Path, optional
        The motor's table of shifts between neighbouring slices, as ``linum-stack-slices-motor`` reads it. Without it
        all shifts are 0.
    slice_config : Path, optional
        Table of the slices that are used, with the columns ``slice_id`` and ``use``; by default all are.
    tile_shape : (int, int), optional
        Voxels of a tile of the mosaics along y and x, for mosaics without a tile shape in their metadata.
    levels : int
        Resolutions of every volume.
    codec : str, optional
        How chunks are compressed.
    skip : tuple of str
        Stages that are left out.
    options : mapping of str to object
        Records of options by the name of the stage; a stage that is left out has the defaults of its record in
        :data:`OPTIONS`.

    Raises
    ------
    ValueError
        An interval that is not positive, an unknown stage in `skip` or `options`, a stage in `skip` whose results
        another stage needs, or a tile shape without the stage
        ``resample``, which writes it to the metadata.
    """

    mosaics: Path
    output: Path
    slicing_interval_mm: float
    shifts: Path | None = None
    slice_config: Path | None = None
    tile_shape: tuple[int, int] | None = None
    levels: int = 1
    codec: str | None = None
    skip: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_value("slicing_interval_mm", self.slicing_interval_mm, Positive)
        check_value("tile_shape", self.tile_shape, tuple[Count, Count] | None)
        check_value("levels", self.levels, Count)
        check_value("codec", self.codec, Annotated[str, Parsed(parse_codec)] | None)
        if isinstance(self.skip, str):
            raise ValueError(f"skip={self.skip!r}: pass a list of stages, such as [{self.skip!r}]")
        for key, names in (("skip", self.skip), ("options", tuple(self.options))):
            for name in names:
                if name not in OPTIONS:
                    raise ValueError(f"{key}: {name!r} is no stage: there are {', '.join(OPTIONS)}")
        for name, record in self.options.items():
            if not isinstance(record, OPTIONS[name]):
                raise ValueError(f"options: {record!r} are no options of {name}: pass {OPTIONS[name].__name__}(...)")
        stitched = dict.fromkeys(_STITCHED, "stitch") if "positions" not in self.skip else {}
        for name, needed in (_NEEDED | stitched).items():
            if needed in self.skip and name not in self.skip:
                raise ValueError(f"skip has {needed!r}, but {name!r} needs its results: skip {name!r}, too")
        if self.tile_shape is not None and "resample" in self.skip:
            raise ValueError(f"tile_shape={self.tile_shape}: skip must not have resample, which records it")

    def options_of(self, stage: str) -> Any:
        """Return the options of a stage; by default those of its record."""
        return self.options.get(stage) or OPTIONS[stage]()


def read_run(path: str | Path) -> Run:
    """Read the file of a run.

    Parameters
    ----------
    path : str or Path
        A ``.toml`` or ``.json`` file or, if PyYAML is installed, a ``.yaml`` or ``.yml`` file. Its keys are the
        attributes of :class:`Run` except for `options`, and the names of stages, each with a table of options. Relative
        paths begin at the folder of the file.

    Raises
    ------
    FileNotFoundError
        The file does not exist.
    ValueError
        A file that cannot be parsed, an unknown or missing key, an unknown option of a stage, a value that :class:`Run`
        or the record of a stage refuses.
    ImportError
        A YAML file without PyYAML.
    """
    path = Path(path)
    given = _parsed(path)
    if not isinstance(given, Mapping):
        raise ValueError(f"{path} is no table of keys and values")
    known = [member.name for member in dataclasses.fields(Run) if member.name != "options"]
    settings: dict[str, Any] = {"options": {}}
    for key, value in given.items():
        if key in OPTIONS:
            settings["options"][key] = _record(key, value, f"{path}: {key}")
        elif key in known:
            settings[key] = path.parent / str(value) if key in _PATHS else _without_list(value)
        else:
            raise ValueError(f"{path}: {key!r} is no key: there are {', '.join([*known, *OPTIONS])}")
    missing = [key for key in ("mosaics", "output", "slicing_interval_mm") if key not in settings]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    try:
        return Run(**settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parsed(path: Path) -> object:
    """Return the content of the file."""
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix not in (".yaml", ".yml"):
            raise ValueError("a run is a .toml, .yaml, .yml or .json file")
        try:
            import yaml
        except ImportError as error:
            raise ImportError(
                f"{path}: PyYAML is not installed ({error}): write the run as .toml, or install it"
            ) from error
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(error) from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _record(stage: str, value: object, where: str) -> object:
    """Make the record of a stage's options from a table; error messages begin with `where`."""
    record_type = OPTIONS[stage]
    names = [member.name for member in dataclasses.fields(record_type)]
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: a table of {', '.join(names)} is needed, not {value!r}")
    for name in value:
        if name not in names:
            raise ValueError(f"{where}: {name!r} is no option of this stage: there are {', '.join(names) or 'none'}")
    try:
        return record_type(**{name: _without_list(entry) for name, entry in value.items()})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _without_list(value: object) -> object:
    """Return a value of a frozen record: a list becomes a tuple."""
    return tuple(value) if isinstance(value, list) else value
