"""OME-Zarr volumes from disk into GPU memory, resampled and analysed there.

Axes are ordered (Z, Y, X), spacings are in µm, and an array stays where it is: CuPy in, CuPy out; NumPy in,
NumPy out. Importing this package, or any module of it, needs no GPU and no GPU package.
"""

__version__ = "0.1.0"
