"""Opens arrays ahead, and reads their regions by the reader or by zarr-python."""
