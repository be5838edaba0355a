"""If this fails, a repair changes more than it says, breaks metadata, or loses the old ones."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import zarr

from linumpy.errors import SourceError
from linumpy.io.ome import open_image
from linumpy.verification.findings import Proposal, Verification
from linumpy.verification.repair import Change, apply_repairs, plan_repairs, show_changes
from linumpy.write.writer import write_omezarr
from tests.verification.test_ngff import attributes_of, axis, change, check, found, labels_in, parts_of, write

VERSIONS = ("0.4", "0.5", "0.6")
NOTHING = Verification("", (), ())


def proposing(scale, translation, level=1, image=""):
    return Verification("", (), (), proposals=(Proposal(image, 0, level, scale, translation),))


def chunks_of(folder):
    documents = ("zarr.json", ".zattrs", ".zarray", ".zgroup", ".zmetadata")
    files = [f for f in folder.rglob("*") if f.is_file() and f.name.split(".before")[0] not in documents]
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def repair(folder, verification=NOTHING, **options):
    """Plan, apply, and plan again, which finds nothing; return the changes."""
    chunks = chunks_of(folder)
    changes = plan_repairs(folder, verification, **options)
    kept = apply_repairs(folder, changes)
    assert plan_repairs(folder, verification, **options) == ()
    assert chunks
    assert chunks_of(folder) == chunks
    assert [(folder / path).read_bytes() for path in kept] == [change.before for change in changes]
    assert all((folder / change.path).read_bytes() == change.after for change in changes)
    assert not list(folder.rglob("*.unfinished*"))
    return changes


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("translated", [True, False])
@pytest.mark.parametrize("consolidated", [True, False])
def test_levels_are_placed(tmp_path, version, translated, consolidated):
    """As proposed, and everything else as it was; consolidated metadata say the same."""
    folder = write(tmp_path / "i", version)

    def mutate(ome):
        ome["mine"] = {"b": [1, 2.0, None], "a": "µ"}
        if not translated:
            del parts_of(ome["multiscales"][0], 1)[1]

    change(folder, mutate)
    if consolidated:
        zarr.consolidate_metadata(folder)
    scale, translation = (3.0, 4.0, 6.5), (0.75, 1.25, -2.0)
    changes = repair(folder, proposing(scale, translation))
    documents = {("zarr.json" if version != "0.4" else ".zattrs")}
    documents |= {".zmetadata"} if version == "0.4" and consolidated else set()
    assert {one.path for one in changes} == documents
    image = open_image(folder)
    assert image.scale[1] == scale
    assert image.translation[1] == translation
    _, after, ome = attributes_of(folder)
    before = json.loads(next(c.before for c in changes if c.path != ".zmetadata"))
    chain = parts_of(ome["multiscales"][0], 1)
    assert list(ome) == list((before.get("attributes") or before).get("ome", before.get("attributes") or before))
    chain[0]["scale"], chain[1]["translation"] = [3.0, 4.0, 6.0], [0.75, 1.0, 1.5]
    if not translated:
        del chain[1]
    assert after == before
    if consolidated:
        check([f for f in found(folder) if f.harm == "metadata"])
        opened = zarr.open_consolidated(folder, mode="r")
        assert dict(opened.attrs) == dict(zarr.open_group(folder, use_consolidated=False).attrs)
        assert opened["1"].shape == zarr.open_array(folder / "1").shape


def test_levels_with_transformations_of_all(tmp_path):
    whole = [{"type": "scale", "scale": [2, 4, 0.5]}, {"type": "translation", "translation": [1, 2, 3]}]
    folder = write(tmp_path / "i")
    change(folder, lambda ome: ome["multiscales"][0].update(coordinateTransformations=whole))
    repair(folder, proposing((3.0, 4.0, 6.0), (7.0, 8.0, 9.0)))
    image = open_image(folder)
    assert (image.scale[1], image.translation[1]) == ((3.0, 4.0, 6.0), (7.0, 8.0, 9.0))


def test_a_single_scale_of_06(tmp_path):
    """It becomes a sequence that begins and ends where it did."""
    folder = write(tmp_path / "i", "0.6")

    def mutate(ome):
        (sequence,) = ome["multiscales"][0]["datasets"][1]["coordinateTransformations"]
        single = {**sequence, "type": "scale", "scale": [3.0, 4.0, 6.0]}
        del single["transformations"]
        ome["multiscales"][0]["datasets"][1]["coordinateTransformations"] = [single]

    change(folder, mutate)
    repair(folder, proposing((3.0, 4.0, 6.0), (7.0, 8.0, 9.0)))
    image = open_image(folder)
    assert (image.scale[1], image.translation[1]) == ((3.0, 4.0, 6.0), (7.0, 8.0, 9.0))
    check([f for f in found(folder) if f.harm == "metadata"])


@pytest.mark.parametrize("version", VERSIONS)
def test_units_and_fields_that_are_certain(tmp_path, version):
    folder = write(tmp_path / "i", version, "tczyx")

    def mutate(ome):
        for number in range(5):
            axis(ome["multiscales"][0], number).pop("type")
            axis(ome["multiscales"][0], number).pop("unit", None)
        ome["multiscales"][0].pop("version", None)

    change(folder, mutate)
    assert "unit" not in str(plan_repairs(folder, NOTHING)[0].after)  # nobody guesses it
    (changed,) = repair(folder, unit="nanometer")
    assert "the unit nanometer of axis z" in changed.why
    image = open_image(folder)
    assert [(a.type, a.unit) for a in image.axes] == [("time", None), ("channel", None), *[("space", "nanometer")] * 3]
    check(found(folder))
    with pytest.raises(ValueError, match=r"unit='um' is no unit .* micrometer"):
        plan_repairs(folder, NOTHING, unit="um")


def test_the_version_of_labels(tmp_path):
    folder = labels_in(tmp_path / "i")
    change(folder / "labels", lambda ome: ome.pop("version"))
    repair(folder)
    assert attributes_of(folder / "labels")[2]["version"] == "0.5"


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_consolidated_metadata_are_made_anew(tmp_path, version):
    """Where they differ, lack nodes and name others; a document that is broken is neither taken nor dropped."""
    folder = write(tmp_path / "i", version)
    zarr.create_group(folder / "old", zarr_format=2 if version == "0.4" else 3)
    zarr.consolidate_metadata(folder)
    (folder / "old").rename(folder / "new")
    document = next((folder / "1").glob("*arr*"))
    document.write_text(json.dumps(json.loads(document.read_text()) | {"fill_value": 7}))
    broken = next((folder / "2").glob("*arr*"))
    broken.write_text("{")
    (changed,) = repair(folder)
    opened = zarr.open_consolidated(folder, mode="r")
    assert sorted(opened) == ["0", "1", "2", "new"]
    assert opened["1"].fill_value == 7
    assert opened["2"].shape == (6, 9, 12)
    assert show_changes((changed,)).count("fill_value") >= 2


@pytest.mark.parametrize("style", [{"indent": 2}, {"indent": "\t"}, {}, {"separators": (",", ":")}])
@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_style_is_kept(tmp_path, style, end, ascii_only):
    folder = write(tmp_path / "i")
    file, document, ome = attributes_of(folder)
    ome["µ"] = [1e-7, "é", float("nan"), 2**70]
    file.write_text(json.dumps(document, ensure_ascii=ascii_only, **style) + end)
    (changed,) = repair(folder, proposing((3.0, 4.25, 6.0), (0.75, 1.0, 1.5)))
    before, after = changed.before.decode(), changed.after.decode()
    assert before.count("4.0") == 1
    assert after == before.replace("4.0", "4.25")
    shown = [line for line in show_changes((changed,)).splitlines() if line[0] in "+-"]
    assert [line.split() for line in shown[2:]] == [["-", "4.0,"], ["+", "4.25,"]]


def test_old_documents_are_not_overwritten(tmp_path):
    folder = write(tmp_path / "i")
    os.chmod(folder / "zarr.json", 0o640)
    kept = []
    for number in range(3):
        changes = plan_repairs(folder, proposing((3.0, 4.0, 6.0), (number + 5.0, 1.0, 1.5)))
        kept += apply_repairs(folder, changes)
    assert kept == ["zarr.json.before-repair", "zarr.json.before-repair.2", "zarr.json.before-repair.3"]
    assert len({(folder / path).read_bytes() for path in kept}) == 3
    assert (folder / "zarr.json").stat().st_mode & 0o777 == 0o640
    with pytest.raises(SourceError, match="was changed since"):
        apply_repairs(folder, changes)
    with pytest.raises(SourceError, match="no path of a document"):
        apply_repairs(folder, (Change("../zarr.json", None, b"{}", ""),))
    assert len(list(folder.glob("*.before-repair*"))) == 3


def test_only_local_folders(tmp_path):
    write(tmp_path / "i.ozx")
    with pytest.raises(SourceError, match="in a ZIP file: copy it to a local folder"):
        plan_repairs(tmp_path / "i.ozx", NOTHING)
    with pytest.raises(SourceError, match="a URL: copy it"):
        plan_repairs("s3://bucket/i.zarr", NOTHING)
    with pytest.raises(FileNotFoundError):
        plan_repairs(tmp_path / "no", NOTHING)
    folder = labels_in(tmp_path / "i")
    zarr.consolidate_metadata(folder)
    with pytest.raises(SourceError, match=r"which has consolidated metadata: repair that"):
        plan_repairs(folder / "labels/cells", proposing((9.0, 9.0, 9.0), (0.0, 0.0, 0.0)))
    assert plan_repairs(folder / "labels/cells", NOTHING) == ()
    changes = repair(folder, proposing((3.0, 4.0, 6.5), (0.0, 0.0, 0.0), image="labels/cells"))
    assert {one.path for one in changes} == {"labels/cells/zarr.json", "zarr.json"}


REPAIR = """
import itertools, sys
from linumpy.verification.findings import Proposal, Verification
from linumpy.verification.repair import apply_repairs, plan_repairs
print("ready", flush=True)
for number in itertools.count():
    place = Proposal("", 0, 1, (3.0, 4.0, 6.0), (number + 5.0, 1.0, 1.5))
    apply_repairs(sys.argv[1], plan_repairs(sys.argv[1], Verification("", (), (), proposals=(place,))))
"""


def test_kills(tmp_path):
    """A killed process leaves whole documents, the old or the new ones, and what was kept."""
    folder = tmp_path / "i"
    write_omezarr(folder, np.zeros((4, 8, 8), "u1"), (1.5, 2.0, 3.0), levels=2)
    for delay in np.linspace(0.005, 0.3, 8):
        with subprocess.Popen([sys.executable, "-c", REPAIR, str(folder)], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        assert open_image(folder).scale[1]
        assert all(json.loads(kept.read_bytes()) for kept in folder.glob("*.before-repair*") if "unf" not in kept.name)
