"""The tissue surface of a volume on the device: what users import."""

from linumpy.gpu.oct.surface import SurfaceOptions, find_tissue_interface

__all__ = ["SurfaceOptions", "find_tissue_interface"]
