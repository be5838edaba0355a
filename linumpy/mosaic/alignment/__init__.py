"""Alignment of slices: cut surfaces, registration, transforms to a common space and their files, overlaps along Z."""
