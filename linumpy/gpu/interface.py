"""Find the tissue surface of a volume on the device: the import path for users."""

from linumpy.gpu.oct.surface import SurfaceOptions, find_tissue_interface

__all__ = ["SurfaceOptions", "find_tissue_interface"]
