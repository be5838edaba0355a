"""What all steps of a mosaic share: opened, cut into boxes, read, written, with what was measured of it."""
