"""Arrays are opened ahead, and their regions read by the reader or by zarr-python."""
