"""Fills rows of a batch, on a device or the host: borders of direct crops, and staged crops that are resampled."""
