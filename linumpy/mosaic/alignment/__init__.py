"""Alignment of slices: what they show where they meet, transforms to a common space, and files of these."""
