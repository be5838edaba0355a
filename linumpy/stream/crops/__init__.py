"""Which crops: samplers, grids with the stitching of predictions, and estimates of what is read beside crops."""
