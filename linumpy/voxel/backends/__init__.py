"""The backends of voxel operations: SciPy on the host, Warp on the GPU."""
