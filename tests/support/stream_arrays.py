"""Arrays for the tests of batches."""

from tests.support.stores import stored


def make_array(path, values, chunks=None, **options):
    """Write an array, and return its path."""
    stored(path, values, chunks, **options)
    return str(path)
