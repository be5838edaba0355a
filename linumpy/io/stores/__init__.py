"""Storage other than Zarr folders: object stores, ZIP files, TIFF stacks."""
