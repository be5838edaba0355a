"""Voxels that were read → rows of a batch: borders and staged crops, on a device or the host."""
