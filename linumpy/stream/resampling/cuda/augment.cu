// Resamples staged crops into a batch: a box of a volume and a map of coordinates for each crop → a row of the batch,
// with changed intensities, cast. Kernel `augment` interpolates; kernel `blur` then filters along one axis.
//
// Definitions: SOURCE and OUT (element types; bfloat16_bits for bfloat16), COPY (1 where OUT is SOURCE), WIDE (1 where
// SOURCE is double), ORDER (0 nearest, 1 linear) and MODE (of boundary.cuh: CONSTANT, NEAREST or MIRROR). Axes are
// (Z, Y, X). Coordinates are computed in double precision, so that resampling a box equals resampling the whole volume
// up to the last bits of the output.
#include "number.cuh"
#include "elements.cuh"
#include "boundary.cuh"
#include "bfloat16.cuh"
#include "philox4x32.cuh"

template <> struct Narrow<bfloat16_bits, float> {
    static __device__ __forceinline__ bfloat16_bits of(float v) { return as_bfloat16(v); }
};
template <> struct Narrow<bfloat16_bits, double> {
    static __device__ __forceinline__ bfloat16_bits of(double v) { return as_bfloat16(static_cast<float>(v)); }
};
template <class C> struct Widen<C, bfloat16_bits> {
    static __device__ __forceinline__ C of(bfloat16_bits v) { return as_float(v); }
};

// Written by linumpy.stream.resampling.resample, field by field.
struct Row {
    const SOURCE *source;  // the box, leading axes first
    int64 row;  // index of the row in the batch
    int64 box_start[3], box_shape[3], volume[3];
    double matrix[9], offset[3];
    const double *grid;  // displacements of control points, components first; null without an elastic grid
    int64 grid_shape[3];
    double grid_scale[3], grid_origin[3];
    double low, span, gamma, contrast, noise;
    uint64 key;
    double sigma[3];
};

constexpr int MAX_NODES = 128;

__device__ inline double normal(uint64 key, uint64 counter) {
    const uint4 drawn = philox(static_cast<unsigned>(counter), static_cast<unsigned>(counter >> 32), 0, 0,
                               Key{static_cast<unsigned>(key), static_cast<unsigned>(key >> 32)});
    const double first = (drawn.x + 1.0) * (1.0 / 4294967296.0), second = drawn.y * (1.0 / 4294967296.0);
    return sqrt(-2.0 * log(first)) * cos(6.283185307179586476925 * second);
}

__device__ inline bool is_neutral(const Row &row) { return row.gamma == 1 && row.contrast == 1 && row.noise == 0; }

__device__ inline double changed(const Row &row, double value, int64 voxel) {
    if (row.gamma != 1) value = row.low + row.span * pow(fmax((value - row.low) / row.span, 0.0), row.gamma);
    if (row.contrast != 1) {
        const double middle = row.low + 0.5 * row.span;
        value = middle + (value - middle) * row.contrast;
    }
    if (row.noise != 0) value += row.noise * normal(row.key, static_cast<uint64>(voxel));
    return value;
}

// Cast an unchanged voxel to the type of the batch, without an intermediate type that rounds.
__device__ __forceinline__ OUT as_is(SOURCE value) {
#if COPY
    return value;
#elif WIDE
    return Narrow<OUT, double>::of(value);
#else
    return Narrow<OUT, float>::of(Widen<float, SOURCE>::of(value));
#endif
}

// The four cubic B-spline weights between control points.
__device__ inline void spline(double t, double *w) {
    cubic_weights(t, w);
    for (int k = 0; k < 4; k++) w[k] *= 1.0 / 6;
}

__device__ __forceinline__ int first_node(double g, int64 nodes, double &t) {
    const int base = static_cast<int>(fmin(fmax(floor(g), 1.0), static_cast<double>(nodes - 3)));
    t = g - base;
    return base - 1;
}

// Sum the spline along z and y once for a line of the crop: `line` gets the displacements of control points along x.
__device__ inline void sum_line(const Row &row, int64 z, int64 y, double *line) {
    double wz[4], wy[4], tz, ty;
    const int fz = first_node(z * row.grid_scale[0] + row.grid_origin[0], row.grid_shape[0], tz);
    const int fy = first_node(y * row.grid_scale[1] + row.grid_origin[1], row.grid_shape[1], ty);
    spline(tz, wz);
    spline(ty, wy);
    const int nodes = static_cast<int>(row.grid_shape[2]);
    for (int i = threadIdx.x; i < 3 * nodes; i += blockDim.x) {
        const int component = i / nodes, x = i - component * nodes;
        double sum = 0;
        for (int a = 0; a < 4; a++)
            for (int b = 0; b < 4; b++) {
                const int64 node = (component * row.grid_shape[0] + fz + a) * row.grid_shape[1] + fy + b;
                sum += wz[a] * wy[b] * row.grid[node * nodes + x];
            }
        line[component * MAX_NODES + x] = sum;
    }
}

// Find the voxels around a coordinate, as indices in the box, and the weight of the upper voxel; false if the voxel of
// the crop gets the fill value.
__device__ inline bool locate(const Row &row, int axis, double c, int *at, double &upper) {
    const int n = static_cast<int>(row.volume[axis]);
    if (!bring_inside(c, n)) return false;
    const double below = floor(ORDER == 0 ? c + 0.5 : c);
    upper = ORDER == 0 ? 0.0 : c - below;
    for (int k = 0; k <= ORDER; k++) {
        const int64 inside = fold(static_cast<int64>(below) + k, n) - row.box_start[axis];
        // Only a neighbour of weight 0 may lie outside of the box.
        at[k] = static_cast<int>(min(max(inside, 0ll), row.box_shape[axis] - 1));
    }
    return row.box_shape[axis] > 0;
}

// Resample crops. `lines`: number of lines of a crop along x; `lead`: number of volumes of a crop, from leading axes.
// blockIdx.x runs over lines, blockIdx.y over rows of the table. If a row is blurred, `blur` changes its intensities.
extern "C" __global__ void augment(const Row *rows, OUT *out, int lead, int ny, int nx, int64 lines, double fill) {
    __shared__ double line[3 * MAX_NODES];
    const Row &row = rows[blockIdx.y];
    const bool neutral = is_neutral(row) || row.sigma[0] + row.sigma[1] + row.sigma[2] > 0;
    const int64 plane = row.box_shape[1] * row.box_shape[2], box = row.box_shape[0] * plane;
    for (int64 i = blockIdx.x; i < lines; i += gridDim.x) {
        const int64 z = i / ny, y = i - z * ny;
        if (row.grid != nullptr) {
            __syncthreads();
            sum_line(row, z, y, line);
            __syncthreads();
        }
        for (int x = threadIdx.x; x < nx; x += blockDim.x) {
            double c[3], upper[3];
            for (int axis = 0; axis < 3; axis++) {
                const double *m = row.matrix + 3 * axis;
                c[axis] = m[0] * z + m[1] * y + m[2] * x + row.offset[axis];
            }
            if (row.grid != nullptr) {
                double w[4], t;
                const int first = first_node(x * row.grid_scale[2] + row.grid_origin[2], row.grid_shape[2], t);
                spline(t, w);
                for (int axis = 0; axis < 3; axis++)
                    for (int k = 0; k < 4; k++) c[axis] += w[k] * line[axis * MAX_NODES + first + k];
            }
            int at[3][2];
            bool inside = true;
            for (int axis = 0; axis < 3; axis++) inside = locate(row, axis, c[axis], at[axis], upper[axis]) && inside;
            for (int l = 0; l < lead; l++) {
                const int64 voxel = (l * lines + i) * nx + x;
                OUT *target = out + (row.row * lead * lines * nx + voxel);
                const SOURCE *source = row.source + l * box;
                if (ORDER == 0 && inside && neutral) {
                    *target = as_is(source[at[0][0] * plane + at[1][0] * row.box_shape[2] + at[2][0]]);
                    continue;
                }
                double value = inside ? 0.0 : fill;
                if (inside) {
                    for (int a = 0; a <= ORDER; a++)
                        for (int b = 0; b <= ORDER; b++)
                            for (int d = 0; d <= ORDER; d++) {
                                const double weight = (a ? upper[0] : 1 - upper[0]) * (b ? upper[1] : 1 - upper[1]) *
                                                      (d ? upper[2] : 1 - upper[2]);
                                const int64 from = at[0][a] * plane + at[1][b] * row.box_shape[2] + at[2][d];
                                // A neighbour of weight 0 is left out, since 0 * NaN is NaN.
                                if (weight != 0) value += weight * Widen<double, SOURCE>::of(source[from]);
                            }
                }
                *target = Narrow<OUT, double>::of(neutral ? value : changed(row, value, voxel));
            }
        }
    }
}

// Blur along one axis, in place. A block keeps `columns` neighbouring lines in shared memory, followed by at most
// `max_weights` weights. `n`: voxels along the axis; `stride`: distance between neighbours, in elements; `total`: lines
// of a crop; `last`: whether this is the last axis that is blurred, after which intensities change.
extern "C" __global__ void blur(const Row *rows, OUT *out, int axis, int n, int64 stride, int64 total, int columns,
                                int max_weights, int last) {
    extern __shared__ double values[];
    const Row &row = rows[blockIdx.y];
    const double sigma = row.sigma[axis];
    const bool changes = last && !is_neutral(row) && row.sigma[0] + row.sigma[1] + row.sigma[2] > 0;
    if (sigma == 0 && !changes) return;
    const int radius = min(static_cast<int>(4.0 * sigma + 0.5), max_weights - 1);
    OUT *crop = out + row.row * total * n;
    const int64 begin = static_cast<int64>(blockIdx.x) * columns;
    const int count = static_cast<int>(min(static_cast<int64>(columns), total - begin));
    double *weights = values + n * columns;
    for (int d = threadIdx.x; d <= radius; d += blockDim.x)
        weights[d] = d ? exp(-0.5 * (d / sigma) * (d / sigma)) : 1.0;
    // Neighbouring threads access neighbours in memory: along the axis, or across it.
    for (int i = threadIdx.x; i < n * count; i += blockDim.x) {
        const int column = stride == 1 ? i / n : i % count, k = stride == 1 ? i % n : i / count;
        const int64 line = begin + column;
        values[k * columns + column] =
            Widen<double, OUT>::of(crop[(line / stride) * stride * n + line % stride + k * stride]);
    }
    __syncthreads();
    double sum = 1;
    for (int d = 1; d <= radius; d++) sum += 2 * weights[d];
    for (int i = threadIdx.x; i < n * count; i += blockDim.x) {
        const int column = stride == 1 ? i / n : i % count, k = stride == 1 ? i % n : i / count;
        const int64 line = begin + column, voxel = (line / stride) * stride * n + line % stride + k * stride;
        double value = values[k * columns + column];
        for (int d = 1; d <= radius; d++)
            value += weights[d] *
                     (values[reflected(k - d, n) * columns + column] + values[reflected(k + d, n) * columns + column]);
        value /= sum;
        crop[voxel] = Narrow<OUT, double>::of(changes ? changed(row, value, voxel) : value);
    }
}
