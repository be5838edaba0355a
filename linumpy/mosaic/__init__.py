"""Tiles and slices of a mosaic."""
