"""Blocks of a resampled image: planned, made, and written while the next one is read."""
