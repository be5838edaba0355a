"""If this fails, datasets of xarray's engine "linumpy" have wrong values or coordinates, or keep files open."""

import contextlib
import os
import pickle
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linumpy.device import Device
from linumpy.errors import ChunkError, GpuUnavailableError, MetadataError, SourceError, StaleLayoutError
from linumpy.gpu.read.reader import Reader
from linumpy.gpu.read.shared import shared_reader
from linumpy.interop import outer
from linumpy.io.carried import Carried, LeadingAxis
from linumpy.io.ome import open_image
from linumpy.write.writer import write_omezarr
from tests.support.budget import examples
from tests.support.stores import encoded_cases, write

xr = pytest.importorskip("xarray", reason="xarray is not installed: pip install xarray")

SHAPE = (24, 30, 28)


def values(shape=SHAPE, dtype="u2"):
    return np.random.default_rng(0).integers(0, 60_000, shape).astype(dtype)


@pytest.fixture
def brain(tmp_path):
    """An image of three levels with a place and attributes of its own."""
    return str(
        write_omezarr(
            tmp_path / "brain.ome.zarr", values(), (10, 6, 5), chunks=(8, 8, 8), levels=3, origin=(100, -20, 3.5),
            attributes={"stain": "none"},
        )
    )  # fmt: skip


def opened(path, **options):
    return xr.open_dataset(path, engine="linumpy", **options)


def test_the_engine_is_installed():
    assert "linumpy" in xr.backends.list_engines(), "install linumpy again: its metadata has no entry point for xarray"


@st.composite
def indexers(draw, shape):
    """For each axis an int, a slice of any step, or a list of indices, which may be empty."""

    def axis(n):
        # xarray itself takes a start below -n, with a negative step, for the last one.
        bound, index = st.none() | st.integers(-n, n + 2), st.integers(-n, n - 1)
        step = st.none() | st.integers(-4, 4).filter(bool)
        return st.one_of(st.builds(slice, bound, bound, step), index, st.lists(index, max_size=5))

    return tuple(draw(axis(n)) for n in shape)


@settings(max_examples=examples(160), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), case=encoded_cases(1000))
def test_any_index_selects_what_zarr_selects(tmp_path_factory, data, case):
    folder = tmp_path_factory.mktemp("case") / "array"
    write(case, folder)
    expected = zarr.open_array(folder, mode="r")[...]
    dataset = opened(str(folder))
    for key in data.draw(st.lists(indexers(case.shape), min_size=1, max_size=3)):
        index = dict(zip(dataset["image"].dims, key, strict=True))
        found = dataset["image"].isel(index)
        selected = expected
        for number, one in reversed(list(enumerate(key))):
            one = np.array(one, int) if isinstance(one, list) else one
            selected = selected[(slice(None),) * number + (one,)]
        assert found.shape == selected.shape
        np.testing.assert_array_equal(found.values, selected)
        assert found.dtype == expected.dtype.newbyteorder("=")


def test_scattered_points_are_those_of_numpy(brain):
    where = {name: xr.DataArray([3, 20, 3, 0], dims="point") for name in "zyx"}
    rows = [3, 20, 3, 0]
    np.testing.assert_array_equal(opened(brain)["image"].isel(where), values()[rows, rows, rows])


def test_coordinates_are_the_centres_of_voxels_in_micrometers(brain):
    for level in range(3):
        image, dataset = open_image(brain), opened(brain, level=level)
        assert dataset["image"].dims == ("z", "y", "x")
        for axis, name in enumerate("zyx"):
            coordinate = dataset[name]
            assert coordinate.attrs["units"] == "µm"
            expected = [image.origin[level][axis] + k * image.spacing[level][axis] for k in range(coordinate.size)]
            np.testing.assert_allclose(coordinate, expected, rtol=1e-12)
        np.testing.assert_array_equal(dataset["image"], zarr.open_array(f"{brain}/{level}", mode="r")[...])
    dataset = opened(brain)
    assert (dataset.attrs, dataset["image"].attrs) == ({"stain": "none"}, {"long_name": "brain.ome.zarr"})
    np.testing.assert_array_equal(dataset["image"].sel(z=slice(120, 151), y=-8), values()[2:6, 2])
    assert dataset["image"].sel(x=14, method="nearest").x == 13.5


def test_spacing_is_taken_where_the_metadata_have_none(tmp_path):
    path = str(write_omezarr(tmp_path / "a", values(), (10, 6, 5), levels=2))
    group = zarr.open_group(path, mode="r+")
    ome = group.attrs["ome"]
    for axis in ome["multiscales"][0]["axes"]:
        axis.pop("unit", None)
    group.attrs["ome"] = ome
    with pytest.raises(MetadataError, match="spacing="):
        opened(path)
    assert np.diff(opened(path, spacing=(4, 2, 1))["z"])[0] == 4
    assert np.diff(opened(path, spacing=(4, 2, 1), level=1)["x"])[0] == 2


def test_channels_have_names_and_times_their_unit(tmp_path):
    carried = Carried(
        leading={"t": LeadingAxis(2.5, 10, "second"), "c": LeadingAxis()},
        omero={"channels": [{"label": "DAPI", "color": "0000FF"}, {"label": "GFP", "color": "00FF00"}]},
    )
    stored = values((3, 2, 6, 8, 9))
    path = str(write_omezarr(tmp_path / "a", stored, (1, 1, 1), axes="tczyx", carried=carried))
    dataset = opened(path)
    assert list(dataset["c"].values) == ["DAPI", "GFP"]
    assert (list(dataset["t"].values), dataset["t"].attrs) == ([10, 12.5, 15], {"units": "second"})
    np.testing.assert_array_equal(dataset["image"].sel(c="GFP", t=12.5), stored[1, 1])
    group = zarr.open_group(path, mode="r+")
    group.attrs["ome"] = {**group.attrs["ome"], "omero": {"channels": [{"label": "one"}]}}
    assert "c" not in opened(path).coords


def test_a_dataset_of_dask_has_the_stored_chunks_or_shards(tmp_path, brain):
    assert opened(brain, chunks={})["image"].chunks == ((8, 8, 8), (8, 8, 8, 6), (8, 8, 8, 4))
    path = str(write_omezarr(tmp_path / "s", values(), (1, 1, 1), chunks=(8, 8, 8), shards=(16, 16, 16)))
    lazy = opened(path, chunks={})["image"]
    assert lazy.chunks == ((16, 8), (16, 14), (16, 12))
    np.testing.assert_array_equal(lazy.compute(), values())
    assert lazy.mean().compute() == pytest.approx(values().mean())
    np.testing.assert_allclose(lazy.mean("z"), values().mean(0))


def test_workers_in_other_processes_read_it(brain):
    import dask

    lazy = opened(brain, chunks={})["image"]
    with dask.config.set(scheduler="processes", num_workers=2):
        np.testing.assert_array_equal((lazy[::-2] + 1).compute(), values()[::-2] + 1)


def test_a_pickled_dataset_holds_the_path_and_no_values(brain):
    sent = pickle.dumps(opened(brain, drop_variables=["z", "y", "x"]))
    assert len(sent) < 4000
    np.testing.assert_array_equal(pickle.loads(sent)["image"], values())


def test_a_tree_has_a_node_for_each_level(brain):
    tree = xr.open_datatree(brain, engine="linumpy", chunks={})
    assert list(tree.children) == ["0", "1", "2"]
    assert tree.attrs == {"stain": "none"}
    for level in range(3):
        assert tree[f"{level}/image"].chunks is not None
        xr.testing.assert_identical(tree[str(level)].to_dataset().load(), opened(brain, level=level).load())
    assert set(xr.open_groups(brain, engine="linumpy")) == {"/", "/0", "/1", "/2"}
    bare = xr.open_datatree(brain, engine="linumpy", drop_variables="image")
    assert not bare["1"].data_vars


def test_a_tree_written_by_xarray_is_read_back(brain, tmp_path):
    tree = xr.open_datatree(brain, engine="linumpy")
    tree.to_zarr(tmp_path / "tree.zarr")
    again = xr.open_datatree(tmp_path / "tree.zarr", engine="zarr", chunks=None)
    xr.testing.assert_identical(again.load(), tree.load())


def test_labels_are_opened_by_their_path(brain):
    labels = (values() > 30_000).astype("u1")
    os.mkdir(f"{brain}/labels")
    write_omezarr(f"{brain}/labels/tissue", labels, (10, 6, 5), downsampling="label", levels=2)
    dataset = opened(f"{brain}/labels/tissue")
    np.testing.assert_array_equal(dataset["image"], labels)
    assert dataset["image"].dtype == np.uint8


@pytest.mark.parametrize("sharded", [False, True])
def test_missing_chunks_are_the_fill_value(tmp_path, sharded):
    shards = (8, 8) if sharded else None
    array = zarr.create_array(tmp_path / "a", shape=(16, 20), chunks=(4, 4), shards=shards, dtype="f4", fill_value=7)
    array[:8, :8] = 1
    expected = np.full((16, 20), 7, "f4")
    expected[:8, :8] = 1
    np.testing.assert_array_equal(opened(str(tmp_path / "a"))["image"], expected)


def test_a_single_array_has_its_own_names_of_axes(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(4, 5), dtype="i2", dimension_names=("row", "column"))
    array.attrs["gain"] = 3
    dataset = opened(tmp_path / "a")
    assert (dataset["image"].dims, dict(dataset.coords), dataset["image"].attrs) == (("row", "column"), {}, {"gain": 3})
    old = zarr.create_array(tmp_path / "b", shape=(4, 5), dtype="i2", zarr_format=2)
    assert opened(tmp_path / "b")["image"].dims == ("dim_0", "dim_1")
    old.attrs["_ARRAY_DIMENSIONS"] = ["t", "x"]
    assert (opened(tmp_path / "b")["image"].dims, opened(tmp_path / "b")["image"].attrs) == (("t", "x"), {})
    zarr.create_array(tmp_path / "c", shape=(), dtype="i2")[...] = 9
    assert opened(tmp_path / "c")["image"].item() == 9
    zarr.create_array(tmp_path / "d", shape=(0, 3), dtype="i2")
    assert opened(tmp_path / "d", chunks={})["image"].values.shape == (0, 3)


def test_arrays_that_the_core_does_not_read_are_read_by_zarr(tmp_path, caplog):
    stored = values((12, 10)).astype("M8[s]")
    zarr.create_array(tmp_path / "a", shape=(12, 10), chunks=(5, 4), dtype="M8[s]", zarr_format=2)[...] = stored
    np.testing.assert_array_equal(opened(tmp_path / "a")["image"][::3, [0, 9]], stored[::3, [0, 9]])
    assert "read by zarr-python" in caplog.text
    memory = zarr.create_array(zarr.storage.MemoryStore(), shape=(6,), chunks=(4,), dtype="u1")
    memory[...] = range(6)
    np.testing.assert_array_equal(opened(memory)["image"][::-1], range(5, -1, -1))


def test_errors_name_what_was_asked_for(brain, tmp_path):
    with pytest.raises(SourceError, match="no resolution level 3: it has 3"):
        opened(brain, level=3)
    with pytest.raises(TypeError, match="level='1'"):
        opened(brain, level="1")
    with pytest.raises(FileNotFoundError, match="nothing"):
        opened(str(tmp_path / "nothing.zarr"))
    with pytest.raises(ValueError, match=r"level=1.*single array"):
        opened(f"{brain}/0", level=1)
    with pytest.raises(ValueError, match=r"spacing=.*single array"):
        opened(f"{brain}/0", spacing=(1, 1, 1))
    with pytest.raises(SourceError, match="single array"):
        xr.open_datatree(f"{brain}/0", engine="linumpy")
    with pytest.raises(IndexError):
        opened(brain)["image"].isel(z=24)


def test_a_broken_chunk_is_an_error_that_names_it(brain):
    with open(f"{brain}/0/c/1/0/0", "r+b") as file:
        file.truncate(100)
    dataset = opened(brain)
    np.testing.assert_array_equal(dataset["image"][:8], values()[:8])
    with pytest.raises(ChunkError, match="1/0/0"):
        dataset["image"][::5].load()


def test_an_array_of_another_shape_by_now_is_an_error(brain, tmp_path):
    dataset = opened(brain)
    zarr.create_array(f"{brain}/0", shape=(3, 3, 3), dtype="u2", overwrite=True)
    with pytest.raises(StaleLayoutError, match="open it again"):
        dataset["image"].load()


def test_no_file_stays_open(brain):
    with opened(brain) as dataset:
        dataset["image"][3:5].load()
        held = [os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if _is_open(one)]
    assert not [path for path in held if path.startswith(brain)]


def _is_open(descriptor):
    return os.path.exists(f"/proc/self/fd/{descriptor}")


def test_only_chunks_with_wanted_voxels_are_read(brain):
    """Of planes far apart, and of large steps, what lies between is not read."""
    for chunk in ("1/0/0", "1/1/0"):
        with open(f"{brain}/0/c/{chunk}", "r+b") as file:
            file.truncate(1)
    dataset = opened(brain)
    np.testing.assert_array_equal(dataset["image"].isel(z=[0, 23]), values()[[0, 23]])
    np.testing.assert_array_equal(dataset["image"].isel(z=slice(None, None, 17)), values()[::17])


def test_many_boxes_are_read_a_few_at_a_time(brain):
    sizes = []
    submit = Reader.submit_many

    def counted(self, layout, regions, **options):
        sizes.append(len(regions))
        return submit(self, layout, regions, **options)

    with patch.object(Reader, "submit_many", counted), patch("linumpy.interop.outer._MAX_BOXES", 5):
        np.testing.assert_array_equal(opened(brain)["image"][::2, ::-3, ::4], values()[::2, ::-3, ::4])
    assert sum(sizes) == 3 * 4 * 4
    assert max(sizes) == 5


class OnDevice(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that, like CuPy's, does not become NumPy's by itself."""

    def __init__(self, host):
        self.host = host
        self.shape, self.dtype, self.ndim, self.size = host.shape, host.dtype, host.ndim, host.size
        self.nbytes = host.nbytes
        self.real, self.imag = host.real, host.imag  # by which xarray knows an array from Python 3.12 on

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion to NumPy")

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        return OnDevice(np.asarray(getattr(ufunc, method)(*map(on_host, inputs), **options)))

    def __array_function__(self, function, types, arguments, options):
        return OnDevice(np.asarray(function(*map(on_host, arguments), **options)))

    def __getitem__(self, key):
        return OnDevice(self.host[key])

    def __setitem__(self, key, value):
        self.host[key] = on_host(value)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        method = getattr(self.host, name)
        return lambda *arguments, **options: OnDevice(np.asarray(method(*arguments, **options)))


def on_host(value):
    return value.host if isinstance(value, OnDevice) else value


@contextlib.contextmanager
def one_device():
    """Have readers of device 3 give such arrays."""
    from linumpy.interop import xarray_backend

    @contextlib.contextmanager
    def reader_of(device):
        assert device == 3
        with shared_reader("cpu") as reader:
            submit = reader.submit_many

            def submitted(*arguments):
                return [SimpleNamespace(result=lambda t=ticket: OnDevice(t.result())) for ticket in submit(*arguments)]

            yield SimpleNamespace(submit_many=submitted)

    cupy = SimpleNamespace(
        empty=lambda *about: OnDevice(np.empty(*about)),
        asarray=lambda values: OnDevice(values),
        cuda=SimpleNamespace(Device=lambda number: contextlib.nullcontext()),
    )
    with (
        patch.object(outer, "shared_reader", reader_of),
        patch.object(outer, "require_cuda", lambda number: cupy),
        patch.object(xarray_backend, "resolve", lambda kind, number=3: Device("cuda", number, "")),
    ):
        yield


@pytest.mark.parametrize("device", ["cuda", 3])
def test_values_lie_on_a_device_on_request(brain, device):
    with one_device():
        image = opened(brain, device=device)["image"]
        for key, found in (
            (np.s_[3:9, :, 5], image[3:9, :, 5]),
            (np.s_[::-2], image[::-2]),
            (np.s_[:, [4, 0, 29]], image.isel(y=[4, 0, 29])),
        ):
            assert isinstance(found.data, OnDevice)
            np.testing.assert_array_equal(found.data.host, values()[key])
        mean = image[2:5].mean("z").data
        assert isinstance(mean, OnDevice)
        np.testing.assert_allclose(mean.host, values()[2:5].mean(0))
        tree = xr.open_datatree(brain, engine="linumpy", device=device)
        expected = zarr.open_array(f"{brain}/1", mode="r")[...]
        np.testing.assert_array_equal(tree["1"]["image"].data.host, expected)


def test_a_device_that_is_not_there_is_an_error(brain):
    with pytest.raises(GpuUnavailableError):
        opened(brain, device=99)
    with pytest.raises(ValueError, match="gpu"):
        opened(brain, device="gpu")


@pytest.mark.gpu
def test_values_lie_on_the_gpu(brain):
    import cupy

    image = opened(brain, device="cuda")["image"]
    assert isinstance(image.data, cupy.ndarray)
    part = image.isel(y=[4, 0, 29])[::-2]
    np.testing.assert_array_equal(part.data.get(), values()[::-2, [4, 0, 29]])
    assert float(image.mean().data.get()) == pytest.approx(values().mean())
