"""If this fails, old names of parameters and options fail or do not warn, or errors name what nobody typed."""

import inspect

import numpy as np
import pytest
import zarr

from linumpy import OmeZarrWriter, cli, resample_zarr
from linumpy.mosaic.focal import correct_mosaic
from linumpy.mosaic.grid import resample_mosaic_grid
from linumpy.mosaic.slices import stack_mosaics
from linumpy.mosaic.stacking import find_z_overlap
from linumpy.renamed import renamed_parameter
from linumpy.voxel.mesh_image import voxelize_onto_image


def test_old_name_works_and_warns_at_the_call(tmp_path):
    with pytest.warns(FutureWarning, match="n_levels= is called levels= now") as warned:
        writer = OmeZarrWriter(tmp_path / "i", (8, 8), "u2", (1, 1), n_levels=2)
    assert [one.filename for one in warned] == [__file__]
    with writer:
        writer[...] = np.ones((8, 8), "u2")
    assert sorted(zarr.open_group(tmp_path / "i", mode="r").array_keys()) == ["0", "1"]


@pytest.mark.filterwarnings("ignore:n_levels=")
@pytest.mark.parametrize(("name", "value", "kind"), [
    ("n_levels", 0, ValueError), ("levels", 0, ValueError), ("n_levels", 1.5, TypeError), ("levels", 1.5, TypeError),
])  # fmt: skip
def test_errors_begin_with_the_name_that_was_typed(tmp_path, name, value, kind):
    with pytest.raises(kind, match=f"^{name}={value}: "):
        OmeZarrWriter(tmp_path / "i", (8, 8), "u2", (1, 1), **{name: value})


@pytest.mark.filterwarnings("ignore:n_levels=")
def test_errors_about_something_else_are_unchanged(tmp_path):
    with pytest.raises(ValueError, match=r"^chunks="):
        OmeZarrWriter(tmp_path / "i", (8, 8), "u2", (1, 1), n_levels=2, chunks=(4,))


def test_both_names_are_refused(tmp_path):
    with pytest.raises(TypeError, match="n_levels= is the old name of levels=: pass only levels="):
        OmeZarrWriter(tmp_path / "i", (8, 8), "u2", (1, 1), n_levels=2, levels=2)


def test_without_the_old_name_there_is_no_warning(tmp_path, recwarn):
    OmeZarrWriter(tmp_path / "i", (8, 8), "u2", (1, 1), levels=2)
    assert not [one for one in recwarn if one.category is FutureWarning]


def test_old_name_of_spacing(tmp_path):
    array = zarr.create_array(tmp_path / "a", data=np.zeros((8, 8, 8), "u1"), chunks=(8, 8, 8))
    with pytest.warns(FutureWarning, match="source_spacing= is called spacing= now"):
        resample_zarr(array, tmp_path / "b", 2.0, source_spacing=(1, 1, 1), device="cpu")
    assert zarr.open_group(tmp_path / "b", mode="r")["0"].shape == (4, 4, 4)


@pytest.mark.parametrize(("function", "old", "new"), [
    (correct_mosaic, "n_levels", "levels"), (stack_mosaics, "n_levels", "levels"),
    (resample_mosaic_grid, "n_levels", "levels"), (resample_mosaic_grid, "resolution_um", "new_spacing"),
    (voxelize_onto_image, "n_levels", "levels"), (find_z_overlap, "resolution_um", "z_spacing"),
])  # fmt: skip
def test_every_old_name_is_replaced_by_a_parameter(function, old, new):
    assert new in inspect.signature(function).parameters
    assert old not in inspect.signature(function).parameters
    with pytest.warns(FutureWarning, match=f"{old}= is called {new}= now"), pytest.raises(TypeError, match="missing"):
        function(**{old: 1})


def test_signature_and_docstring_are_kept():
    @renamed_parameter("b", "a")
    def doubled(a):
        """Return twice the number."""
        return 2 * a

    assert doubled.__doc__ == "Return twice the number."
    assert doubled(3) == 6


def test_old_name_of_the_option(caplog):
    parser = cli.Parser("program")
    cli.add_levels_argument(parser)
    assert parser.parse_args([]).levels == 1
    assert parser.parse_args(["--levels", "3"]).levels == 3
    assert not caplog.records
    assert parser.parse_args(["--n_levels", "3"]).levels == 3
    assert [record.message for record in caplog.records] == ["--n_levels is called --levels now"]
