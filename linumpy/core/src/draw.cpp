// Coordinates of random points on the host: the kernels of sampling/cuda/draw.cu, compiled for one thread.
#define ONE_LANE
#include "one_lane.hpp"

#define THREADS 1

namespace one_lane::points {
#include "draw.cu"
}  // namespace one_lane::points

extern "C" int64_t lc_draw_points(float *coords, const int64_t *ids, const uint64_t *cumulative, const int64_t *starts,
                                  int64_t begin, int64_t count, const void *draw, const void *boxes) {
    using namespace one_lane::points;
    const auto cells = reinterpret_cast<const int64 *>(ids), first = reinterpret_cast<const int64 *>(starts);
    const auto sums = reinterpret_cast<const uint64 *>(cumulative);
    Draw method = {};
    Boxes window = {};
    if (draw) std::memcpy(static_cast<void *>(&method), draw, sizeof method);
    if (boxes) std::memcpy(static_cast<void *>(&window), boxes, sizeof window);
    else method.first += begin;
    for (int64_t i = 0; i < count; ++i) {
        one_lane::blockIdx.x = static_cast<unsigned>(i);
        if (!boxes) one_lane::points::draw(coords, cells, sums, method);
        else if (draw) draw_in_parts(coords, cells, sums, first, begin, method, window);
        else draw_boxes(coords, first, begin, count, window);
    }
    return 0;
}
