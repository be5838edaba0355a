"""Reading by linumpy inside other packages: xarray, zarr, napari, MONAI, nnU-Net; and copies as TIFF and NIfTI.

Modules of plugins import the package that loads them.
"""
