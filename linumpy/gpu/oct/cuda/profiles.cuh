// Derivatives along a smoothed line, for surface.cu.
//
// Compute the profile at N neighbouring voxels from z on, of the smoothed line value(z). Weights are symmetric or, for
// a derivative of odd order, antisymmetric: pairs of voxels are added or subtracted before they are weighted, so that a
// constant line gives exact zeros.
template <int N, class Value>
__device__ inline void profiles(Value value, const float *weights, int radius, bool odd, int z, float (&out)[N]) {
    float after[N], before[N];
    const float centre = weights[0];
#pragma unroll
    for (int d = 0; d < N; ++d) {
        after[d] = before[d] = value(z + d);
        out[d] = centre * after[d];
    }
    const float sign = odd ? -1.0f : 1.0f;
    int k0 = 1;
    // Both windows move on by one voxel with each k. Their values stay in registers, used as rings.
    for (; k0 + N - 1 <= radius; k0 += N) {
        float next[N], last[N];  // fetched before the first is used
#pragma unroll
        for (int j = 0; j < N; ++j) {
            next[j] = value(z + N - 1 + k0 + j);
            last[j] = value(z - k0 - j);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
            after[j] = next[j];
            before[N - 1 - j] = last[j];
            const float weight = weights[k0 + j];
#pragma unroll
            for (int d = 0; d < N; ++d)
                out[d] += weight * (after[(d + j + 1) % N] + sign * before[(d + N - 1 - j) % N]);
        }
    }
#pragma unroll
    for (int j = 0; j < N - 1; ++j) {
        if (k0 + j > radius) break;
        after[j] = value(z + N - 1 + k0 + j);
        before[N - 1 - j] = value(z - k0 - j);
        const float weight = weights[k0 + j];
#pragma unroll
        for (int d = 0; d < N; ++d) out[d] += weight * (after[(d + j + 1) % N] + sign * before[(d + N - 1 - j) % N]);
    }
}
