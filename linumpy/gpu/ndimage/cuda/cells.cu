// Copy an image of three axes into cells (see cells.cuh).
//
// Definitions: UNIT (an unsigned integer as wide as a voxel), INDEX, CELL_Z, CELL_Y, CELL_X.
#include "number.cuh"
#include "cells.cuh"

// Blocks along x cover a row of cells, blocks along y and z the rows and planes of cells. Voxels of cells beyond the
// image hold the nearest voxel.
extern "C" __global__ void to_cells(const UNIT *__restrict__ image, UNIT *__restrict__ cells, int n0, int n1, int n2) {
    const INDEX row = cell_row(n2), plane = cell_plane(n1, row);
    const INDEX i = static_cast<INDEX>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= row) return;
    const int inside = static_cast<int>(i & ((1 << CELL) - 1));
    const int x = static_cast<int>((i >> CELL) << CELL_X) + (inside & ((1 << CELL_X) - 1));
    const int y = static_cast<int>(blockIdx.y << CELL_Y) + (inside >> CELL_X & ((1 << CELL_Y) - 1));
    const int z = static_cast<int>(blockIdx.z << CELL_Z) + (inside >> (CELL_X + CELL_Y));
    const INDEX from =
        (static_cast<INDEX>(z < n0 ? z : n0 - 1) * n1 + (y < n1 ? y : n1 - 1)) * n2 + (x < n2 ? x : n2 - 1);
    cells[blockIdx.z * plane + blockIdx.y * row + i] = image[from];
}
