"""Copies of Zarr arrays, images and groups in another storage: members of a group, plan of the copy, its blocks."""
