"""Plan resampling: new voxel grids, blocks of them, and the boxes of the source that each block needs."""
