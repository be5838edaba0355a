"""Copies of arrays, images and groups of Zarr, stored in another way: what lies in a group, its copy, and blocks."""
