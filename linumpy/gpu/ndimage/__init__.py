"""Interpolation of images of any rank, as SciPy's ``ndimage``: CuPy in, CuPy out; NumPy in, NumPy out."""
