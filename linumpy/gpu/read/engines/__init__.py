"""What carries out the jobs of a reader: the native core, or zarr-python."""
