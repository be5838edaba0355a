// Conversions of stored numbers to float, and SciPy's mode "reflect". linumpy.gpu.kernels inserts headers by name.
typedef long long int64;

#include "half.cuh"

template <class T> __device__ inline float as_float(T v) { return static_cast<float>(v); }

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

// SciPy's mode "reflect", ... b a | a b ... y z | z y ..., for any distance from the axis.
__device__ inline int reflected(int i, int n) {
    if (static_cast<unsigned>(i) < static_cast<unsigned>(n)) return i;
    const int period = 2 * n;
    i %= period;
    if (i < 0) i += period;
    return i < n ? i : period - 1 - i;
}
