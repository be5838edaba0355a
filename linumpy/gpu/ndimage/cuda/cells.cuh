// The memory layout of a copy of an image in cells of 2^CELL_Z × 2^CELL_Y × 2^CELL_X voxels. A point anywhere in a
// large image touches fewer cache lines than if the image is stored row by row. The offset of a voxel is a sum of one
// number for each axis.
constexpr int CELL = CELL_Z + CELL_Y + CELL_X;

__device__ __forceinline__ INDEX in_cells_z(unsigned z, INDEX plane) {
    return static_cast<INDEX>(z >> CELL_Z) * plane + ((z & ((1u << CELL_Z) - 1)) << (CELL_Y + CELL_X));
}
__device__ __forceinline__ INDEX in_cells_y(unsigned y, INDEX row) {
    return static_cast<INDEX>(y >> CELL_Y) * row + ((y & ((1u << CELL_Y) - 1)) << CELL_X);
}
__device__ __forceinline__ INDEX in_cells_x(unsigned x) {
    return (static_cast<INDEX>(x >> CELL_X) << CELL) + (x & ((1u << CELL_X) - 1));
}
// Voxels of a row of cells.
__device__ __forceinline__ INDEX cell_row(int columns) {
    return static_cast<INDEX>((columns + (1 << CELL_X) - 1) >> CELL_X) << CELL;
}
__device__ __forceinline__ INDEX cell_plane(int rows, INDEX row) {
    return static_cast<INDEX>((rows + (1 << CELL_Y) - 1) >> CELL_Y) * row;
}
