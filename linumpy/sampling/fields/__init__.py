"""Fields of files that other programs write: sparse grids, images, bricks of cells, grids stitched by elements."""
