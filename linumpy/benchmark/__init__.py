"""Time every way from a Zarr array on the disk to the GPU, one beside the other.

The rooms: ``data`` (voxels whose compressibility is known), ``cases`` (what is read), ``paths`` (the ways of reading
it), ``truth`` (whether a way reads the right values), ``cache`` (page cache), ``runner`` (check, then time),
``machine`` (what it ran on), ``table``, ``export`` and ``plot`` (what people see). None needs a GPU to be imported.
"""
