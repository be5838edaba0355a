"""Plan resampling: new grids of voxels, blocks of them, and the boxes of the source that they need."""
