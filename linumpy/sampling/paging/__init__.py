"""Volumes that are read while they are sampled: Zarr arrays in pages, raw files in slabs."""
