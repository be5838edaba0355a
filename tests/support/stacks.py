"""Slices of one tissue, and their stack as one call in memory makes it: the oracle of stacking from disk to disk."""

from dataclasses import replace

from linumpy.device import array_module
from linumpy.mosaic.stacking import compose, plan_stack
from linumpy.testing.synthetic import surface_depth


def stack_slices(slices, overlaps, shifts=None):
    """Stack slices, NumPy or CuPy arrays (Z, Y, X) of one dtype, from the top down."""
    plan = plan_stack([tuple(volume.shape) for volume in slices], overlaps, shifts)
    whole = tuple(slice(0, n) for n in plan.shape)
    return compose(plan, whole, lambda number, box: slices[number][box], array_module(slices[0]), slices[0].dtype)


def consecutive_slices(spec, overlap):
    """Specs of two slices below the surface: the last `overlap` planes of one show the first ones of the other."""
    depth = spec.tile_shape[0]
    highest = max(float(surface_depth(spec).max()), 0.0) * spec.spacing_um[0]
    first = replace(spec, water_um=spec.water_um - highest - spec.spacing_um[0])
    return first, replace(first, slice_number=spec.slice_number + 1, first_plane=spec.first_plane + depth - overlap)
