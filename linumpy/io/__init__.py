"""Storage on the host: layout of stored arrays, OME-Zarr metadata, output paths, zarr-python's mode."""
