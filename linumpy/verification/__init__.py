"""Whether an OME-Zarr image is whole and says what it holds: :func:`linumpy.verify` and ``linum-verify``."""
