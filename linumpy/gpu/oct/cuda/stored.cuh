// Conversions between the type of a voxel and ACC (float or double), the type of computation. Include after number.cuh.
__device__ inline ACC number(half_bits v) { return as_float(v); }
template <class T> __device__ inline ACC number(T v) { return static_cast<ACC>(v); }

// Integers are rounded half to even.
template <class T> struct Stored {
    static __device__ T of(ACC v) { return static_cast<T>(rint(v)); }
};
template <> struct Stored<float> {
    static __device__ float of(ACC v) { return static_cast<float>(v); }
};
template <> struct Stored<double> {
    static __device__ double of(ACC v) { return static_cast<double>(v); }
};
template <> struct Stored<half_bits> {
    static __device__ half_bits of(ACC v) { return as_half(v); }
};
