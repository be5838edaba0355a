// Volume rendering of samples along rays, and its gradient: a warp for each ray, a lane for each of 32 samples.
//
// With the optical depth tau = sigma * dt of a sample, and the transmittance T before it, its weight is
// T (1 - exp(-tau)).
#include "number.cuh"

constexpr unsigned ALL = 0xFFFFFFFFu;
constexpr int WARP = 32;

__device__ inline float sum_up_to(float value, int lane) {
    for (int by = 1; by < WARP; by *= 2) {
        const float other = __shfl_up_sync(ALL, value, by);
        if (lane >= by) value += other;
    }
    return value;
}
__device__ inline float sum_of_all(float value) {
    for (int by = WARP / 2; by; by /= 2) value += __shfl_xor_sync(ALL, value, by);
    return value;
}

struct Sample {
    float4 color;
    float step, after, weight;  // after: transmittance after the sample
};

// The sample of a lane; adds the optical depth of all 32 samples to `depth`.
__device__ inline Sample next_sample(const float4 *rgb_sigma, const float *dt, int64 at, bool exists, int lane,
                                     float &depth) {
    Sample s;
    s.color = {0.0f, 0.0f, 0.0f, 0.0f};
    s.step = 0.0f;
    if (exists) s.color = rgb_sigma[at], s.step = dt[at];
    const float tau = s.color.w * s.step, sum = sum_up_to(tau, lane);
    const float sum_before = __shfl_up_sync(ALL, sum, 1);  // not sum - tau, which cancels for an opaque sample
    const float before = expf(-(depth + (lane ? sum_before : 0.0f)));
    s.after = expf(-(depth + sum));
    s.weight = -expm1f(-tau) * before;
    depth += __shfl_sync(ALL, sum, WARP - 1);
    return s;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    composite(const float4 *__restrict__ rgb_sigma, const float *__restrict__ dt, const int64 *__restrict__ base,
              const int *__restrict__ n_steps, float4 *__restrict__ rgba, int64 n_rays) {
    const int lane = threadIdx.x % WARP;
    const int64 ray = (static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x) / WARP;
    if (ray >= n_rays) return;
    const int count = n_steps[ray];
    const int64 first = base[ray];
    float depth = 0.0f, r = 0.0f, g = 0.0f, b = 0.0f;
    for (int n = lane; n - lane < count; n += WARP) {
        const Sample s = next_sample(rgb_sigma, dt, first + n, n < count, lane, depth);
        r += s.weight * s.color.x, g += s.weight * s.color.y, b += s.weight * s.color.z;
    }
    r = sum_of_all(r), g = sum_of_all(g), b = sum_of_all(b);
    if (lane == 0) {
        float4 result;
        result.x = r, result.y = g, result.z = b, result.w = -expm1f(-depth);
        rgba[ray] = result;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    composite_backward(const float4 *__restrict__ rgb_sigma, const float *__restrict__ dt,
                       const int64 *__restrict__ base, const int *__restrict__ n_steps, const float4 *__restrict__ rgba,
                       const float4 *__restrict__ grad_rgba, float4 *__restrict__ grad, int64 n_rays) {
    const int lane = threadIdx.x % WARP;
    const int64 ray = (static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x) / WARP;
    if (ray >= n_rays) return;
    const int count = n_steps[ray];
    const int64 first = base[ray];
    if (count == 0) return;
    const float4 result = rgba[ray], to = grad_rgba[ray];
    // `remaining`: contribution of the remaining samples to the loss; `through`: of the light behind the ray.
    float remaining = result.x * to.x + result.y * to.y + result.z * to.z, depth = 0.0f;
    const float through = (1.0f - result.w) * to.w;
    for (int n = lane; n - lane < count; n += WARP) {
        const Sample s = next_sample(rgb_sigma, dt, first + n, n < count, lane, depth);
        const float shown = s.color.x * to.x + s.color.y * to.y + s.color.z * to.z;
        const float up_to = sum_up_to(s.weight * shown, lane);
        float4 gradient;
        gradient.x = s.weight * to.x, gradient.y = s.weight * to.y, gradient.z = s.weight * to.z;
        gradient.w = s.step * (s.after * shown - (remaining - up_to) + through);
        if (n < count) grad[first + n] = gradient;
        remaining -= __shfl_sync(ALL, up_to, WARP - 1);
    }
}
