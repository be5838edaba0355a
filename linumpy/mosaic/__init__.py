"""Mosaics of tissue from disk to disk: surface, projection, focal correction, resampling, stacking of slices."""
