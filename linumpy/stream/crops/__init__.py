"""Crops: random samplers, grids and the stitching of predictions, estimates of the bytes that are read."""
