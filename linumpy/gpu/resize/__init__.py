"""Resize images by tables of weights, axis after axis."""
