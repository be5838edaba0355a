"""If this fails, the emulator lets a wrong kernel pass, or refuses a right one."""

import numpy as np
import pytest

from tests.support.gpu.emulator import Kernel, library, needs_compiler

pytestmark = needs_compiler

SOURCE = """
extern "C" __global__ void exchanges(unsigned *out) {
    const unsigned lane = threadIdx.x & 31, v = threadIdx.x * threadIdx.x;
    unsigned *to = out + 6 * threadIdx.x;
    to[0] = __shfl_sync(0xffffffffu, v, (lane + 5) & 31);
    to[1] = __shfl_up_sync(0xffffffffu, v, 3);
    to[2] = __shfl_xor_sync(0xffffffffu, v, 16);
    to[3] = __ballot_sync(0xffffffffu, v % 3 == 0);
    to[4] = __reduce_or_sync(0xffffffffu, v);
    to[5] = __syncthreads_or(threadIdx.x == 70);
}
extern "C" __global__ void neighbours(unsigned *out) {
    __shared__ unsigned all[64];
    all[threadIdx.x] = threadIdx.x;
    BARRIER
    out[threadIdx.x] = all[threadIdx.x ^ OTHER];
}
extern "C" __global__ void first_is_written_late(unsigned *out) {
    __shared__ unsigned one;
    if (threadIdx.x == 0) one = 1;
    __syncwarp();
    out[threadIdx.x] = one;
    __shfl_sync(0xffffffffu, 0, 0);
    if (threadIdx.x == 0) one = 2;
}
extern "C" __global__ void two_write(unsigned *out) {
    __shared__ unsigned one;
    one = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = one;
}
extern "C" __global__ void counts(unsigned *out) {
    __shared__ unsigned one;
    if (threadIdx.x == 0) one = 0;
    __syncthreads();
    atomicAdd(&one, 1u);
    __syncthreads();
    out[threadIdx.x] = one;
}
extern "C" __global__ void behind_its_memory(unsigned *out) {
    extern __shared__ unsigned some[];
    some[threadIdx.x] = 1;
}
extern "C" __global__ void never_written(unsigned *out) {
    __shared__ unsigned all[64];
    out[threadIdx.x] = all[threadIdx.x];
}
extern "C" __global__ void some_never_come(unsigned *out) {
    if (threadIdx.x < 40) __syncthreads();
}
extern "C" __global__ void lanes_part(unsigned *out) {
    if (threadIdx.x & 1) __syncwarp();
    else out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
}
extern "C" __global__ void a_warp_is_torn(unsigned *out) {
    if (threadIdx.x < 40) emulated::wait(1, 40, false);
}
"""
NAMES = tuple(word.partition("(")[0] for word in SOURCE.split("__global__ void ")[1:])


def run(name, threads=64, shared=0, seed=1, *, barrier="__syncthreads();", other=33, checked=True):
    text = SOURCE.replace("BARRIER", barrier).replace("OTHER", str(other))
    kernel = Kernel(getattr(library(text, (), NAMES, checked), f"emulate_{name}"))
    kernel.seed = seed
    out = np.zeros(6 * threads, np.uint32)
    kernel((1,), (threads,), (out,), shared_mem=shared)
    return out


def test_lanes_exchange_values():
    out = run("exchanges", 96).reshape(96, 6)
    v = np.arange(96, dtype=np.uint32) ** 2
    warps, lane = v.reshape(3, 32), np.arange(32)
    assert np.array_equal(out[:, 0], warps[:, (lane + 5) % 32].ravel())
    assert np.array_equal(out[:, 1], warps[:, np.where(lane < 3, lane, lane - 3)].ravel())
    assert np.array_equal(out[:, 2], warps[:, lane ^ 16].ravel())
    bits = [sum(1 << k for k in range(32) if row[k] % 3 == 0) for row in warps.tolist()]
    assert np.array_equal(out[:, 3], np.repeat(np.array(bits, np.uint32), 32))
    assert np.array_equal(out[:, 4], np.repeat(np.bitwise_or.reduce(warps, axis=1), 32))
    assert out[:, 5].all()


def test_barriers_and_atomics_order_shared_memory():
    assert np.array_equal(run("neighbours")[:64], np.arange(64) ^ 33)
    assert np.array_equal(run("neighbours", other=1, barrier="__syncwarp();")[:64], np.arange(64) ^ 1)
    assert (run("counts")[:64] == 64).all()
    assert not run("behind_its_memory", shared=256).any()


@pytest.mark.parametrize(
    ("name", "what", "options"),
    [
        ("neighbours", "race: shared memory is|that nobody wrote", {"barrier": ";"}),
        # Another warp's values are not ordered by a barrier of the warp, nor a warp's own by a vote.
        ("neighbours", "race: shared memory is|that nobody wrote", {"barrier": "__syncwarp();"}),
        ("neighbours", "race: shared memory is read while", {"barrier": "__ballot_sync(0xffffffffu, 1);", "other": 1}),
        ("first_is_written_late", "race: shared memory is written while it is read", {}),
        ("two_write", "race: two writes", {}),
        ("behind_its_memory", "behind what the launch has", {"shared": 252}),
        ("never_written", "nobody wrote", {}),
        ("some_never_come", "wait for others that are gone", {}),
        ("lanes_part", "different collectives", {}),
        ("a_warp_is_torn", "parts of warps", {}),
    ],
)
def test_a_wrong_kernel_is_found(name, what, options):
    for seed in (1, 2, 3):
        with pytest.raises(AssertionError, match=what):
            run(name, 32 if name == "first_is_written_late" else 64, seed=seed, **options)
    assert not run("behind_its_memory", shared=256).any(), "the emulator goes on after a kernel that stopped"


def test_without_checks_the_order_of_threads_shows_a_missing_barrier():
    expected = np.arange(64) ^ 33
    for seed in range(8):
        assert np.array_equal(run("neighbours", seed=seed, checked=False)[:64], expected)
        assert not np.array_equal(run("neighbours", seed=seed, checked=False, barrier=";")[:64], expected)
