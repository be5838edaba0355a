// Sample an image of any number of axes, on the grid of an affine map or at given coordinates, in double precision: for
// calls that points.cu and affine.cu do not support (one axis, maps that mix or change four and more axes, matrices
// that are not square). One thread for each sample; not tuned.
//
// Definitions: those of boundary.cuh, SOURCE, TARGET, RANK (of the image), AFFINE (1 for a map), OUT_RANK (of the
// grid), COORDINATE (float or double), THREADS (of a block), INDEX (int or int64, of the image). Never a shape.
#include "number.cuh"
#include "elements.cuh"
#include "boundary.cuh"

struct Request {
    int64 count;  // of samples
    double outside;
#if AFFINE
    double matrix[RANK][OUT_RANK], shift[RANK];
#endif
    int whole[RANK];  // voxels of the whole image
    int start[RANK];  // offset of the box in it
    int box[RANK];  // voxels of the box: the shape of the array
#if AFFINE
    int begin[OUT_RANK], shape[OUT_RANK];  // of the block in the whole output
#endif
};

// The voxels of a sample along one axis: their offsets in the box, or -1 for the value `outside`, and their weights.
struct Taps {
    INDEX offset[TAPS];
    double weight[TAPS];
};

template <int AXIS>
__device__ double sum_from(const SOURCE *__restrict__ data, const Taps *taps, INDEX at, bool there, double outside) {
    if constexpr (AXIS == RANK) {
        return there ? Widen<double, SOURCE>::of(data[at]) : outside;
    } else {
        double sum = 0;
        for (int k = 0; k < TAPS; ++k) {
            const INDEX offset = taps[AXIS].offset[k];
            const double inner =
                sum_from<AXIS + 1>(data, taps, at + (offset < 0 ? 0 : offset), there && offset >= 0, outside);
            sum = fused(taps[AXIS].weight[k], inner, sum);
        }
        return sum;
    }
}

// Sample at any point, by SciPy's rules: as `sample_edge` of sampling.cuh.
__device__ double sample(const SOURCE *__restrict__ data, const double *c, const Request &how) {
    Taps taps[RANK];
    INDEX step = 1;
    for (int a = RANK - 1; a >= 0; --a) {
        double at = c[a] + PAD;
        if (!bring_inside(at, how.whole[a]))
            return MODE == CONSTANT || MODE == GRID_CONSTANT ? how.outside
                                                             : static_cast<double>(__int_as_float(0x7FC00000));
        const double down = floor(IS_EVEN ? at + 0.5 : at);
        weigh(at - down, taps[a].weight);
        const int64 first = static_cast<int64>(down) - ORDER / 2;
        for (int k = 0; k < TAPS; ++k) {
            const int voxel = fold(first + k, how.whole[a]);
            const bool held = static_cast<unsigned>(voxel - how.start[a]) < static_cast<unsigned>(how.box[a]);
            taps[a].weight[k] *= voxel >= 0 && !held ? 0 : 1 / WEIGHTS;
            taps[a].offset[k] = voxel < 0 ? -1 : held ? (voxel - how.start[a]) * step : 0;
        }
        step *= how.box[a];
    }
    return sum_from<0>(data, taps, 0, true, how.outside);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_general(const SOURCE *__restrict__ data, const COORDINATE *__restrict__ coordinates,
                   TARGET *__restrict__ target, const Request how) {
    const int64 p = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (p >= how.count) return;
    double c[RANK];
#if AFFINE
    double voxel[OUT_RANK];
    int64 index = p;
    for (int b = OUT_RANK - 1; b >= 0; --b) {
        const int64 next = index / how.shape[b];
        voxel[b] = static_cast<double>(index - next * how.shape[b] + how.begin[b]);
        index = next;
    }
    for (int a = 0; a < RANK; ++a) {  // in SciPy's order of operations
        c[a] = how.shift[a];
        for (int b = 0; b < OUT_RANK; ++b) c[a] = __dadd_rn(c[a], __dmul_rn(voxel[b], how.matrix[a][b]));
    }
#else
    for (int a = 0; a < RANK; ++a) c[a] = coordinates[a * how.count + p];
#endif
    store(target + p, Narrow<TARGET, double>::of(sample(data, c, how)));
}
