"""Resample images that are larger than memory, from Zarr to Zarr."""
