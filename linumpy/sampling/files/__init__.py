"""Readers of volume files that are not Zarr: bytes on disk → frozen records of NumPy arrays, all sizes checked."""
