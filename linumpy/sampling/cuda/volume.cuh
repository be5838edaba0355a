// A volume in device memory: the cell of a point, and the eight voxels around it. Include after philox.cuh, number.cuh
// and elements.cuh.
//
// Definitions: SOURCE (type of a voxel), INDEX (int, or int64 for large volumes), LAYOUT, NORMALISE (1: voxels become
// (v - low) · scale, clipped to 0 to 1; 2: the same, and NaN stays NaN).
//
// A random point costs the sectors of 32 bytes in which its voxels lie. Layouts, and the sectors of a point for voxels
// of 4 bytes:
//   0 rows: the volume alone, 4.5 sectors;
//   1 bricks: a copy whose sectors are boxes of 2 × 2 × 2 voxels (4 × 2 × 2 of 2 bytes, 4 × 4 × 2 of 1 byte), 3.4;
//   2 quads: for each voxel the voxel and its next neighbours along x, y and both; two quads along z share a sector
//     (four of 2 bytes, eight of 1 byte), 1.5;
//   3 cells: for each voxel the voxel and its seven next neighbours, 1.
// Layouts 1 to 3 also keep the volume itself, for points that follow each other along rows.

struct Volume {
    uint64 first;  // number of the first sample in the stream
    int64 count;
    int64 voxels;  // of a channel
    int64 packed;  // elements of a channel in the layout
    Key key;
    int dims[3];  // z, y, x
    int channels;
    int march;  // tiles of a warp
    int aligned;  // 1: the array of coordinates begins at a multiple of 16 bytes
    float low, scale;
};
static_assert(sizeof(Volume) == 72, "linumpy.sampling.volume writes 72 bytes");

struct Axis {
    int cell;  // the voxel at or before the point
    float f;  // fraction of the distance to the next voxel
    bool inside;  // between the first and the last centre
};

// Rounding downwards makes the cell exact; the fraction is computed from the exact product. NaN stays NaN.
__device__ __forceinline__ Axis along(float u, int n) {
    const float size = static_cast<float>(n), last = static_cast<float>(n - 1), p = __fmaf_rd(u, size, -0.5f);
    const bool inside = p > 0 && p < last;
    const float cell = inside ? floorf(p) : p >= last ? last : 0.0f;
    return {static_cast<int>(cell), inside ? __fmaf_rn(u, size, -(cell + 0.5f)) : u - u, inside};
}

// Adding 3 · 2^22 to a number within 2^22 of zero rounds it down to an integer, which is in the low bits of the sum:
// four times as fast as a conversion.
constexpr float RAISED = 12582912.0f;
constexpr int RAISED_BITS = 0x4B400000;

__device__ __forceinline__ float raised_cell(float u, float n) { return __fadd_rd(__fmaf_rd(u, n, -0.5f), RAISED); }

// As `along`, for a linear spline along an axis of less than 2^22 voxels. Beyond the last centre f may be any value
// from 0 to 1, since both voxels are the last one. f is finite also for points that are not: see `nan_or_zero`.
__device__ __forceinline__ Axis along_linear(float u, int n) {
    const float size = static_cast<float>(n), last = static_cast<float>(n - 1), p = __fmaf_rd(u, size, -0.5f);
    const float raised = __fadd_rd(fminf(fmaxf(p, 0.0f), last), RAISED);
    return {__float_as_int(raised) - RAISED_BITS, __saturatef(__fmaf_rn(u, size, -(raised - RAISED + 0.5f))),
            p > 0 && p < last};
}

// 0, or NaN for points that are not finite.
__device__ __forceinline__ float nan_or_zero(const float *u) {
    return __fmaf_rn(u[0], 0.0f, __fmaf_rn(u[1], 0.0f, __fmul_rn(u[2], 0.0f)));
}

__device__ __forceinline__ float as_value(SOURCE v, const Volume &volume) {
    const float value = Widen<float, SOURCE>::of(v);
#if NORMALISE == 2
    return value == value ? __saturatef((value - volume.low) * volume.scale) : value;
#elif NORMALISE
    return __saturatef((value - volume.low) * volume.scale);
#else
    return value;
#endif
}

struct Corners {
    SOURCE v[8];  // x fastest
};

__device__ __forceinline__ Corners in_rows(const SOURCE *linear, const Axis *at, const Volume &volume) {
    const INDEX row = volume.dims[2], plane = static_cast<INDEX>(volume.dims[1]) * row;
    const INDEX x = at[2].cell < volume.dims[2] - 1, y = at[1].cell < volume.dims[1] - 1 ? row : 0;
    const INDEX z = at[0].cell < volume.dims[0] - 1 ? plane : 0;
    const SOURCE *const p = linear + (at[0].cell * plane + at[1].cell * row + at[2].cell);
    return {p[0], p[x], p[y], p[y + x], p[z], p[z + x], p[z + y], p[z + y + x]};
}

#if LAYOUT == 1
// Binary logarithms of the voxels of a sector.
constexpr int SECTOR_X = sizeof(SOURCE) <= 2 ? 2 : 1, SECTOR_Y = sizeof(SOURCE) == 1 ? 2 : 1, SECTOR_Z = 1;

__device__ __forceinline__ INDEX in_brick_x(int x) {
    return (x >> SECTOR_X << 5) / static_cast<int>(sizeof(SOURCE)) + (x & ((1 << SECTOR_X) - 1));
}
__device__ __forceinline__ INDEX in_brick_y(int y, INDEX row) {
    return (y >> SECTOR_Y) * row + ((y & ((1 << SECTOR_Y) - 1)) << SECTOR_X);
}
__device__ __forceinline__ INDEX in_brick_z(int z, INDEX plane) {
    return (z >> SECTOR_Z) * plane + ((z & ((1 << SECTOR_Z) - 1)) << (SECTOR_X + SECTOR_Y));
}

__device__ __forceinline__ INDEX brick_row(const Volume &volume) {
    return in_brick_x((volume.dims[2] + (1 << SECTOR_X) - 1) >> SECTOR_X << SECTOR_X);
}
__device__ __forceinline__ INDEX brick_plane(const Volume &volume) {
    return ((volume.dims[1] + (1 << SECTOR_Y) - 1) >> SECTOR_Y) * brick_row(volume);
}

__device__ __forceinline__ Corners in_layout(const SOURCE *packed, const Axis *at, const Volume &volume) {
    const INDEX row = brick_row(volume), plane = brick_plane(volume);
    const INDEX x = in_brick_x(at[2].cell), right = in_brick_x(min(at[2].cell + 1, volume.dims[2] - 1));
    const INDEX y = in_brick_y(at[1].cell, row), below = in_brick_y(min(at[1].cell + 1, volume.dims[1] - 1), row);
    const INDEX z = in_brick_z(at[0].cell, plane), behind = in_brick_z(min(at[0].cell + 1, volume.dims[0] - 1), plane);
    return {packed[z + y + x],          packed[z + y + right],         packed[z + below + x],
            packed[z + below + right],  packed[behind + y + x],        packed[behind + y + right],
            packed[behind + below + x], packed[behind + below + right]};
}
#elif LAYOUT >= 2
// Four or eight voxels that lie together, read at once.
template <int N> struct Words;
template <> struct Words<1> { unsigned at[1]; };
template <> struct __align__(8) Words<2> { unsigned at[2]; };
template <> struct __align__(16) Words<4> { unsigned at[4]; };
template <> struct __align__(16) Words<8> { unsigned at[8]; };

template <int N> __device__ __forceinline__ Words<N> load_words(const void *p);
template <> __device__ __forceinline__ Words<1> load_words<1>(const void *p) {
    return {{*static_cast<const unsigned *>(p)}};
}
template <> __device__ __forceinline__ Words<2> load_words<2>(const void *p) {
    const uint2 v = *static_cast<const uint2 *>(p);
    return {{v.x, v.y}};
}
template <> __device__ __forceinline__ Words<4> load_words<4>(const void *p) {
    const uint4 v = *static_cast<const uint4 *>(p);
    return {{v.x, v.y, v.z, v.w}};
}
template <> __device__ __forceinline__ Words<8> load_words<8>(const void *p) {
    const uint4 v = static_cast<const uint4 *>(p)[0], w = static_cast<const uint4 *>(p)[1];
    return {{v.x, v.y, v.z, v.w, w.x, w.y, w.z, w.w}};
}

template <class T> struct Bits {
    static __device__ __forceinline__ T of(unsigned bits) { return static_cast<T>(bits); }
};
template <> struct Bits<float> {
    static __device__ __forceinline__ float of(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }
};
template <> struct Bits<half_bits> {
    static __device__ __forceinline__ half_bits of(unsigned bits) { return {static_cast<unsigned short>(bits)}; }
};

// Extract M voxels from N words.
template <int M, int N> __device__ __forceinline__ void unpack(const Words<N> &words, SOURCE *v) {
    constexpr int EACH = 4 / sizeof(SOURCE), WIDTH = 8 * sizeof(SOURCE);
#pragma unroll
    for (int k = 0; k < M; ++k) v[k] = Bits<SOURCE>::of(words.at[k / EACH] >> k % EACH * (WIDTH % 32));
}

#if LAYOUT == 2
constexpr int RUN = 8 / sizeof(SOURCE);  // quads along z in a sector

__device__ __forceinline__ INDEX quad_of(int z, int y, int x, const Volume &volume) {
    return ((z / RUN * static_cast<INDEX>(volume.dims[1]) + y) * volume.dims[2] + x) * RUN + z % RUN;
}
__device__ __forceinline__ Corners in_layout(const SOURCE *packed, const Axis *at, const Volume &volume) {
    const int z = at[0].cell, y = at[1].cell, x = at[2].cell, behind = min(z + 1, volume.dims[0] - 1);
    Corners all;
    unpack<4>(load_words<sizeof(SOURCE)>(packed + 4 * static_cast<int64>(quad_of(z, y, x, volume))), all.v);
    unpack<4>(load_words<sizeof(SOURCE)>(packed + 4 * static_cast<int64>(quad_of(behind, y, x, volume))), all.v + 4);
    return all;
}
#else
__device__ __forceinline__ Corners in_layout(const SOURCE *packed, const Axis *at, const Volume &volume) {
    const INDEX cell = (at[0].cell * static_cast<INDEX>(volume.dims[1]) + at[1].cell) * volume.dims[2] + at[2].cell;
    Corners all;
    unpack<8>(load_words<2 * sizeof(SOURCE)>(packed + 8 * static_cast<int64>(cell)), all.v);
    return all;
}
#endif
#endif

__device__ __forceinline__ float mix(float a, float b, float f) { return __fmaf_rn(f, b - a, a); }

__device__ __forceinline__ float trilinear(const float *v, const Axis *at) {
    const float near = mix(mix(v[0], v[1], at[2].f), mix(v[2], v[3], at[2].f), at[1].f);
    const float far = mix(mix(v[4], v[5], at[2].f), mix(v[6], v[7], at[2].f), at[1].f);
    return mix(near, far, at[0].f);
}

// Write the coordinates of the EACH × 32 samples from `begin` on, without those outside `first` to `end`. A warp writes
// them through shared memory: direct stores of three floats a lane would fill a third of each sector.
template <int EACH>
__device__ __forceinline__ void write_coords(float *coords, float *staged, const float (*u)[3], int64 begin,
                                             int64 first, int64 end, bool aligned) {
    const int lane = threadIdx.x % 32;
    if (aligned && begin >= first && begin + EACH * 32 <= end) {
#pragma unroll
        for (int k = 0; k < EACH; ++k)
#pragma unroll
            for (int a = 0; a < 3; ++a) staged[(32 * k + lane) * 3 + a] = u[k][2 - a];
        __syncwarp();
        float4 *const target = reinterpret_cast<float4 *>(coords + 3 * begin);
        for (int k = lane; k < EACH * 24; k += 32) __stcs(target + k, reinterpret_cast<const float4 *>(staged)[k]);
        __syncwarp();
        return;
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const int64 i = begin + 32 * k + lane;
        if (i < first || i >= end) continue;
#pragma unroll
        for (int a = 0; a < 3; ++a) __stcs(coords + 3 * i + a, u[k][2 - a]);
    }
}
