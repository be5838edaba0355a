"""If this fails, linum-verify misses metadata that are wrong, or finds fault with sound images of other writers."""

import copy
import json
import math
import random
import shutil

import numpy as np
import ome_zarr.format
import ome_zarr.writer
import pytest
import tensorstore
import zarr

from linumpy.io.metadata import member_names, open_member
from linumpy.io.source import open_node
from linumpy.verification.ngff import _is_size, check_group
from linumpy.verification.place import schema_note
from linumpy.write.writer import write_omezarr

VALUES = np.random.default_rng(0).integers(0, 900, (21, 34, 47)).astype("u2")
FORMATS = {"0.4": ome_zarr.format.FormatV04(), "0.5": ome_zarr.format.FormatV05()}


def found(source, notes=None):
    """Return the findings of all groups of a source."""
    findings, waiting = [], [(open_node(source), "")]
    for group, path in waiting:
        findings += check_group(group, path, [] if notes is None else notes)
        for name in member_names(group) or ():
            try:
                member = open_member(group, name)
            except ValueError:  # told by who opens the members
                continue
            if isinstance(member, zarr.Group):
                waiting.append((member, f"{path}/{name}".strip("/")))
    return findings


def check(findings, *expected):
    """Compare findings with pairs of the harm and a part of the text, or triples with the path in front."""
    assert len(findings) == len(expected), "\n".join(map(str, findings))
    for *path, harm, text in expected:
        of_it = [f for f in findings if f.harm == harm and text in f.what and path in ([], [f.path])]
        assert of_it, (path, harm, text, "\n".join(map(str, findings)))
        assert all(f.effect and f.advice for f in of_it)


def attributes_of(folder):
    """Return the document with the attributes of a group, the document parsed, and the attributes of NGFF in it."""
    file = next(f for f in (folder / "zarr.json", folder / ".zattrs") if f.exists())
    document = json.loads(file.read_text())
    holder = document["attributes"] if file.name == "zarr.json" else document
    return file, document, holder.get("ome", holder)


def change(folder, mutate):
    file, document, ome = attributes_of(folder)
    mutate(ome)
    file.write_text(json.dumps(document))


def write(folder, version="0.5", axes="zyx", **options):
    shape = {"t": 2, "c": 3, "z": 21, "y": 34, "x": 47}
    values = np.ones([shape[axis] for axis in axes], "u2")
    sizes = (1.5, 2.0, 3.0)[-sum(axis in "zyx" for axis in axes) :]
    write_omezarr(folder, values, sizes, axes=axes, levels=3, ngff_version=version, **options)
    return folder


@pytest.mark.parametrize("version", ["0.4", "0.5", "0.6"])
def test_units_are_only_recommended(tmp_path, version):
    """Axes without one are noted once, for all groups, and are no finding."""
    plain, notes = labels_in(tmp_path / "i", version), []
    check(found(plain, notes))
    assert not notes
    for folder in (plain, plain / "labels/cells"):
        change(folder, lambda ome: axis(ome["multiscales"][0], 1).pop("unit"))
    check(found(plain, notes))
    assert [note.split(";")[0] for note in notes] == ["lengths along y, which have no unit"]


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("axes", ["zyx", "tczyx", "yx"])
def test_images_labels_and_plates_of_ome_zarr_py(tmp_path, version, axes):
    """Its groups of labels of 0.5 have no version, which the specification wants."""
    fmt, values = FORMATS[version], np.ones([{"t": 2, "c": 3}.get(axis, 33) for axis in axes], "u2")
    group = zarr.open_group(tmp_path / "i", mode="w", zarr_format=fmt.zarr_format)
    units = {axis: "micrometer" for axis in axes if axis in "zyx"}
    ome_zarr.writer.write_image(values, group, axes=axes, axes_units=units, fmt=fmt)
    ome_zarr.writer.write_labels(values, group, name="cells", axes=axes, fmt=fmt)
    no_version = [("labels", "metadata", "ome has no version")] if version == "0.5" else []
    check(found(tmp_path / "i"), *no_version)
    plate = zarr.open_group(tmp_path / "p", mode="w", zarr_format=fmt.zarr_format)
    ome_zarr.writer.write_plate_metadata(plate, ["A", "B"], ["1", "2", "3"], ["A/1", "B/3"], fmt=fmt)
    for path in ("A/1", "B/3"):
        well = plate.require_group(path)
        ome_zarr.writer.write_well_metadata(well, ["0"], fmt=fmt)
        ome_zarr.writer.write_image(values, well.require_group("0"), axes=axes, axes_units=units, fmt=fmt)
    check(found(tmp_path / "p"))


@pytest.mark.parametrize("version", ["0.4", "0.5", "0.6"])
@pytest.mark.parametrize("axes", ["zyx", "tczyx", "cxyz"])
def test_own_images(tmp_path, version, axes):
    check(found(write(tmp_path / "i", version, axes, origin=(1.0, -2.0, 3.0), downsampling="label")))
    zarr.consolidate_metadata(tmp_path / "i")
    check(found(tmp_path / "i"))


def test_levels_of_tensorstore(tmp_path):
    """Their documents are written in another form than in the consolidated metadata of zarr-python."""
    write(tmp_path / "i")
    for level in ("0", "1"):
        array = zarr.open_array(tmp_path / "i" / level)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "i" / level)}}
        tensorstore.open(spec, create=True, delete_existing=True, dtype="uint16", shape=array.shape).result()
    zarr.consolidate_metadata(tmp_path / "i")
    stored = json.loads((tmp_path / "i/zarr.json").read_text())["consolidated_metadata"]["metadata"]["0"]
    assert stored != json.loads((tmp_path / "i/0/zarr.json").read_text())
    check(found(tmp_path / "i"))


def old_image(folder, version, shape=(2, 3, 4, 20, 30), axes=None):
    group = zarr.open_group(folder, mode="w", zarr_format=2)
    for level in range(2):
        group.create_array(str(level), shape=[*shape[:-2], *(n >> level for n in shape[-2:])], dtype="u2")
    image = {"version": version, "datasets": [{"path": "0"}, {"path": "1"}], **({"axes": axes} if axes else {})}
    group.attrs["multiscales"] = [image]
    return folder


def test_images_before_version_04(tmp_path):
    for version in ("0.1", "0.2"):
        check(found(old_image(tmp_path / version, version)))
        check(found(old_image(tmp_path / version, version, (4, 20, 30))), ("metadata", "level '0' has 3 axes"))
    check(found(old_image(tmp_path / "3", "0.3", (4, 20, 30), ["z", "y", "x"])))
    check(found(old_image(tmp_path / "3", "0.3", (4, 20, 30), ["x", "y", "z"])), ("metadata", "in this order"))


def axis(image, number):
    systems = image.get("coordinateSystems")
    return (systems[0] if systems else image)["axes"][number]


def parts_of(image, level):
    chain = image["datasets"][level]["coordinateTransformations"]
    return chain[0].get("transformations", chain)


def set_scale(level, number, value):
    return lambda ome: parts_of(ome["multiscales"][0], level)[0]["scale"].__setitem__(number, value)


def set_shift(level, number, value):
    return lambda ome: parts_of(ome["multiscales"][0], level)[1]["translation"].__setitem__(number, value)


def set_axis(number, **values):
    return lambda ome: axis(ome["multiscales"][0], number).update(values)


FAULTS = {
    "unknown unit": (set_axis(1, unit="um"), ("metadata", "'um', which NGFF does not name")),
    "no type": (lambda ome: axis(ome["multiscales"][0], 2).pop("type"), ("metadata", "'x' has no type")),
    "order": (set_axis(2, type="time", unit="second"), ("metadata", "time, then channel")),
    "same names": (set_axis(1, name="x"), ("metadata", "same name")),
    "a level that is not there": (
        lambda ome: ome["multiscales"][0]["datasets"].append({**ome["multiscales"][0]["datasets"][1], "path": "7"}),
        ("7", "missing", "nothing is stored there"),
    ),
    "levels in another order": (
        lambda ome: ome["multiscales"][0]["datasets"].reverse(), ("1", "misplaced", "more than"),
    ),
    "factor": (set_scale(1, 2, 9.0), ("1", "misplaced", "a factor of 3 gives")),
    "scale 0": (set_scale(1, 0, 0.0), ("misplaced", "")),
    "negative scale": (set_scale(2, 1, -8.0), ("misplaced", "")),
    "origin": (set_shift(1, 0, 40.0), ("1", "misplaced", "apart by")),
    "origin before": (set_shift(2, 2, -40.0), ("2", "misplaced", "apart by")),
}  # fmt: skip
FAULTS_BEFORE_06 = {
    "scale of 2 numbers": (
        lambda ome: parts_of(ome["multiscales"][0], 1)[0]["scale"].pop(),
        ("misplaced", "2 numbers"),
    ),
    "no scale": (lambda ome: parts_of(ome["multiscales"][0], 2).pop(0), ("misplaced", "no scale")),
    "type": (lambda ome: ome["multiscales"][0].update(datasets=3), ("metadata", "no list of paths")),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("version", ["0.4", "0.5", "0.6"])
def test_faults_of_images(tmp_path, version, fault):
    """Each is told by our own checks; the schema does not tell it again."""
    write(tmp_path / "i", version)
    mutate, expected = FAULTS[fault]
    change(tmp_path / "i", mutate)
    findings = found(tmp_path / "i")
    assert not any("schema" in finding.what for finding in findings), findings
    check([f for f in findings if expected[-1] in f.what][:1], expected)


@pytest.mark.parametrize("fault", FAULTS_BEFORE_06)
@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_faults_before_06(tmp_path, version, fault):
    mutate, expected = FAULTS_BEFORE_06[fault]
    change(write(tmp_path / "i", version), mutate)
    check(found(tmp_path / "i"), expected)


def test_sizes_of_levels():
    """What rounding down, up or to the nearest makes of any factor is right; a voxel more or less than that is not."""
    rng = np.random.default_rng(1)
    for size, factor in zip(rng.integers(1, 5000, 3000).tolist(), rng.uniform(1, 9, 3000).tolist(), strict=True):
        exact = size / factor
        if abs(exact - round(exact)) < 2e-3:
            continue
        for rounded in (math.floor(exact), math.ceil(exact), round(exact)):
            assert _is_size(rounded, exact)
        assert not _is_size(math.floor(exact) - 1, exact)
        assert not _is_size(math.ceil(exact) + 1, exact)
    assert not _is_size(49, 50 + 1e-9)
    assert not _is_size(51, 50 - 1e-9)


CHANNEL = {"color": "00ff00", "window": {"min": 0, "max": 9, "start": 0, "end": 5}}
OMERO = {
    "channels 2": ([CHANNEL] * 2, "omero has 2 channels, and the image has 3"),
    "window": ([CHANNEL] * 2 + [CHANNEL | {"window": {"min": 0, "max": 9, "start": 5, "end": 5}}], "channel 2 has the"),
    "NaN": ([CHANNEL | {"window": {"min": 0, "max": 9, "start": 0, "end": math.nan}}] + [CHANNEL] * 2, "no numbers"),
    "color": ([CHANNEL, CHANNEL | {"color": "#00ff00"}, CHANNEL], "not 6 hexadecimal digits"),
    "sound": ([CHANNEL] * 3, ""),
}  # fmt: skip


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize("case", OMERO)
def test_channels(tmp_path, version, case):
    channels, text = OMERO[case]
    change(write(tmp_path / "i", version, "cyx"), lambda ome: ome.update(omero={"channels": channels}))
    check(found(tmp_path / "i"), *([("metadata", text)] if text else []))


def test_systems_of_06(tmp_path):
    def mutate(ome):
        (image,), singular = ome["multiscales"], [[1, 0, 0, 0], [2, 0, 0, 0], [0, 0, 1, 0]]
        name = image["coordinateSystems"][0]["name"]
        image["coordinateSystems"].append({"name": "atlas", "axes": image["coordinateSystems"][0]["axes"]})
        ends = {"input": {"name": name}, "output": {"name": "atlas"}}
        image["coordinateTransformations"] = [
            {"type": "affine", "affine": singular, **ends},
            {"type": "scale", "scale": [1, -1, 1], **ends},
            {"type": "identity", "input": {"name": name}, "output": {"name": "nowhere"}},
        ]

    change(write(tmp_path / "i", "0.6"), mutate)
    check(found(tmp_path / "i"), ("misplaced", "is singular"), ("metadata", "'nowhere'"))


def labels_in(folder, version="0.5"):
    write(folder, version)
    group = zarr.open_group(folder).create_group("labels")
    ome = {"labels": ["cells"]}
    group.attrs.update(ome if version == "0.4" else {"ome": {"version": version, **ome}})
    write(folder / "labels/cells", version)
    change(folder / "labels/cells", lambda ome: ome.update({"image-label": {"source": {"image": "../../"}}}))
    return folder


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_labels(tmp_path, version):
    check(found(labels_in(tmp_path / "i", version)))
    cells = tmp_path / "i/labels/cells"
    change(cells, lambda ome: ome["image-label"]["source"].update(image="../.."))
    check(found(tmp_path / "i"))
    change(cells, lambda ome: ome["image-label"]["source"].update(image="../else"))
    check(found(tmp_path / "i"), ("labels/cells", "metadata", "'../else'"))
    change(cells, lambda ome: ome.pop("image-label"))
    check(found(tmp_path / "i"), ("labels/cells", "metadata", "no attribute 'image-label'"))
    change(cells, lambda ome: ome.update({"image-label": {}}))
    change(tmp_path / "i/labels", lambda ome: ome.update(labels=["nuclei"]))
    check(found(tmp_path / "i"), ("labels/nuclei", "missing", "nothing"), ("labels/cells", "metadata", "not among"))
    change(tmp_path / "i/labels", lambda ome: ome.update(labels=["cells"]))
    for level in range(3):
        change(cells, set_scale(level, 2, 5.0 * 2**level))
    check(found(tmp_path / "i"), ("labels/cells", "misplaced", "47 voxels of 5 along x, and the image has 47 of 3"))


@pytest.mark.parametrize("version", FORMATS)
def test_plates(tmp_path, version):
    fmt = FORMATS[version]
    plate = zarr.open_group(tmp_path / "p", mode="w", zarr_format=fmt.zarr_format)
    ome_zarr.writer.write_plate_metadata(plate, ["A", "B"], ["1", "2"], ["A/1", "B/2"], fmt=fmt)
    ome_zarr.writer.write_well_metadata(plate.require_group("A/1"), ["0"], fmt=fmt)
    text = "1 of 2 wells that the metadata list are not there: 'B/2'"
    check(found(tmp_path / "p"), ("", "missing", text), ("A/1", "missing", "1 of 1 images"))
    ome_zarr.writer.write_well_metadata(plate.require_group("B/2"), [], fmt=fmt)
    change(tmp_path / "p", lambda ome: ome["plate"]["wells"][1].update(columnIndex=0))
    expected = "'B/2' has the indices (1, 0), and is at (1, 1)"
    check(found(tmp_path / "p")[:1], ("", "metadata", expected))


def test_series_of_bioformats2raw(tmp_path):
    group = zarr.open_group(tmp_path / "s", mode="w", zarr_format=2)
    group.attrs["bioformats2raw.layout"] = 3
    write(tmp_path / "s/0", "0.4")
    check(found(tmp_path / "s"))
    group.create_group("OME").attrs["series"] = ["0", "1"]
    check(found(tmp_path / "s"), ("", "missing", "1 of 2 series"))


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_consolidated_metadata(tmp_path, version):
    write(tmp_path / "i", version)
    zarr.consolidate_metadata(tmp_path / "i")
    document = ".zmetadata" if version == "0.4" else "zarr.json"
    array = next((tmp_path / "i/1").glob("*arr*"))
    array.write_text(json.dumps(json.loads(array.read_text()) | {"fill_value": 7}))
    check(found(tmp_path / "i"), (document, "metadata", "(fill_value)"))
    shutil.copytree(tmp_path / "i/1", tmp_path / "i/new")
    shutil.rmtree(tmp_path / "i/2")
    texts = ("differ", "lack", "do not exist", "level '2'")
    assert sorted(t for t in texts for f in found(tmp_path / "i") if t in f.what) == sorted(texts)


def test_what_only_the_schema_knows(tmp_path):
    change(
        write(tmp_path / "i", "0.4"),
        lambda ome: ome["multiscales"][0].update(version=None, coordinateTransformations=[]),
    )
    check(found(tmp_path / "i"), ("metadata", "against the schema"), ("metadata", "no version"))
    assert not schema_note()


UGLY = [
    None,
    True,
    -1,
    0,
    10**400,
    1e308,
    -1e308,
    math.nan,
    math.inf,
    "",
    "0",
    "../..",
    "\ud800",
    [],
    [[]],
    {},
    {"a": 1},
    [1],
]


def mutated(value, rng):
    """Return a document in which one value, anywhere, is another one or is deleted."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        value = copy.copy(value)
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if rng.random() < 0.1:
            del value[key]
        else:
            value[key] = mutated(value[key], rng)
        return value
    return rng.choice(UGLY)


def sources(folder):
    for version in ("0.4", "0.5"):
        change(labels_in(folder / version, version), lambda ome: ome.update(omero={"channels": [CHANNEL]}))
        zarr.consolidate_metadata(folder / version)
    write(folder / "0.6", "0.6")
    old_image(folder / "0.3", "0.3", (4, 20, 30), ["z", "y", "x"])
    plate = zarr.open_group(folder / "p", mode="w")
    ome_zarr.writer.write_plate_metadata(plate, ["A"], ["1"], ["A/1"], fmt=FORMATS["0.5"])
    ome_zarr.writer.write_well_metadata(plate.require_group("A/1"), ["0"], fmt=FORMATS["0.5"])
    return [file for file in folder.rglob("*") if file.name in ("zarr.json", ".zattrs", ".zarray", ".zmetadata")]


def test_mutated_documents(tmp_path):
    """Whatever a document says, there is no exception; 2,000 mutations, one to three a document."""
    rng, count = random.Random(3), 0
    files = sources(tmp_path)
    for number in range(2000):
        file = files[number % len(files)]
        stored = file.read_text()
        document = json.loads(stored)
        for _ in range(rng.randint(1, 3)):
            document = mutated(document, rng)
        file.write_text(json.dumps(document))
        source = tmp_path / file.relative_to(tmp_path).parts[0]
        try:
            open_node(source)
        except ValueError:
            pass  # told by who opens the source
        else:
            count += bool(found(source))
        file.write_text(stored)
    assert count > 1000
