"""Arrays for the tests of batches."""

import zarr


def make_array(path, values, chunks=None, **options):
    """Write an array, and return its path."""
    array = zarr.create_array(path, shape=values.shape, dtype=values.dtype, chunks=chunks or values.shape, **options)
    array[...] = values
    return str(path)
