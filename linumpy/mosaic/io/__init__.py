"""Functions that all steps of a mosaic share: open, cut into boxes, read, write, and record corrections."""
