// Sample grids of vertices and the elements that stitch them. A point has the value of the first grid or element that
// contains the point and has a value there: grids come first, then elements, each in the order of their numbers.
#include "number.cuh"
#include "box_lists.cuh"

struct Box { float low[3], high[3]; };

struct Grid {
    float lower[3];  // of the first vertex
    float cells;     // per unit of length
    int64 offset;    // of its values
    int size[3], unused;
};

struct alignas(16) Vertex { float position[3], value; };
struct alignas(16) Corners { int vertex[8]; };  // padded with -1

struct Frame {
    float extent[3];
    float background;
    Lists lists;
    int grids, unused;
};

// Distance outside an element, in the element's coordinates, up to which a point counts as inside: it exceeds rounding.
constexpr double TOLERANCE = 1e-7, CONVERGED = 1e-9;
constexpr int MAX_STEPS = 20;

__device__ bool in_grid(const Grid &grid, const float *__restrict__ values, const float (&point)[3], float &value) {
    int low[3];
    float weight[3];
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
        const float at = (point[axis] - grid.lower[axis]) * grid.cells;
        low[axis] = max(0, min(static_cast<int>(at), grid.size[axis] - 2));
        weight[axis] = fminf(fmaxf(at - low[axis], 0.0f), 1.0f);
    }
    float sum = 0;
    bool empty = false;
#pragma unroll
    for (int corner = 0; corner < 8; ++corner) {
        const int64 row = static_cast<int64>(low[2] + (corner >> 2)) * grid.size[1] + low[1] + (corner >> 1 & 1);
        const float corner_value = values[grid.offset + row * grid.size[0] + low[0] + (corner & 1)];
        empty |= corner_value != corner_value;
        sum += (corner & 1 ? weight[0] : 1 - weight[0]) * (corner & 2 ? weight[1] : 1 - weight[1]) *
               (corner & 4 ? weight[2] : 1 - weight[2]) * corner_value;
    }
    value = sum;
    return !empty;
}

// Weights of vertices at coordinates r of an element with CORNERS vertices, and their derivatives.
template <int CORNERS>
__device__ void weights_at(const double (&r)[3], double (&n)[CORNERS], double (&d)[CORNERS][3]);

template <> __device__ void weights_at<8>(const double (&r)[3], double (&n)[8], double (&d)[8][3]) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const bool far[3] = {((k ^ k >> 1) & 1) != 0, (k & 2) != 0, (k & 4) != 0};  // 0, 1, 2, 3 go around a face
        double f[3], g[3];
        for (int axis = 0; axis < 3; ++axis) {
            f[axis] = far[axis] ? r[axis] : 1 - r[axis];
            g[axis] = far[axis] ? 1 : -1;
        }
        n[k] = f[0] * f[1] * f[2];
        d[k][0] = g[0] * f[1] * f[2];
        d[k][1] = f[0] * g[1] * f[2];
        d[k][2] = f[0] * f[1] * g[2];
    }
}

template <> __device__ void weights_at<6>(const double (&r)[3], double (&n)[6], double (&d)[6][3]) {
    const double corner[3] = {1 - r[0] - r[1], r[0], r[1]};
#pragma unroll
    for (int k = 0; k < 6; ++k) {
        const int c = k % 3;
        const double height = k < 3 ? 1 - r[2] : r[2];
        n[k] = corner[c] * height;
        d[k][0] = (c == 0 ? -1 : c == 1 ? 1 : 0) * height;
        d[k][1] = (c == 0 ? -1 : c == 2 ? 1 : 0) * height;
        d[k][2] = k < 3 ? -corner[c] : corner[c];
    }
}

// r: two coordinates in the base times the third, which is 1 in the base and 0 at the tip, so the tip is not singular.
template <> __device__ void weights_at<5>(const double (&r)[3], double (&n)[5], double (&d)[5][3]) {
    const double a = r[0], b = r[1], t = r[2];
    const bool tip = fabs(t) < 1e-12;
    const double over = tip ? 0 : 1 / t, m = a * b * over, da = b * over, db = a * over, dt = -m * over;
    const double w[5][4] = {{t - a - b + m, -1 + da, -1 + db, 1 + dt},
                            {a - m, 1 - da, -db, -dt},
                            {m, da, db, dt},
                            {b - m, -da, 1 - db, -dt},
                            {1 - t, 0, 0, -1}};
#pragma unroll
    for (int k = 0; k < 5; ++k) {
        n[k] = w[k][0];
        for (int axis = 0; axis < 3; ++axis) d[k][axis] = w[k][axis + 1];
    }
}

template <int CORNERS> __device__ bool is_inside(const double (&r)[3]) {
    const double top[3] = {CORNERS == 5 ? r[2] : CORNERS == 6 ? 1 - r[1] : 1, CORNERS == 5 ? r[2] : 1, 1};
    bool inside = true;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) inside &= r[axis] >= -TOLERANCE && r[axis] <= top[axis] + TOLERANCE;
    return inside;
}

__device__ double cross_dot(const double (&a)[3], const double (&b)[3], const double (&c)[3]) {
    return a[0] * (b[1] * c[2] - b[2] * c[1]) + a[1] * (b[2] * c[0] - b[0] * c[2]) + a[2] * (b[0] * c[1] - b[1] * c[0]);
}

// Find a point in the coordinates of an element by Newton's method from its middle. Steps stay near the element.
template <int CORNERS>
__device__ bool in_curved(const Corners &corners, const Vertex *__restrict__ vertices, const float (&point)[3],
                          float &value) {
    double position[CORNERS][3], n[CORNERS], d[CORNERS][3];
    float values[CORNERS];
#pragma unroll
    for (int k = 0; k < CORNERS; ++k) {
        const Vertex vertex = vertices[corners.vertex[k]];
        values[k] = vertex.value;
        for (int axis = 0; axis < 3; ++axis)
            position[k][axis] = static_cast<double>(vertex.position[axis]) - point[axis];
    }
    const double middle = CORNERS == 8 ? 0.5 : CORNERS == 6 ? 1.0 / 3 : 0.375;
    double r[3] = {middle, middle, CORNERS == 5 ? 0.75 : 0.5};
    for (int step = 0; step < MAX_STEPS; ++step) {
        weights_at<CORNERS>(r, n, d);
        double along[3][3] = {}, miss[3] = {};
#pragma unroll
        for (int k = 0; k < CORNERS; ++k)
            for (int axis = 0; axis < 3; ++axis) {
                miss[axis] -= n[k] * position[k][axis];
                for (int j = 0; j < 3; ++j) along[j][axis] += d[k][j] * position[k][axis];
            }
        const double volume = cross_dot(along[0], along[1], along[2]);
        if (volume == 0) return false;
        const double change[3] = {cross_dot(miss, along[1], along[2]) / volume,
                                  cross_dot(along[0], miss, along[2]) / volume,
                                  cross_dot(along[0], along[1], miss) / volume};
        double largest = 0;
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) {
            r[axis] = fmin(fmax(r[axis] + change[axis], -1.0), 2.0);
            largest = fmax(largest, fabs(change[axis]));
        }
        if (largest < CONVERGED) {
            if (!is_inside<CORNERS>(r)) return false;
            weights_at<CORNERS>(r, n, d);
            double sum = 0;
            for (int k = 0; k < CORNERS; ++k) sum += n[k] * values[k];
            value = static_cast<float>(sum);
            return true;
        }
    }
    return false;
}

__device__ bool in_tet(const Corners &corners, const Vertex *__restrict__ vertices, const float (&point)[3],
                       float &value) {
    double edge[3][3], to[3];
    float values[4];
    const Vertex first = vertices[corners.vertex[0]];
    values[0] = first.value;
#pragma unroll
    for (int k = 0; k < 3; ++k) {
        const Vertex vertex = vertices[corners.vertex[k + 1]];
        values[k + 1] = vertex.value;
        to[k] = static_cast<double>(point[k]) - first.position[k];
        for (int axis = 0; axis < 3; ++axis)
            edge[k][axis] = static_cast<double>(vertex.position[axis]) - first.position[axis];
    }
    const double volume = cross_dot(edge[0], edge[1], edge[2]);
    if (volume == 0) return false;
    const double b = cross_dot(to, edge[1], edge[2]) / volume, c = cross_dot(edge[0], to, edge[2]) / volume;
    const double d = cross_dot(edge[0], edge[1], to) / volume, a = 1 - b - c - d;
    if (!(fmin(fmin(a, b), fmin(c, d)) >= -TOLERANCE)) return false;
    value = static_cast<float>(a * values[0] + b * values[1] + c * values[2] + d * values[3]);
    return true;
}

__device__ bool in_element(const Corners &corners, const Vertex *__restrict__ vertices, const float (&point)[3],
                           float &value) {
    if (corners.vertex[4] < 0) return in_tet(corners, vertices, point, value);
    if (corners.vertex[5] < 0) return in_curved<5>(corners, vertices, point, value);
    if (corners.vertex[6] < 0) return in_curved<6>(corners, vertices, point, value);
    return in_curved<8>(corners, vertices, point, value);
}

extern "C" __global__ void __launch_bounds__(256)
    umesh(const float *__restrict__ coords, float *__restrict__ out, int64 count, const Frame *__restrict__ frame,
          const List *__restrict__ table, const int *__restrict__ items, const Box *__restrict__ boxes,
          const Grid *__restrict__ grids, const float *__restrict__ grid_values, const Corners *__restrict__ elements,
          const Vertex *__restrict__ vertices) {
    const int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float point[3];
    const float nan_or_zero = point_at(coords, i, frame->extent, point);
    const List list = list_at(frame->lists, table, point);
    float value = frame->background;
    for (int k = 0; k < list.count; ++k) {
        const int number = items[list.start + k];
        const Box box = boxes[number];
        bool near = true;
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) near &= point[axis] >= box.low[axis] && point[axis] <= box.high[axis];
        if (!near) continue;
        float inside_value;
        if (number < frame->grids ? in_grid(grids[number], grid_values, point, inside_value)
                                  : in_element(elements[number - frame->grids], vertices, point, inside_value)) {
            value = inside_value;
            break;
        }
    }
    out[i] = value + nan_or_zero;
}
