"""Metadata of OME-Zarr images and of groups of them, NGFF 0.4 to 0.6."""
