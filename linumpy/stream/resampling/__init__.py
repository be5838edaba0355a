"""Fills rows of a batch, on a device or the host: borders of direct crops, and rows of staged crops by resampling."""
