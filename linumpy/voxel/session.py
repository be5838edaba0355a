"""Apply several voxel operations to a volume, slab by slab, for volumes larger than the memory of a device.

In: a volume, and operations that are queued. Out: the changed volume, or an OME-Zarr image. Errors: ``TypeError`` and
``ValueError`` when an operation is queued, ``VoxelSessionError`` for a flush that stopped after it had written planes.

A slab is a number of whole planes. A session reads each slab once, applies all operations, and writes the slab once. It
computes a slab from the original voxels of the slab and of a halo, the planes above and below that the operations need.
So the result does not depend on the size of slabs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, overload

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.checks import is_integer
from linumpy.device import is_device_array
from linumpy.errors import VoxelSessionError, not_pickled
from linumpy.io.volume import Volume
from linumpy.voxel.backends.choose import backend_of, get_backend
from linumpy.voxel.backends.operations import Backend, check_operation
from linumpy.voxel.capsules import capsule_table, polyline_table
from linumpy.voxel.element import Element, as_element
from linumpy.voxel.grid import Lengths, Numbers, VoxelGrid, make_grid
from linumpy.voxel.mesh import Trimesh, make_mesh, with_triangles
from linumpy.voxel.planes import Planes, WriterPlanes, check_label
from linumpy.write.writer import OmeZarrWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Flushed:
    """The changes of a flush.

    Attributes
    ----------
    added, removed : int
        Number of voxels that became true, and that became false.
    slabs : int
        Number of slabs that were written; 0 if nothing was queued and nothing had to be copied to `out`.
    """

    added: int = 0
    removed: int = 0
    slabs: int = 0


@dataclass(frozen=True)
class Queued:
    """A checked operation.

    - `apply`: returns the result for a slab, whose mask it may change in place.
    - `voxel_bytes`: temporary memory for each voxel of a slab, besides the slab and its result.
    - `halo`: number of planes above and below a plane on which the result for that plane depends.
    - `capsules`: the table that the operation subtracts; None if it is another operation.
    """

    apply: Callable[[Backend, Array, VoxelGrid], Array]
    voxel_bytes: int
    halo: int = 0
    capsules: np.ndarray | None = None


@dataclass(frozen=True)
class _Progress:
    """Progress of a flush; the session replaces the record as a whole, so it is consistent after an interrupt.

    - `start`: the first plane that is not written.
    - `above`: the original mask of the planes above `start` that the operations need.
    - `pending`: the planes from `start` on in the dtype of the target, if computed, and the progress when written.
    """

    start: int = 0
    above: Array | None = None
    done: Flushed = Flushed()
    pending: tuple[Array, _Progress] | None = None


class VoxelSession:
    """Queue voxel operations on a volume, and apply them slab by slab.

    Parameters
    ----------
    array : numpy.ndarray, cupy.ndarray, zarr.Array, Volume or None
        Bool, or integers of a label image; (Z, Y, X). Without `out` the array is changed in place. None, which needs
        `out`, is a volume without a true voxel.
    origin : (float, float, float)
        Corner of voxel 0, (x, y, z) µm.
    pitch : float or (float, float, float)
        Size of a voxel, one number or (x, y, z) µm.
    out : OmeZarrWriter, optional
        An open writer that receives the result; `array` is then not changed.
    label : int, optional
        The label of a label image that counts as true, and that added voxels get. By default all labels but 0 are true,
        and added voxels become 1.
    backend : Backend, optional
        By default Warp's for an array on a device, else the choice of :func:`~linumpy.voxel.get_backend`.
    slab_bytes : int
        Approximate memory of a slab in the backend, including its halo and temporary memory.

    Raises
    ------
    TypeError, ValueError
        An invalid array, position or size.
    PermissionError
        The array cannot be written, and there is no `out`.

    Notes
    -----
    A ``with`` block that ends without error flushes the queue. `out` then contains the array with all changes, also if
    nothing was queued. A block that ends with an error flushes nothing, and a warning says so. Operations are checked
    when they are queued. An error in :meth:`flush` before the first slab is written leaves the volume unchanged; a
    later error is a :class:`~linumpy.errors.VoxelSessionError` that names the planes that are done. Another
    :meth:`flush` continues from there.

    Only the array itself is changed: `out` makes the coarser resolutions of an OME-Zarr image.

    Examples
    --------
    >>> with VoxelSession(mask, origin=(0, 0, 0), pitch=(10, 10, 5)) as session:  # doctest: +SKIP
    ...     session.close(radius=50)
    ...     session.subtract_swept_polyline(track_um, radius=40)
    """

    def __init__(
        self,
        array: Array | zarr.Array | Volume | None,
        origin: Iterable[float] = (0, 0, 0),
        pitch: Lengths = 1.0,
        *,
        out: OmeZarrWriter | None = None,
        label: int | None = None,
        backend: Backend | None = None,
        slab_bytes: int = 2 * 2**30,
    ) -> None:
        self.backend = backend = backend or (backend_of(array) if is_device_array(array) else get_backend())
        if array is None and out is None:
            raise ValueError("array=None is an empty volume, which needs out=")
        planes = None if array is None else Planes(array, backend.xp, "array")
        target = None if out is None else WriterPlanes(out, planes)
        if planes is None:
            assert target is not None
            zeros = backend.xp.broadcast_to(backend.xp.zeros((), target.dtype), target.shape)  # takes no memory
            planes = Planes(zeros, backend.xp, "array")
        self._source, self._target = planes, target or planes
        if not self._target.writable:
            raise PermissionError('array cannot be written: open it with mode="r+", or give out=')
        self._in_place = out is None
        self._grid = make_grid(self._source.shape, origin, pitch)
        self._label = check_label(label, self._target.dtype)
        if not is_integer(slab_bytes) or slab_bytes < 1:
            raise ValueError(f"slab_bytes={slab_bytes!r}: a positive number of bytes is needed")
        self._slab_bytes = int(slab_bytes)
        self._queue: list[Queued] = []
        self._progress: _Progress | None = None
        self._written = False

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send the path of the volume, and open a VoxelSession there")

    def __enter__(self) -> VoxelSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.flush()
        elif self._queue:
            log.warning("the block ended with an error, so %d queued operations are not applied", len(self._queue))

    def boolean(self, operation: str, other: Array | zarr.Array | Volume) -> None:
        """Queue ``"union"``, ``"intersect"`` or ``"subtract"`` with a mask of the same shape, in memory or in Zarr.

        In a label image all voxels but 0 are true. Planes of `other` are read when they are needed.

        Raises
        ------
        TypeError, ValueError
            An unknown operation, another shape, axes or dtype; `other` is the array that the session changes in place.
        """
        planes = Planes(other, self.backend.xp, "other")
        if planes.shape != self._grid.shape:
            raise ValueError(f"other has shape {planes.shape}, but the volume has {self._grid.shape}")
        if self._in_place and planes.shares(self._source):
            raise ValueError("other is the array that the session changes plane by plane: pass a copy")
        check_operation(operation)

        def combine(backend: Backend, mask: Array, grid: VoxelGrid) -> Array:
            read = planes.read(grid.z_offset, grid.z_offset + grid.shape[0])
            return backend.boolean(operation, mask, read != 0, out=mask)

        self._add(Queued(combine, voxel_bytes=2))

    def dilate(
        self,
        structure: Numbers | Element | None = None,
        *,
        radius: float | None = None,
        pitch: Lengths | None = None,
        border_value: bool = False,
    ) -> None:
        """Queue a dilation; parameters as for :meth:`.Backend.dilate`, but the default `pitch` is the session's."""
        self._morphology("dilate", structure, radius, pitch, border_value)

    def erode(
        self,
        structure: Numbers | Element | None = None,
        *,
        radius: float | None = None,
        pitch: Lengths | None = None,
        border_value: bool = False,
    ) -> None:
        """Queue an erosion; parameters as for :meth:`dilate`."""
        self._morphology("erode", structure, radius, pitch, border_value)

    def open(
        self,
        structure: Numbers | Element | None = None,
        *,
        radius: float | None = None,
        pitch: Lengths | None = None,
        border_value: bool | None = None,
    ) -> None:
        """Queue an erosion and a dilation; parameters as for :meth:`.Backend.open`, `pitch` as for :meth:`dilate`."""
        self._morphology("open", structure, radius, pitch, border_value)

    def close(
        self,
        structure: Numbers | Element | None = None,
        *,
        radius: float | None = None,
        pitch: Lengths | None = None,
        border_value: bool | None = None,
    ) -> None:
        """Queue a dilation and an erosion; parameters as for :meth:`.Backend.close`, `pitch` as for :meth:`dilate`."""
        self._morphology("close", structure, radius, pitch, border_value)

    def subtract_swept_capsule(self, p0: Numbers, p1: Numbers, radius: Numbers) -> None:
        """Queue the removal of capsules; parameters as for :meth:`.Backend.subtract_swept_capsule`."""
        self._subtract(capsule_table(p0, p1, radius))

    def subtract_swept_polyline(self, points: Numbers, radius: Numbers) -> None:
        """Queue the removal of the capsules along a polyline, (n, 3) µm, with one radius in µm or one per segment."""
        self._subtract(polyline_table(points, radius))

    @overload
    def voxelize_mesh(
        self, vertices: Numbers, triangles: Numbers, operation: str = "union", *, fill_holes: bool = True
    ) -> None: ...

    @overload
    def voxelize_mesh(self, mesh: Trimesh, /, operation: str = "union", *, fill_holes: bool = True) -> None: ...

    def voxelize_mesh(self, *args: Any, fill_holes: bool = True, **options: Any) -> None:
        """Queue the combination of the volume with the mask of a mesh, as for :meth:`.Backend.voxelize_mesh`.

        ``voxelize_mesh(vertices, triangles, operation)`` or ``voxelize_mesh(mesh, operation)``; `operation` is as for
        :meth:`boolean`, by default ``"union"``.

        Raises
        ------
        TypeError, ValueError
            An invalid mesh.
        """
        self._voxelize_mesh(*with_triangles(args), fill_holes=fill_holes, **options)

    def _voxelize_mesh(
        self, vertices: Numbers, triangles: Numbers, operation: str = "union", *, fill_holes: bool
    ) -> None:
        mesh = make_mesh(self.backend.xp, vertices, triangles, self._grid)
        check_operation(operation)
        self._add(
            Queued(
                lambda backend, mask, grid: backend.boolean(
                    operation, mask, backend.voxelize(mesh, grid, fill_holes=fill_holes), out=mask
                ),
                voxel_bytes=6,
            )
        )

    def flush(self) -> Flushed:
        """Apply the queued operations.

        With an empty queue and `out`, the first flush copies the array to `out`; otherwise an empty queue changes
        nothing.

        Returns
        -------
        Flushed
            Numbers of changed voxels and written slabs.

        Raises
        ------
        VoxelSessionError
            An error when a part of the volume is, or may be, already written; ``__cause__`` is the error itself.
        Exception
            Any error before that, unchanged.
        """
        if not self._queue and (self._in_place or self._written):
            return Flushed()
        progress = self._progress or _Progress()
        halo, depth = sum(operation.halo for operation in self._queue), self._grid.shape[0]
        planes = self._slab_planes(halo)
        try:
            while progress.start < depth:
                pending = progress.pending or self._compute(progress, min(progress.start + planes, depth), halo)
                progress = self._progress = replace(progress, pending=pending)
                self._target.write(progress.start, pending[0])
                progress = self._progress = pending[1]
        except Exception as error:
            progress = self._progress or _Progress()
            partly = progress.pending is not None and self._target.writes_in_parts
            if progress.start == 0 and not partly:
                self._progress = None
                raise
            start = progress.start
            stop = progress.pending[1].start if progress.pending is not None and partly else start
            in_part = f"planes {start}:{stop} may be written in part, " if partly else ""
            raise VoxelSessionError(
                f"planes 0:{start} of {depth} are done, {in_part}planes {stop}:{depth} are unchanged; "
                f"call flush() again to continue from plane {start}. The cause: {error}"
            ) from error
        self._queue, self._progress, self._written = [], None, not self._in_place
        return progress.done

    def _add(self, operation: Queued) -> None:
        if self._progress is not None:
            raise ValueError(f"an earlier flush stopped after {self._progress.start} planes: flush again first")
        if self._written:
            raise ValueError("out= is already written: open another session for more operations")
        self._queue.append(operation)

    def _morphology(
        self,
        method: str,
        structure: Numbers | Element | None,
        radius: float | None,
        pitch: Lengths | None,
        border_value: bool | None,
    ) -> None:
        element = as_element(structure, radius, self._grid.pitch if pitch is None else pitch)
        steps = 2 if method in ("open", "close") else 1
        self._add(
            Queued(
                lambda backend, mask, _: getattr(backend, method)(mask, element, border_value=border_value),
                voxel_bytes=2,
                halo=steps * element.halo,
            )
        )

    def _subtract(self, table: np.ndarray) -> None:
        """Queue the removal of capsules, in one pass with those that were queued last."""
        before = self._queue[-1].capsules if self._queue else None
        joined = table if before is None else np.concatenate([before, table])

        def subtract(backend: Backend, mask: Array, grid: VoxelGrid) -> Array:
            backend.subtract_capsules(mask, joined, grid)
            return mask

        if len(table):
            self._add(Queued(subtract, voxel_bytes=1, capsules=joined))
            if before is not None:
                del self._queue[-2]

    def _slab_planes(self, halo: int) -> int:
        """Return the number of planes of a slab without its halo: whole chunks, at least one chunk."""
        size = 2 + self._source.dtype.itemsize + self._target.dtype.itemsize
        per_voxel = size + max((operation.voxel_bytes for operation in self._queue), default=0)
        planes = self._slab_bytes // (per_voxel * self._grid.shape[1] * self._grid.shape[2]) - 2 * halo
        return max(1, planes // self._target.step) * self._target.step

    def _compute(self, progress: _Progress, stop: int, halo: int) -> tuple[Array, _Progress]:
        """Compute the planes from `progress.start` to `stop`; return them, and the progress when they are written."""
        xp, depth = self.backend.xp, self._grid.shape[0]
        read_start, read_stop = max(0, progress.start - halo), min(depth, stop + halo)
        above = xp.empty((0, *self._grid.shape[1:]), bool) if progress.above is None else progress.above
        labels = self._source.read(progress.start if self._in_place else read_start, read_stop)
        mask = labels != 0 if self._label is None else labels == self._label
        if self._in_place and progress.start > read_start:  # the array itself no longer has the original planes above
            mask = xp.concatenate([above, mask])
        first, count = progress.start - read_start, stop - progress.start
        old = mask[first : first + count].copy()
        next_above = mask[max(0, stop - halo - read_start) : stop - read_start].copy()
        grid = replace(self._grid, shape=tuple(mask.shape), z_offset=read_start)
        for operation in self._queue:
            mask = operation.apply(self.backend, mask, grid)
        new = mask[first : first + count]
        skipped = 0 if self._in_place else first
        planes = self._relabelled(labels[skipped : skipped + count], old, new)
        done = progress.done
        added, removed = done.added + int((new & ~old).sum()), done.removed + int((old & ~new).sum())
        return planes, _Progress(stop, next_above, Flushed(added, removed, done.slabs + 1))

    def _relabelled(self, labels: Array, old: Array, new: Array) -> Array:
        """Return labels in the target's dtype, with 0 in removed voxels and the session's label in added ones."""
        xp, dtype = self.backend.xp, self._target.dtype.newbyteorder("=")
        if labels.dtype == bool:
            return new.astype(dtype) * dtype.type(self._label or 1)
        return xp.where(new == old, labels, xp.where(new, self._label or 1, 0)).astype(dtype)
