// Correlate lines of an image with weights; beyond an end of a line its last voxel is repeated.
//
// Compiled for VALUE (float, double), never for an axis or a number of weights: cupyx.scipy.ndimage compiles each of these
// anew, for 2 seconds. Sums are in double precision, as SciPy's. A thread computes one voxel of (outer, size, inner),
// where the line is along `size`.

extern "C" __global__ void __launch_bounds__(256)
    correlate_lines(const VALUE *image, VALUE *out, const double *weights, int radius, long long size, long long inner,
                    long long count) {
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const long long position = at / inner % size, begin = at - position * inner;
    double sum = 0;
    for (int k = -radius; k <= radius; ++k) {
        long long from = position + k;
        from = from < 0 ? 0 : from >= size ? size - 1 : from;
        sum += weights[k + radius] * static_cast<double>(image[begin + from * inner]);
    }
    out[at] = static_cast<VALUE>(sum);
}
