"""Where arrays come from and go to: layout of stored arrays, OME-Zarr metadata, synthetic mosaics, writing."""
