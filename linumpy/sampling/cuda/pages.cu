// Values of a volume, some pages of which are in device memory, at given points or at points that the kernel draws.
//
// Definitions: those of volume.cuh, with LAYOUT 0; DRAW (1: the kernel draws the points, but does not write their
// coordinates).
#include "number.cuh"
#include "elements.cuh"
#include "philox.cuh"
#include "volume.cuh"

constexpr int THREADS = 256, GROUPS = 4;

struct Pages {
    int64 slot;      // voxels of a slot in all channels
    int64 channel;   // voxels of a slot in one channel
    int64 values;    // number of samples: stride of a channel of `values`
    int page[3];     // voxels of a page along z, y and x
    int pages[3];    // number of pages of the volume
    int begin[3];    // first cell that is sampled
    int end[3];      // last cell that is sampled + 1
};
static_assert(sizeof(Pages) == 72, "linumpy.sampling.paging.pages writes 72 bytes");

// Mark the pages that contain the cells of points; marks: a byte for each page.
extern "C" __global__ void __launch_bounds__(THREADS)
    mark(const float *__restrict__ coords, unsigned char *__restrict__ marks, const Volume volume, const Pages pages) {
    const int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= volume.count) return;
    int64 page = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a)
        page = page * pages.pages[a] + along(coords[3 * i + 2 - a], volume.dims[a]).cell / pages.page[a];
    marks[page] = 1;
}

// Write the values of the points whose cells lie between `begin` and `end`: only the pages of these cells, and the next
// pages along each axis, are in memory. table: the slot of each page.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_pages(const SOURCE *__restrict__ slots, const int *__restrict__ table, const float *__restrict__ coords,
                 float *__restrict__ values, const Volume volume, const Pages pages) {
#pragma unroll 1
    for (int k = 0; k < GROUPS; ++k) {
        const int64 i = (static_cast<int64>(blockIdx.x) * GROUPS + k) * THREADS + threadIdx.x;
        if (i >= volume.count) return;
#if DRAW
        const uint4 words = numbers(volume.first + i, USE_IID, 0, volume.key);
        const float u[3] = {coordinate(words.z >> 8), coordinate(words.y >> 8), coordinate(words.x >> 8)};
#else
        const float u[3] = {coords[3 * i + 2], coords[3 * i + 1], coords[3 * i]};
#endif
        Axis at[3];
        bool is_sampled = true;
#pragma unroll
        for (int a = 0; a < 3; ++a) {
            at[a] = along(u[a], volume.dims[a]);
            is_sampled = is_sampled && at[a].cell >= pages.begin[a] && at[a].cell < pages.end[a];
        }
        if (!is_sampled) continue;
        // Pages of the voxels before and behind the point along each axis, and the offsets of the voxels in them.
        int page[3][2], local[3][2];
        bool in_one_page = true;
#pragma unroll
        for (int a = 0; a < 3; ++a) {
            page[a][0] = at[a].cell / pages.page[a];
            local[a][0] = at[a].cell - page[a][0] * pages.page[a];
            const bool last = at[a].cell == volume.dims[a] - 1, beyond = !last && local[a][0] + 1 == pages.page[a];
            page[a][1] = page[a][0] + beyond;
            local[a][1] = beyond ? 0 : local[a][0] + !last;
            in_one_page = in_one_page && !beyond;
        }
        const SOURCE *corner[8];
        const SOURCE *base = nullptr;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const int z = c >> 2, y = c >> 1 & 1, x = c & 1;
            if (c == 0 || !in_one_page)
                base =
                    slots +
                    pages.slot * table[(static_cast<int64>(page[0][z]) * pages.pages[1] + page[1][y]) * pages.pages[2] +
                                       page[2][x]];
            corner[c] =
                base + (static_cast<int64>(local[0][z]) * pages.page[1] + local[1][y]) * pages.page[2] + local[2][x];
        }
        for (int channel = 0; channel < volume.channels; ++channel) {
            float v[8];
#pragma unroll
            for (int c = 0; c < 8; ++c) v[c] = as_value(corner[c][channel * pages.channel], volume);
            store(values + channel * pages.values + i, trilinear(v, at));
        }
    }
}
