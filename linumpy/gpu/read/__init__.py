"""Read regions of Zarr arrays into device memory."""
