"""If this fails, a session gives something else in slabs than on the whole, or loses an error."""

import numpy as np
import pytest
import zarr

from linumpy.errors import VoxelSessionError
from linumpy.io.ome import read_omezarr
from linumpy.voxel import Flushed, VoxelSession
from linumpy.voxel.backends.operations import Backend
from linumpy.write.writer import OmeZarrWriter
from tests.support.oracles.voxel_shapes import box, torus

ORIGIN, PITCH = (-3.0, 2.0, 10.0), (1.0, 0.5, 2.0)
SHAPE = (23, 14, 17)
OTHER = np.random.default_rng(9).random(SHAPE) < 0.7
TRACK = np.array([(-2.0, 3, 8), (4, 6, 30), (12, 8, 60)])
TORUS = torus(5.0, 2.0)[0] + (5.0, 5.5, 30.0), torus(5.0, 2.0)[1]
SLABS = (1, 2_000, 20_000, 30_000, 60_000, 2**31)


def start(seed=0, part=0.6):
    return np.random.default_rng(seed).random(SHAPE) < part


def queue(session):
    session.close(radius=1.1)
    session.boolean("intersect", OTHER)
    session.voxelize_mesh(*TORUS)
    session.erode(np.ones((2, 1, 2), bool), border_value=True)
    session.subtract_swept_polyline(TRACK, 1.5)
    session.subtract_swept_capsule((0, 3, 12), (0, 3, 40), 0.9)
    session.dilate(np.ones((3, 1, 1), bool))


def make_write_fail(monkeypatch, session, number, error, part=None):
    """Let write `number` of a session raise an error, after it wrote ``part(planes)``, or nothing."""
    real, calls = session._target.write, []

    def write(first, planes):
        calls.append(first)
        if len(calls) != number:
            return real(first, planes)
        if part is not None:
            real(first, part(planes))
        raise error

    monkeypatch.setattr(session._target, "write", write)


def by_hand(mask, backend):
    grid = {"pitch": PITCH, "origin": ORIGIN}
    put = backend.xp.asarray
    mask = backend.close(put(mask.copy()), radius=1.1, pitch=PITCH)
    mask = backend.boolean("intersect", mask, put(OTHER))
    upper = np.array(ORIGIN) + np.array(SHAPE[::-1]) * PITCH
    mask = backend.boolean("union", mask, backend.voxelize_mesh(*TORUS, (ORIGIN, upper), PITCH))
    mask = backend.erode(mask, np.ones((2, 1, 2), bool), border_value=True)
    backend.subtract_swept_polyline(mask, TRACK, 1.5, **grid)
    backend.subtract_swept_capsule(mask, (0, 3, 12), (0, 3, 40), 0.9, **grid)
    return backend.dilate(mask, np.ones((3, 1, 1), bool))


@pytest.fixture(scope="module")
def right():
    return by_hand(start(), Backend())


@pytest.mark.parametrize("slab_bytes", SLABS)
def test_slabs_of_every_size_give_the_same(backend, right, slab_bytes):
    mask = start()
    session = VoxelSession(mask, ORIGIN, PITCH, backend=backend.backend, slab_bytes=slab_bytes)
    queue(session)
    assert np.array_equal(mask, start())  # nothing happens before the flush
    done = session.flush()
    assert np.array_equal(mask, right)
    assert (done.added, done.removed) == (np.count_nonzero(right & ~start()), np.count_nonzero(start() & ~right))
    assert done.slabs == (23 if slab_bytes == 1 else 1 if slab_bytes == 2**31 else done.slabs)
    if slab_bytes in SLABS[2:-1]:
        assert 1 < done.slabs < 23
    assert session.flush() == Flushed(0, 0, 0)
    assert np.array_equal(mask, right)


def test_each_slab_is_read_once_for_all_operations(monkeypatch):
    mask, read = start(), []
    session = VoxelSession(mask, ORIGIN, PITCH, backend=Backend(), slab_bytes=30_000)
    real = session._source.read
    monkeypatch.setattr(session._source, "read", lambda a, b: read.append((a, b)) or real(a, b))
    queue(session)
    slabs = session.flush().slabs
    assert len(read) == slabs


def test_capsules_one_after_another_are_one_pass():
    mask, right, rng = start(), start(), np.random.default_rng(4)
    session = VoxelSession(mask, ORIGIN, PITCH, backend=Backend(), slab_bytes=30_000)
    for radius in (0.5, 1.5, 0.8):
        p0, p1 = rng.uniform(0, 12, (2, 3))
        session.subtract_swept_capsule(p0, p1, radius)
        Backend().subtract_swept_capsule(right, p0, p1, radius, pitch=PITCH, origin=ORIGIN)
    session.subtract_swept_polyline(TRACK, (1.0, 2.0))
    Backend().subtract_swept_polyline(right, TRACK, (1.0, 2.0), pitch=PITCH, origin=ORIGIN)
    assert len(session._queue) == 1
    session.flush()
    assert np.array_equal(mask, right)


class Fails:
    """An operation that fails in the slab that holds a plane, once."""

    halo, voxel_bytes, failed = 0, 1, False

    def __init__(self, plane):
        self.plane = plane

    def apply(self, backend, mask, grid):
        if not self.failed and grid.z_offset <= self.plane < grid.z_offset + grid.shape[0]:
            self.failed = True
            raise MemoryError("the device is full")
        return mask


def test_an_error_in_the_first_slab_leaves_the_array():
    mask = start()
    session = VoxelSession(mask, ORIGIN, PITCH, backend=Backend(), slab_bytes=30_000)
    queue(session)
    session._add(Fails(0))
    with pytest.raises(MemoryError, match="the device is full"):
        session.flush()
    assert np.array_equal(mask, start())
    session.dilate(radius=1)  # the queue is as it was


def test_an_error_later_names_the_planes_and_a_flush_goes_on(right):
    mask = start()
    session = VoxelSession(mask, ORIGIN, PITCH, backend=Backend(), slab_bytes=30_000)
    queue(session)
    session._add(Fails(22))
    with pytest.raises(VoxelSessionError, match=r"planes 0:\d+ of 23 are done, planes \d+:23 are unchanged") as found:
        session.flush()
    assert isinstance(found.value.__cause__, MemoryError)
    done = int(str(found.value).split("planes 0:")[1].split(" ")[0])
    assert 0 < done < 23
    assert np.array_equal(mask[:done], right[:done])
    assert np.array_equal(mask[done:], start()[done:])
    with pytest.raises(ValueError, match="flush again first"):
        session.dilate(radius=1)
    total = session.flush()
    assert np.array_equal(mask, right)
    assert total.added == np.count_nonzero(right & ~start())


def test_a_write_that_fails_is_made_again(tmp_path, right, monkeypatch):
    stored = zarr.create_array(tmp_path / "a.zarr", shape=SHAPE, chunks=(4, 14, 17), dtype="bool", zarr_format=3)
    stored[...] = start()
    session = VoxelSession(stored, ORIGIN, PITCH, backend=Backend(), slab_bytes=60_000)
    queue(session)
    make_write_fail(monkeypatch, session, 2, OSError("the disk is full"), lambda planes: ~planes[:1])  # and wrong
    with pytest.raises(VoxelSessionError, match=r"are done, planes \d+:\d+ may be written in part, planes"):
        session.flush()
    session.flush()
    assert np.array_equal(stored[...], right)


def test_a_write_of_the_first_slab_that_fails_is_made_again(tmp_path, right, monkeypatch):
    """Of chunks of one plane: the slab is written in part, so the array is not as it was."""
    stored = zarr.create_array(tmp_path / "a.zarr", shape=SHAPE, chunks=(1, 14, 17), dtype="bool", zarr_format=3)
    stored[...] = start()
    session = VoxelSession(stored, ORIGIN, PITCH, backend=Backend(), slab_bytes=30_000)
    queue(session)
    make_write_fail(monkeypatch, session, 1, OSError("the disk is full"), lambda planes: planes[:1])
    with pytest.raises(VoxelSessionError, match=r"planes 0:0 of 23 are done, planes 0:\d+ may be written in part"):
        session.flush()
    session.flush()
    assert np.array_equal(stored[...], right)


@pytest.mark.parametrize("queued_one", [False, True])
def test_out_holds_the_array_where_nothing_changes_it(tmp_path, queued_one):
    """Not zeros: of a brain without electrodes the mask is the mask."""
    labels = np.random.default_rng(3).integers(0, 5, SHAPE).astype("u1")
    with OmeZarrWriter(tmp_path / "o.ome.zarr", SHAPE, "uint8", (2, 0.5, 1), chunks=(4, 14, 17)) as writer:
        with VoxelSession(labels, ORIGIN, PITCH, out=writer, backend=Backend(), slab_bytes=1) as session:
            if queued_one:
                session.subtract_swept_capsule(np.empty((0, 3)), np.empty((0, 3)), 1)
        assert session.flush() == Flushed()
    assert np.array_equal(read_omezarr(tmp_path / "o.ome.zarr")[0][...], labels)


@pytest.mark.parametrize("chunks", [{"chunks": (4, 9, 17)}, {"chunks": (2, 7, 6), "shards": (6, 14, 12)}])
@pytest.mark.parametrize("slab_bytes", [1, 50_000, 2**31])
def test_a_zarr_array_in_place(backend, tmp_path, right, slab_bytes, chunks):
    stored = zarr.create_array(tmp_path / "a.zarr", shape=SHAPE, dtype="bool", **chunks)
    stored[...] = start()
    with VoxelSession(stored, ORIGIN, PITCH, backend=backend.backend, slab_bytes=slab_bytes) as session:
        queue(session)
    assert np.array_equal(stored[...], right)


@pytest.mark.parametrize("dtype", ["uint8", ">u2", "int32"])
@pytest.mark.parametrize("label", [None, 3])
def test_labels(backend, tmp_path, dtype, label):
    """The voxels of a label image keep theirs, but for those that are removed; added ones get the session's."""
    labels = np.random.default_rng(2).integers(0, 5, SHAPE).astype(dtype)
    mask = labels != 0 if label is None else labels == label
    now = by_hand(mask, Backend())
    expected = np.where(now == mask, labels, np.where(now, label or 1, 0))
    stored = zarr.create_array(tmp_path / "a.zarr", shape=SHAPE, chunks=(5, 14, 17), dtype=dtype)
    stored[...] = labels
    for array in (stored, labels):
        with VoxelSession(array, ORIGIN, PITCH, label=label, backend=backend.backend, slab_bytes=50_000) as session:
            queue(session)
        assert np.array_equal(array[...], expected)


def test_through_a_writer(backend, tmp_path, right):
    source = start()
    with OmeZarrWriter(tmp_path / "o.ome.zarr", SHAPE, "uint8", (2, 0.5, 1), chunks=(4, 8, 8), levels=2,
                       downsampling="label", codec="none") as writer:  # fmt: skip
        with VoxelSession(source, ORIGIN, PITCH, out=writer, backend=backend.backend, slab_bytes=60_000) as session:
            queue(session)
        with pytest.raises(ValueError, match="open another session"):
            session.dilate(radius=1)
    assert np.array_equal(source, start())
    assert np.array_equal(read_omezarr(tmp_path / "o.ome.zarr")[0][...], right.astype("u1"))


def test_from_nothing(backend, tmp_path):
    with (
        OmeZarrWriter(
            tmp_path / "o.ome.zarr", SHAPE, "uint16", (2, 0.5, 1), chunks=(4, 14, 17), codec="none"
        ) as writer,
        VoxelSession(None, ORIGIN, PITCH, out=writer, label=500, backend=backend.backend, slab_bytes=1) as session,
    ):
        session.voxelize_mesh(*TORUS)
    upper = np.array(ORIGIN) + np.array(SHAPE[::-1]) * PITCH
    expected = 500 * Backend().voxelize_mesh(*TORUS, (ORIGIN, upper), PITCH).astype("u2")
    assert np.array_equal(read_omezarr(tmp_path / "o.ome.zarr")[0][...], expected)


def test_labels_that_an_image_cannot_hold(tmp_path):
    labels = np.full(SHAPE, 300, "u2")
    with pytest.raises(ValueError, match="out writes uint8, which cannot hold all labels of the array's uint16"):
        VoxelSession(labels, ORIGIN, PITCH, out=OmeZarrWriter(tmp_path / "o", SHAPE, "u1", (1, 1, 1)))


def test_an_interrupt_loses_nothing(right, monkeypatch):
    mask = start()
    session = VoxelSession(mask, ORIGIN, PITCH, backend=Backend(), slab_bytes=30_000)
    queue(session)
    make_write_fail(monkeypatch, session, 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        session.flush()
    assert not np.array_equal(mask, right)
    session.flush()
    assert np.array_equal(mask, right)


def test_invalid_arguments(tmp_path):
    mask = start()
    session = VoxelSession(mask, ORIGIN, PITCH, backend=Backend())
    for call, message in [
        (lambda: session.boolean("xor", OTHER), "'xor' is unknown"),
        (lambda: session.boolean("union", OTHER[1:]), "other has shape"),
        (lambda: session.dilate(radius=-1), "radius=-1"),
        (lambda: session.subtract_swept_capsule((0, 0, 0), (1, 1, np.nan), 1), "p1: point 0"),
        (lambda: session.voxelize_mesh(*TORUS, operation="add"), "'add' is unknown"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert session.flush() == Flushed()
    frozen = mask.copy()
    frozen.flags.writeable = False
    zarr.create_array(tmp_path / "a.zarr", shape=SHAPE, dtype="bool")
    shared = np.lib.stride_tricks.as_strided(mask, SHAPE, (0, *mask.strides[1:]))
    for array in (frozen, shared, zarr.open_array(tmp_path / "a.zarr", mode="r")):
        with pytest.raises(PermissionError, match="give out="):
            VoxelSession(array, ORIGIN, PITCH)
    for array, options, error, message in [
        (mask.astype(float), {}, TypeError, "float64"),
        (mask[0], {}, TypeError, "array of shape"),
        ([[[1]]], {}, TypeError, "array is list"),
        (None, {}, ValueError, "needs out="),
        (mask, {"label": 2}, ValueError, "bool and has no labels"),
        (mask.astype("u1"), {"label": 0}, ValueError, "label=0"),
        (mask.astype("u1"), {"label": 256}, ValueError, "label=256"),
        (mask.astype("u1"), {"label": -1}, ValueError, "label=-1"),
        (mask, {"slab_bytes": 0}, ValueError, "slab_bytes=0"),
    ]:
        with pytest.raises(error, match=message):
            VoxelSession(array, ORIGIN, PITCH, backend=Backend(), **options)


def test_the_array_itself_is_no_other_mask(tmp_path):
    """Its planes are overwritten while later ones still need them."""
    mask = start()
    stored = zarr.create_array(tmp_path / "a.zarr", shape=SHAPE, dtype="bool")
    again = zarr.open_array(tmp_path / "a.zarr", mode="r")
    for array, other in [(mask, mask), (mask, mask[:, ::-1]), (stored, stored), (stored, again)]:
        with pytest.raises(ValueError, match="pass a copy"):
            VoxelSession(array, ORIGIN, PITCH, backend=Backend()).boolean("union", other)
    with VoxelSession(mask, ORIGIN, PITCH, backend=Backend()) as session:
        session.boolean("union", mask.copy())
        session.boolean("union", stored)
    assert np.array_equal(mask, start())


@pytest.mark.gpu
def test_the_array_itself_is_no_other_mask_on_a_device(cupy):
    pytest.importorskip("warp", reason="Warp is not installed: pip install warp-lang")
    mask = cupy.asarray(start())
    with pytest.raises(ValueError, match="pass a copy"):
        VoxelSession(mask, ORIGIN, PITCH).boolean("union", mask[:, ::-1])
    with VoxelSession(mask, ORIGIN, PITCH) as session:
        session.boolean("subtract", mask.copy())
    assert not mask.any()


@pytest.mark.parametrize("fill", [True, False])
def test_a_mesh_that_is_open(fill):
    """Filled, or as a shell."""
    mask = np.zeros(SHAPE, bool)
    vertices, triangles = box((0.2, 3.1, 14.3), (9.7, 7.9, 41.0))
    with VoxelSession(mask, ORIGIN, PITCH, backend=Backend(), slab_bytes=1) as session:
        session.voxelize_mesh(vertices, triangles[1:], fill_holes=fill)
    upper = np.array(ORIGIN) + np.array(SHAPE[::-1]) * PITCH
    right = Backend().voxelize_mesh(
        vertices, triangles[1:] if not fill else triangles, (ORIGIN, upper), PITCH, fill_holes=fill
    )
    assert right.any()
    assert np.array_equal(mask, right)


def test_a_block_that_ends_with_an_error_flushes_nothing_and_says_so(caplog):
    mask = np.ones(SHAPE, bool)
    session = VoxelSession(mask, ORIGIN, PITCH, backend=Backend())

    def fail():
        with session:
            session.erode(radius=3)
            session.voxelize_mesh(*TORUS, "subtract")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert mask.all()
    assert [record.getMessage() for record in caplog.records] == [
        "the block ended with an error, so 2 queued operations are not applied"
    ]
    assert session.flush().removed > 0  # on request they are


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_device_memory_is_flat_over_many_flushes(cupy):
    pytest.importorskip("warp", reason="Warp is not installed: pip install warp-lang")
    mask, pool, used, held = cupy.asarray(start()), cupy.get_default_memory_pool(), [], []
    for _ in range(100):
        with VoxelSession(mask, ORIGIN, PITCH, slab_bytes=30_000) as session:
            queue(session)
        del session
        used.append(pool.used_bytes())
        held.append(cupy.cuda.runtime.memGetInfo()[0])
    assert used[-1] == used[4]
    assert held[-1] >= held[4] - 2**21


@pytest.mark.gpu
def test_work_is_ordered_on_the_current_stream(cupy):
    """A mask that is made on a stream of its own is seen by what is asked for there next, without waiting."""
    pytest.importorskip("warp", reason="Warp is not installed: pip install warp-lang")
    from linumpy.voxel.backends.by_warp import WarpBackend

    backend = WarpBackend()
    shape = (64, 256, 512)
    warm = cupy.zeros(shape, bool)
    backend.dilate(warm, radius=3, pitch=1)
    for _ in range(5):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            noise = cupy.random.default_rng(1).random((4000, 4000))
            for _ in range(4):
                noise = cupy.sort(noise, axis=0)[::-1].copy()  # keeps the stream busy
            mask = cupy.zeros(shape, bool)
            mask[32, 128, 256] = noise[0, 0] > -1
            found = backend.boolean("union", backend.dilate(mask, radius=3, pitch=1), mask)
            stream.synchronize()
            assert int(found.sum()) == 123
