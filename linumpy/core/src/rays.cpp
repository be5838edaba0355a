// Samples along rays on the host: the kernel of rays/cuda/trace.cu, compiled for one thread. Blocks run in the order of
// their rays, so that rays are in the order of their indices.
#define ONE_LANE
#include "one_lane.hpp"

#define THREADS 1
#define ORDERED 0
#define WEIGHTED 1
#define PER_SAMPLE 1
#define MOST_RUNS 512
#define MOST_POINTS (1 << 20)
#define NEWTON_STEPS 12
#define NUMBERS_PER_RAY 8
#define HEAD_WORDS 5
#define IMAGE_NBYTES sizeof(Image)
#define BATCH_NBYTES sizeof(Batch)

// A namespace for each set of definitions. `extern "C"` functions need names of their own, in all namespaces.
#define IMAGES 0
#define LENGTHS 0
#define CONE 0
#define trace trace_given
namespace one_lane::given {
#include "trace.cu"
}
#undef trace
#undef CONE
#define CONE 1
#define trace trace_given_growing
namespace one_lane::given_growing {
#include "trace.cu"
}
#undef IMAGES
#define IMAGES 1
#undef trace
#define trace trace_images_growing
namespace one_lane::images_growing {
#include "trace.cu"
}
#undef CONE
#define CONE 0
#undef trace
#define trace trace_images
namespace one_lane::images {
#include "trace.cu"
}
#undef LENGTHS
#define LENGTHS 1
#undef trace
#define trace trace_lengths
namespace one_lane::lengths {
#include "trace.cu"
}
#undef CONE
#define CONE 1
#undef trace
#define trace trace_lengths_growing
namespace one_lane::lengths_growing {
#include "trace.cu"
}
#undef trace

namespace {

template <class Batch> void run(void (*kernel)(Batch), const void *batch) {
    Batch copy;
    std::memcpy(static_cast<void *>(&copy), batch, sizeof copy);
    for (int ray = 0; ray < copy.n_rays; ++ray) {
        one_lane::blockIdx.x = static_cast<unsigned>(ray);
        kernel(copy);
    }
}

}  // namespace

extern "C" int64_t lc_trace_rays(int64_t images, int64_t grows, int64_t lengths, const void *batch, int64_t nbytes,
                                 int64_t image_nbytes) {
    using namespace one_lane;
    if (nbytes != sizeof(given::Batch) || image_nbytes != sizeof(given::Image)) return -1;
    if (!images && !grows) run(given::trace_given, batch);
    else if (!images) run(given_growing::trace_given_growing, batch);
    else if (!lengths && !grows) run(images::trace_images, batch);
    else if (!lengths) run(images_growing::trace_images_growing, batch);
    else if (!grows) run(lengths::trace_lengths, batch);
    else run(lengths_growing::trace_lengths_growing, batch);
    return 0;
}
