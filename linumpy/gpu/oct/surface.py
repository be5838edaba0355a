"""Find the tissue surface in an OCT volume: CuPy in, CuPy out; NumPy in, NumPy out.

In: a volume and its depth axis. Out: the depth at which tissue begins, for each A-line. The kernels of
``surface_kernels.py`` process volumes on a device. The filters of ``surface_filters.py`` process volumes on the host,
and on a device volumes with a mask or with a very large `s_z`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Literal, overload

import numpy as np

from linumpy.arrays import Array, is_device_array
from linumpy.checks import is_number
from linumpy.gpu.oct.surface_filters import SurfaceOptions, interface_by_filters
from linumpy.gpu.oct.surface_kernels import interface_by_kernels

log = logging.getLogger(__name__)

#: Maximum of `s_z`, unless the volume is deeper.
_MAX_S_Z = 16
#: Maxima of `s_xy` (unless the volume is wider) and of `order`: larger ones would need tables as large as a volume.
_MAX_S_XY, _MAX_ORDER = 4096, 32
#: Maximum of `s_z` for the kernels, whose shared memory holds the weights; the filters have no such limit.
_MAX_S_Z_ON_DEVICE = 1024


#: Where tissue begins: see :func:`find_tissue_interface`.
Definition = Literal["linumpy", "edge"]


@overload
def find_tissue_interface(
    vol: Array, s_xy: int = ..., s_z: float = ..., use_log: bool = ..., mask: Array | None = ..., order: int = ...,
    detect_cutting_errors: bool = ..., *, depth_axis: int | None = ..., definition: Definition = ...,
    min_contrast: float = ..., return_confidence: Literal[False] = ..., zero_log: float | None = ...,
) -> Array: ...  # fmt: skip
@overload
def find_tissue_interface(
    vol: Array, s_xy: int = ..., s_z: float = ..., use_log: bool = ..., mask: Array | None = ..., order: int = ...,
    detect_cutting_errors: bool = ..., *, depth_axis: int | None = ..., definition: Definition = ...,
    min_contrast: float = ..., return_confidence: Literal[True], zero_log: float | None = ...,
) -> tuple[Array, Array]: ...  # fmt: skip
def find_tissue_interface(
    vol: Array,
    s_xy: int = 15,
    s_z: float = 2,
    use_log: bool = True,
    mask: Array | None = None,
    order: int = 1,
    detect_cutting_errors: bool = False,
    *,
    depth_axis: int | None = None,
    definition: Definition = "linumpy",
    min_contrast: float = 5.0,
    return_confidence: bool = False,
    zero_log: float | None = None,
) -> Array | tuple[Array, Array]:
    """Find for each A-line where tissue begins.

    The volume is smoothed laterally and filtered along depth by the derivative of a Gaussian; the surface is where
    intensity rises most. Beyond its ends the volume is mirrored (SciPy's mode ``"reflect"``).

    Parameters
    ----------
    vol : numpy.ndarray or cupy.ndarray, rank 3
        OCT intensity: booleans, integers or floats, in any memory order (it is not copied). Without `use_log` all
        voxels must be finite.
    s_xy : int
        Voxels along each lateral axis over which the mean is taken; at most 4096, or more in a larger volume.
    s_z : float
        Standard deviation of the Gaussian along depth, in voxels; at most 16, or the voxels along depth if these are
        more. The Gaussian is cut off at 4 standard deviations.
    use_log : bool
        Whether to take the natural logarithm of positive voxels; the others become `zero_log`. In float32 for
        every dtype.
    mask : numpy.ndarray or cupy.ndarray of bool, optional
        Voxels that count, in the shape of the volume or of its lateral axes. Means are taken over voxels inside the
        mask. Along an A-line, a voxel outside repeats the nearest voxel inside above it, or the first voxel inside if
        there is none above, so that the border of the mask is not an edge of intensity. The surface is searched for
        inside the mask only. With a mask, filters process the volume in place of kernels, on the GPU too.
    order : int
        Order of the derivative along depth, from 0 to 32.
    detect_cutting_errors : bool
        Whether to replace the surface by the voxel with the largest absolute value of the smoothed A-line (lateral
        mean and Gaussian, no derivative), where that voxel lies above the surface.
    depth_axis : int, optional
        Axis of depth; by default the last one, with a log line (warning) that says so.
    definition : {"linumpy", "edge"}
        ``"linumpy"``: the voxel ``ceil(argmax + s_z / 2)``, at most the last voxel. It lies about ``s_z / 2 + 1``
        voxels below the edge and exists for every A-line. ``"edge"``: the edge itself, unbiased and to fractions of a
        voxel (a parabola through the largest derivative and its neighbours), in voxels from the centre of the first
        voxel: a step between voxels 49 and 50 lies at 49.5. It does not depend on the unit of intensity. See Notes for
        A-lines without such an edge.
    min_contrast : float
        Minimum contrast of an edge: the derivative at the edge over the root mean square of the derivative along the
        rest of the A-line. Of A-lines that are 200 voxels of noise, one in a thousand reaches a contrast of 5.
    return_confidence : bool
        Whether to return the contrast of each edge too; only for ``definition="edge"``.
    zero_log : float, optional
        Value used as the logarithm of voxels that are not positive. By default 0 for ``"linumpy"``: if all tissue is
        below 1, such voxels are the brightest. For ``"edge"``: the mean logarithm of the positive voxels (of
        a sample on a regular grid) minus two standard deviations minus 1.

    Returns
    -------
    numpy.ndarray or cupy.ndarray, rank 2
        Surface along the lateral axes, in their order. ``"linumpy"``: int32 voxels along depth, -1 for an A-line
        without any voxel inside the mask. ``"edge"``: float32; 0 where tissue begins at or before the first voxel, NaN
        where there is no tissue, infinity where there may be tissue but no surface is found.
    numpy.ndarray or cupy.ndarray of float32, rank 2
        Only with `return_confidence`: the contrast of the edge; where the surface is 0, the excess of intensity at the
        first voxel (see Notes). At least `min_contrast` where the surface is finite, 0 where intensity never rises.

    Raises
    ------
    ValueError
        A volume that is not of rank 3 or is empty; an invalid `s_xy`, `s_z`, `order`, `definition`, `min_contrast`,
        `zero_log` or `depth_axis`; a mask of another shape; `return_confidence` without ``definition="edge"``.
    TypeError
        A volume that is no NumPy or CuPy array; voxels that are not booleans, integers or floats.

    Notes
    -----
    The mean over `s_xy` voxels spreads a surface of slope m over m `s_xy` voxels of depth. With ``definition="edge"``
    and `order` 1, A-lines in which no edge reaches `min_contrast` are therefore processed a second time, with a mean
    over at most 3 × 3 A-lines and a Gaussian twice as wide along depth. This detects slopes up to 3 voxels per voxel.
    With another `order` there is no second pass, and the result without an edge is NaN. Where the second pass finds no
    edge either, the result is:

    - 0: smoothed intensity at the first voxel exceeds the mean of its A-line by `min_contrast` standard deviations of
      noise. Attenuated tissue that begins above the volume looks like this.
    - infinity: the A-line is not noise (its smoothed intensity has four times the variance of noise), but it has no
      detectable surface.
    - NaN: the A-line is noise around a constant level, as in water. Tissue from the first voxel to the last, without
      attenuation, would give the same.

    Comparisons such as ``z >= surface`` are false for infinity and NaN.
    """
    if definition not in ("linumpy", "edge"):
        raise ValueError(f"definition={definition!r}: choose 'linumpy' or 'edge'")
    is_edge = definition == "edge"
    if zero_log is not None and not -1e30 < zero_log < 1e30:
        raise ValueError(f"zero_log={zero_log}: a number is needed")
    if return_confidence and not is_edge:
        raise ValueError("return_confidence=True: only an edge has a contrast, pass definition='edge'")
    if not isinstance(vol, np.ndarray) and not is_device_array(vol):
        raise TypeError(f"the volume is a {type(vol).__name__}: pass a NumPy or CuPy array")
    if depth_axis is None:
        # The map of a volume (Z, Y, X) would be plausible but wrong.
        log.warning("depth_axis is not given: the last axis of %s is taken for depth", tuple(vol.shape))
        depth_axis = -1
    options = SurfaceOptions(
        s_xy, s_z, use_log, order, detect_cutting_errors, depth_axis, is_edge, min_contrast, zero_log
    )  # fmt: skip
    check_arguments(vol, options)
    options = replace(options, s_xy=int(s_xy), order=int(order))  # SciPy refuses 9.0 for 9
    if mask is None and is_device_array(vol) and s_z <= _MAX_S_Z_ON_DEVICE:
        surface, contrast = interface_by_kernels(vol, options)
    else:
        surface, contrast = interface_by_filters(vol, options, mask)
    return surface if contrast is None or not return_confidence else (surface, contrast)


def check_arguments(vol: Array, options: SurfaceOptions) -> None:
    """Check the arguments of :func:`find_tissue_interface`."""
    s_xy, s_z, order, depth_axis = options.s_xy, options.s_z, options.order, options.depth_axis
    if vol.ndim != 3 or not all(vol.shape):
        raise ValueError(f"a volume of shape {vol.shape} has no surface: three axes with voxels are needed")
    if not isinstance(depth_axis, (int, np.integer)) or not -3 <= depth_axis < 3:
        raise ValueError(f"depth_axis={depth_axis!r}: a volume has axes 0, 1 and 2")
    for name, value in {"s_xy": s_xy, "s_z": s_z, "order": order, "min_contrast": options.min_contrast}.items():
        if not is_number(value):
            raise ValueError(f"{name}={value!r}: a number is needed")
    if not math.isfinite(s_xy) or int(s_xy) != s_xy or s_xy < 1 or not 0 < s_z < math.inf:
        raise ValueError(f"s_xy={s_xy}, s_z={s_z}: at least 1 voxel, a whole number, and more than 0 are needed")
    if s_xy > max(_MAX_S_XY, *vol.shape):
        raise ValueError(f"s_xy={s_xy}: the mean is wider than the volume of shape {vol.shape}")
    if s_z > max(_MAX_S_Z, vol.shape[depth_axis]):
        raise ValueError(f"s_z={s_z:g}: the Gaussian is wider than the {vol.shape[depth_axis]} voxels along depth")
    if not 0 <= order <= _MAX_ORDER or int(order) != order:
        raise ValueError(f"order={order}: a derivative has a whole order from 0 to {_MAX_ORDER}")
    if not 0 <= options.min_contrast < math.inf:
        raise ValueError(f"min_contrast={options.min_contrast}: 0 or more is needed, 0 to take every rise for an edge")
    if vol.dtype.kind not in "biuf":
        raise TypeError(f"a volume of {vol.dtype} has no intensity: booleans, integers and floats have")
