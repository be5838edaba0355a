"""Write the .nvdb files of vdb.zip, and warp.npz: points and what Warp 1.19 samples there on a CPU."""

import numpy as np
import warp as wp

TILES = [[0, 0, 0], [8, 0, 0], [0, 8, 8], [120, 0, 16], [-8, -8, 0], [-16, 0, -8], [128, 8, 0], [160, 24, 40]]


@wp.kernel
def fill_float(volume: wp.uint64, v: wp.array(dtype=wp.vec3i), f: wp.array(dtype=float)):
    i = wp.tid()
    wp.volume_store_f(volume, v[i][0], v[i][1], v[i][2], f[i])


@wp.kernel
def fill_vector(volume: wp.uint64, v: wp.array(dtype=wp.vec3i), f: wp.array(dtype=wp.vec3)):
    i = wp.tid()
    wp.volume_store_v(volume, v[i][0], v[i][1], v[i][2], f[i])


@wp.kernel
def fill_int(volume: wp.uint64, v: wp.array(dtype=wp.vec3i), f: wp.array(dtype=int)):
    i = wp.tid()
    wp.volume_store_i(volume, v[i][0], v[i][1], v[i][2], f[i])


@wp.kernel
def sample_float(volume: wp.uint64, p: wp.array(dtype=wp.vec3), o: wp.array(dtype=float)):
    i = wp.tid()
    o[i] = wp.volume_sample_f(volume, p[i], wp.Volume.LINEAR)


@wp.kernel
def sample_vector(volume: wp.uint64, p: wp.array(dtype=wp.vec3), o: wp.array(dtype=wp.vec3)):
    i = wp.tid()
    o[i] = wp.volume_sample_v(volume, p[i], wp.Volume.LINEAR)


@wp.kernel
def look_up_int(volume: wp.uint64, p: wp.array(dtype=wp.vec3i), o: wp.array(dtype=int)):
    i = wp.tid()
    o[i] = wp.volume_lookup_i(volume, p[i][0], p[i][1], p[i][2])


CASES = {
    "float": (1.5, float, fill_float, sample_float),
    "vec3f": (wp.vec3(1.0, 2.0, 3.0), wp.vec3, fill_vector, sample_vector),
    "int32": (7, int, fill_int, look_up_int),
}


def main():
    rng = np.random.default_rng(5)
    truth = {}
    for name, (background, dtype, fill, sample) in CASES.items():
        tiles = wp.array(np.array(TILES, np.int32), dtype=wp.vec3i, device="cpu")
        volume = wp.Volume.allocate_by_tiles(tiles, voxel_size=0.5, bg_value=background, device="cpu")
        voxels = volume.get_voxels().numpy()
        shape = (len(voxels), 3) if name == "vec3f" else len(voxels)
        values = np.round(rng.standard_normal(shape), 1).astype(np.float32)
        if name == "int32":
            values = rng.integers(-1000, 1000, shape).astype(np.int32)
        held = wp.array(voxels, dtype=wp.vec3i, device="cpu"), wp.array(values, dtype=dtype, device="cpu")
        wp.launch(fill, len(voxels), [volume.id, *held], device="cpu")
        volume.save_to_nvdb(f"warp_{name}.nvdb", "zip")
        low, high = voxels.min(0), voxels.max(0)
        anywhere = low + rng.random((500, 3)) * (high - low)
        near = voxels[rng.integers(0, len(voxels), 500)] + rng.random((500, 3))
        points = np.clip(np.concatenate([anywhere, near]), low, high).astype(np.float32)
        if name == "int32":
            points = np.round(points).astype(np.int32)
        out = wp.zeros(len(points), dtype=dtype, device="cpu")
        at = wp.array(points, dtype=wp.vec3i if name == "int32" else wp.vec3, device="cpu")
        wp.launch(sample, len(points), [volume.id, at, out], device="cpu")
        truth |= {f"{name}_points": points, f"{name}_values": out.numpy(), f"{name}_box": np.array([low, high])}
    np.savez_compressed("warp.npz", **truth)


if __name__ == "__main__":
    main()
