"""Small images with faults of known truth, and what ``linumpy.verify`` tells of them.

``python -m tests.support.mutated_images COUNT SEED`` prints tables of what is found and what is missed. What a fault
does to the voxels is told by zarr-python and NumPy.
"""

import dataclasses
import itertools
import json
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import zarr
from scipy import ndimage

import linumpy
from linumpy.errors import LinumpyError
from tests.support.stores import Case, write

BLOSC_LZ4, BLOSC_ZSTD = ("blosc", ("lz4", 1, 2, 0)), ("blosc", ("zstd", 2, 4, 0))
CODECS = {  # group, format, codecs, whether in shards
    "raw 2": ("raw", 2, (), False),
    "raw 3": ("raw", 3, (), False),
    "crc32c": ("checksum", 3, ("crc32c",), False),
    "zstd checksum 2": ("checksum", 2, (("zstd", 3, True),), False),
    "zstd checksum 3": ("checksum", 3, (("zstd", 3, True),), False),
    "gzip 2": ("checksum", 2, ("gzip",), False),
    "gzip 3": ("checksum", 3, ("gzip",), False),
    "zstd crc32c": ("checksum", 3, ("zstd", "crc32c"), False),
    "zstd 2": ("coded", 2, ("zstd",), False),
    "zstd 3": ("coded", 3, ("zstd",), False),
    "lz4 2": ("coded", 2, ("lz4",), False),
    "lz4 3": ("coded", 3, ("lz4",), False),
    "blosc lz4 2": ("coded", 2, (BLOSC_LZ4,), False),
    "blosc zstd 3": ("coded", 3, (BLOSC_ZSTD,), False),
    "shards": ("shards raw", 3, (), True),
    "shards crc32c": ("shards coded", 3, ("crc32c",), True),
    "shards zstd": ("shards coded", 3, ("zstd",), True),
    "shards blosc": ("shards coded", 3, (BLOSC_LZ4,), True),
}
GROUPS = ("raw", "checksum", "coded", "shards raw", "shards coded")
#: Voxels along all axes from which on smooth content tells where a level lies.
MIN_LENGTH = 16
METADATA = ("zarr.json", ".zattrs", ".zarray", ".zgroup", ".zmetadata")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """An image on disk; `method`: how levels were made; `rounding`: of means."""

    folder: Path
    group: str
    case: Case
    method: str
    rounding: int
    is_label: bool
    levels: list
    scale: list
    translation: list

    def grid(self, level):
        """Files by their coordinates in the grid of stored objects."""
        array = zarr.open_array(self.folder / str(level), mode="r")
        counts = [-(-n // c) for n, c in zip(array.shape, array.shards or array.chunks, strict=True)]
        keys = {i: self.folder / str(level) / array.metadata.encode_chunk_key(i) for i in np.ndindex(*counts)}
        return {index: file for index, file in keys.items() if file.exists()}

    def edit(self, change, level=None):
        """Change the document of a level, or the multiscale metadata, in place by a function."""
        v2 = self.case.zarr_format == 2
        name = "zarr.json" if not v2 else ".zattrs" if level is None else ".zarray"
        file = self.folder / ("" if level is None else str(level)) / name
        document = json.loads(file.read_text())
        attributes = document if v2 else document["attributes"].get("ome")
        change(document if level is not None else attributes["multiscales"][0])
        file.write_text(json.dumps(document))

    def rewrite(self, level, values):
        """Write other voxels, all chunks of them."""
        shutil.rmtree(self.folder / str(level))
        case = dataclasses.replace(self.case, shape=values.shape)
        write(case, self.folder / str(level), values.astype(self.case.dtype))


def content(rng, shape, dtype, kind):
    """Return smooth voxels with noise; of tissue in an empty background; or ids of labels."""
    smooth = ndimage.gaussian_filter(rng.normal(size=shape), 1.3)
    smooth /= abs(smooth).max()
    if kind == "labels":
        return (rng.permutation(200)[np.digitize(smooth, np.linspace(-0.7, 0.7, 9))] + 1).astype(dtype)
    voxels = 110 + 60 * smooth + rng.normal(0, 4, shape)
    if kind == "tissue":
        far = np.indices(shape).T / shape - rng.uniform(0.3, 0.6, 3)
        voxels = np.where(np.linalg.norm(far, axis=-1).T < 0.4, voxels, 0)
    return (voxels * (1 if np.dtype(dtype).itemsize == 1 else 37.3)).astype(dtype)


def parts(fine):
    """Return the eight voxels of each whole window of 2 x 2 x 2, along a first axis."""
    fine = fine[tuple(slice(n // 2 * 2) for n in fine.shape)]
    return np.stack([fine[a::2, b::2, c::2] for a, b, c in np.ndindex(2, 2, 2)])


def coarser(fine, method, rounding):
    """Return the coarser level."""
    if method == "stride":
        return parts(fine)[0]
    values = fine.astype(np.float64)
    if method == "smooth":
        values = ndimage.gaussian_filter(values, 0.8)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = parts(values).mean(axis=0)
        if fine.dtype.kind == "f":
            return mean.astype(fine.dtype)
        return (np.rint(mean), np.floor(mean + 0.5), np.trunc(mean))[rounding].astype(fine.dtype)


def dataset(path, scale, translation):
    """Return the metadata of a level."""
    steps = {"scale": list(scale), "translation": list(translation)}
    return {"path": str(path), "coordinateTransformations": [{"type": key, key: steps[key]} for key in steps]}


def make(folder, seed, codec=None):
    """Write an image of a kind that depends on the seed."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(GROUPS)
    of_group = [name for name, kind in CODECS.items() if kind[0] == chosen]
    group, zarr_format, codecs, in_shards = CODECS[codec or rng.choice(of_group)]
    kind = rng.choice(["smooth", "tissue", "tissue", "labels"])
    method = "stride" if kind == "labels" else rng.choice(["mean", "mean", "stride", "smooth"])
    dtype = "u2" if kind == "labels" else rng.choice(["u1", "u2", "f4"])
    shape = tuple(map(int, rng.integers(24, 37) + rng.integers(0, 5, 3)))
    chunks = tuple(map(int, rng.choice([8, 11, 16], 3)))
    case = Case(
        shape=shape, chunks=chunks, shards=tuple(2 * c for c in chunks) if in_shards else None, dtype=str(dtype),
        zarr_format=zarr_format, big_endian=bool(rng.integers(2)), order=(0, 1, 2), separator="/", v2_keys=False,
        index_at_end=bool(rng.integers(2)), fill=0, missing=0, region=(), seed=0, codecs=codecs,
    )  # fmt: skip
    rounding, levels = int(rng.integers(3)), [content(rng, shape, dtype, kind)]
    spacing, origin, offset = rng.uniform(1, 9, 3), rng.uniform(-50, 50, 3), 0 if method == "stride" else 0.5
    scale, translation = [spacing.tolist()], [origin.tolist()]
    for _ in range(int(rng.integers(1, 3))):
        levels.append(coarser(levels[-1], method, rounding))
        translation.append((np.array(translation[-1]) + offset * np.array(scale[-1])).tolist())
        scale.append((2 * np.array(scale[-1])).tolist())
    datasets = [dataset(n, scale[n], translation[n]) for n in range(len(levels))]
    axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    version = {"version": "0.4" if zarr_format == 2 else "0.5"}
    multiscale = {"axes": axes, "datasets": datasets} | (version if zarr_format == 2 else {})
    ome = {"multiscales": [multiscale]} | ({"image-label": version} if kind == "labels" else {})
    ome = ome if zarr_format == 2 else {"ome": ome | version}
    zarr.create_group(folder, zarr_format=zarr_format, attributes=ome)
    sparse = bool(rng.integers(2))
    for number, values in enumerate(levels):
        array = write(dataclasses.replace(case, shape=values.shape), folder / str(number), values)
        for index in np.ndindex(*array.cdata_shape) if sparse and not in_shards else ():
            if not array.blocks[index].any():  # writers leave out empty chunks
                (folder / str(number) / array.metadata.encode_chunk_key(index)).unlink()
    return Made(
        folder=folder, group=group, case=case, method=str(method), rounding=rounding, is_label=kind == "labels",
        levels=levels, scale=scale, translation=translation,
    )  # fmt: skip


def _flip(rng, stored, start, stop):
    """Flip one bit of a part of an object."""
    changed = bytearray(stored)
    changed[int(rng.integers(start, stop))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def _parts_of(made, stored):
    """Return the bounds of the chunks, and of the index, in a stored object."""
    size, index = len(stored), 8 * 16 + 4 if made.case.shards else 0
    return ((0, size - index), (size - index, size)) if made.case.index_at_end else ((index, size), (0, index))


#: Mutations of one stored object; `other` is another one.
BYTES = {
    "bit of a chunk": lambda rng, made, stored, other: _flip(rng, stored, *_parts_of(made, stored)[0]),
    "bit of an index": lambda rng, made, stored, other: (
        _flip(rng, stored, *_parts_of(made, stored)[1]) if made.case.shards else stored
    ),
    "cut": lambda rng, made, stored, other: stored[: rng.integers(len(stored))],
    "extended": lambda rng, made, stored, other: stored + rng.bytes(int(rng.integers(1, 40))),
    "bytes of 0": lambda rng, made, stored, other: bytes(len(stored)),
    "replaced": lambda rng, made, stored, other: other,
    "swapped": lambda rng, made, stored, other: other,
}
#: Which objects are removed, of one with the coordinates `at`.
MISSING = {
    "missing": lambda index, at: index == at,
    "plane missing": lambda index, at: index[0] == at[0],
    "tile missing": lambda index, at: index[1:] == at[1:],
    "tail missing": lambda index, at: index >= at,
}


def _changed_voxel(rng, voxels):
    at = tuple(map(int, rng.integers(voxels.shape)))
    voxels[at] = 101 if voxels[at] < 50 else voxels[at] // 2
    return voxels


#: Valid chunks with other voxels.
CHUNKS = {"chunk of zeros": lambda rng, voxels: voxels * 0, "one voxel": _changed_voxel}


def _moved(rng, values, by, order):
    step = by * np.eye(3)[rng.integers(3)] * rng.choice([-1, 1])
    return ndimage.shift(values.astype(np.float64), step, order=order, mode="nearest")


#: Other voxels of a level, of those of it and of the finer one.
VOXELS = {
    "voxels by 1": lambda rng, made, values, finer: _moved(rng, values, 1, 0),
    "voxels by 1/2": lambda rng, made, values, finer: values if made.is_label else _moved(rng, values, 0.5, 1),
    "other image": lambda rng, made, values, finer: content(
        rng, values.shape, made.case.dtype, "labels" if made.is_label else "smooth"
    ),
    "labels averaged": lambda rng, made, values, finer: coarser(finer, "mean", 0) if made.is_label else values,
}
#: Other positions of a level.
PLACES = {
    "place by 1 or 2": lambda rng, axis, scale: scale * axis * int(rng.integers(1, 3)),
    "place by 1/2": lambda rng, axis, scale: scale * axis / 2,
}
DOCUMENTS = ("bit of metadata", "wrong shape", "wrong scale", "exchanged levels", "stale consolidated")
MUTATIONS = (*BYTES, *MISSING, *CHUNKS, *VOXELS, *PLACES, *DOCUMENTS)


def mutate(name, rng, made):
    """Mutate an image; return the paths that a finding should name, or none if there is nothing to mutate."""
    coarse = int(rng.integers(1, len(made.levels)))
    if name in VOXELS:
        made.rewrite(coarse, VOXELS[name](rng, made, made.levels[coarse], made.levels[coarse - 1]))
        return [made.folder / str(coarse)]
    if name in (*PLACES, *DOCUMENTS):
        return _mutate_metadata(name, rng, made, coarse)
    level = int(rng.integers(len(made.levels)))
    grid = made.grid(level)
    at, other = (tuple(map(int, index)) for index in rng.choice(list(grid), 2))
    file, stored = grid[at], grid[at].read_bytes()
    if name in BYTES:
        file.write_bytes(BYTES[name](rng, made, stored, grid[other].read_bytes()))
        if name == "swapped":
            grid[other].write_bytes(stored)
        return [file, grid[other]] if name == "swapped" else [file] * (file.read_bytes() != stored)
    if name in CHUNKS:
        array = zarr.open_array(made.folder / str(level), mode="r+", config={"write_empty_chunks": True})
        box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, array.shards or array.chunks, strict=True))
        array[box] = CHUNKS[name](rng, array[box])
        return [file]
    files = [one for index, one in grid.items() if MISSING[name](index, at)]
    for one in files:
        one.unlink()
    return files


def _mutate_metadata(name, rng, made, coarse):
    folder, axis = made.folder / str(coarse), int(rng.integers(3))
    if name == "bit of metadata":
        file = rng.choice(sorted(f for f in made.folder.rglob("*") if f.name in METADATA))
        file.write_bytes(_flip(rng, file.read_bytes(), 0, file.stat().st_size))
        return [file, file.parent]
    if name == "wrong shape":
        by = int(rng.choice([-3, -2, 2, 3, 8]))
        made.edit(lambda document: document["shape"].__setitem__(axis, document["shape"][axis] + by), coarse)
    elif name == "exchanged levels":
        finer, kept = made.folder / str(coarse - 1), made.folder / "kept"
        for a, b in ((finer, kept), (folder, finer), (kept, folder)):
            a.rename(b)
        return [finer, folder]
    elif name == "stale consolidated":
        zarr.consolidate_metadata(zarr.storage.LocalStore(made.folder))
        made.edit(lambda document: document.update(fill_value=7), coarse)
        return [folder, made.folder, made.folder / ".zmetadata", made.folder / "zarr.json"]
    else:
        scale, translation = np.array(made.scale[coarse]), np.array(made.translation[coarse])
        if name == "wrong scale":
            scale *= rng.choice([0.5, 1.5, 2, 4])
        else:
            translation += rng.choice([-1, 1]) * PLACES[name](rng, np.eye(3)[axis], scale)
        made.edit(lambda multiscale: multiscale["datasets"].__setitem__(coarse, dataset(coarse, scale, translation)))
    return [folder]


def decoded(folder, count):
    """Return the documents of the tree, and the voxels of the levels or what zarr-python raises."""
    found = []
    try:
        attributes = zarr.open_group(folder, mode="r", use_consolidated=False).attrs.asdict()
    except Exception as error:
        attributes = error
    for level in range(count):
        try:
            found.append(zarr.open_array(folder / str(level), mode="r")[...])
        except Exception as error:
            found.append(error)
    return attributes, found


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def who_can_tell(name, made, before, paths):
    """Return what shows the fault: "", "nothing", "thorough", "level" or "decoder"; "" if no voxel has changed."""
    attributes, levels = decoded(made.folder, len(made.levels))
    if any(isinstance(one, Exception) for one in (attributes, *levels)):
        return "decoder"
    equal = all(map(same, levels, made.levels))
    if name in (*VOXELS, *PLACES, *DOCUMENTS[1:]):
        # A shift between few voxels of smooth content is not told from chance.
        is_small = min(levels[int(paths[0].name)].shape) < MIN_LENGTH
        by_shift = name in VOXELS or (name in PLACES and made.method == "smooth")
        return "" if equal and name in VOXELS else "nothing" if is_small and by_shift else "level"
    if equal:
        return "" if attributes == before else "nothing"
    told = "nothing"
    for fine, coarse in itertools.pairwise(levels) if made.method != "smooth" else ():
        expected = coarser(fine, made.method, made.rounding)
        if expected.shape != coarse.shape:
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            error = 3e-5 * np.maximum(abs(expected), abs(coarse)) if coarse.dtype.kind == "f" else 0
            differ = ~(abs(expected.astype(float) - coarse) <= error) & (expected != coarse)
        if ndimage.minimum_filter(differ, 4, mode="constant").any():
            return "level"
        told = "thorough" if differ.any() else told
    return told


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was found: `state` is found, beside, equal, limit, MISSED or CRASH; `proposed`: the right place."""

    state: str
    told: str = ""
    proposed: bool = True
    text: str = ""


def verified(made, told, paths, *, thorough):
    """Verify a mutated image; a fault of one chunk is found where it or a chunk of the other level is named."""
    try:
        result = linumpy.verify(made.folder, thorough=thorough, device="cpu", progress=int)
    except (LinumpyError, FileNotFoundError) as error:
        try:
            zarr.open_group(made.folder, mode="r", use_consolidated=False)
        except Exception:
            return Outcome(state="found")
        return Outcome(state="CRASH", text=repr(error))
    except Exception as error:
        return Outcome(state="CRASH", text=repr(error))
    named = {made.folder / finding.path for finding in result.findings}
    near = {one.relative_to(made.folder).parts[:1] for one in (*paths, made.folder)}
    near |= {(str(int(part[0]) + by),) for part in near if part and part[0].isdecimal() for by in (-1, 1)}
    if not any(one.relative_to(made.folder).parts[:1] in near for one in named):
        must = told in ("decoder", "level") or (thorough and told == "thorough")
        return Outcome(state="equal" if not told else "MISSED" if must else "limit", told=told, text=str(named))
    proposed = len(result.proposals) == 1 and all(
        np.allclose(one.translation, made.translation[one.level], atol=0.2 * made.scale[one.level][0], rtol=0)
        if made.method == "smooth" else np.allclose(one.translation, made.translation[one.level])
        for one in result.proposals
    )  # fmt: skip
    text = " | ".join(f"{one.harm} {one.path}: {one.what}" for one in result.findings[:4])
    return Outcome(state="found" if named & set(paths) else "beside", told=told, proposed=proposed, text=text)


def outcomes(count, seed, each=40):
    """Yield number, image, name of the mutation, thorough, outcome; for each image first those without a mutation."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as root:
        for number in range(count):
            rng = np.random.default_rng([seed, number])
            if number % each == 0:
                shutil.rmtree(Path(root) / "i", ignore_errors=True)
                original = make(Path(root) / "i", [seed, number])
                before = zarr.open_group(original.folder, mode="r").attrs.asdict()
                for thorough in (False, True):
                    yield number, original, "none", thorough, verified(original, "", [], thorough=thorough)
            made = dataclasses.replace(original, folder=Path(root) / "m")
            shutil.rmtree(made.folder, ignore_errors=True)
            shutil.copytree(original.folder, made.folder)
            name = MUTATIONS[int(rng.integers(len(MUTATIONS)))]
            paths = mutate(name, rng, made)
            if not paths:
                continue
            told = who_can_tell(name, made, before, paths)
            for thorough in (False, True):
                yield number, made, name, thorough, verified(made, told, paths, thorough=thorough)


def main(count, seed):
    """Print the tables; misses, crashes and false alarms are printed at once."""
    counts, began, states = Counter(), time.monotonic(), ("found", "beside", "equal", "limit", "MISSED", "CRASH")
    for number, made, name, thorough, outcome in outcomes(count, seed):
        counts[thorough, name, made.group, outcome.state] += 1
        wrong = name in PLACES and not outcome.proposed and outcome.told == "level"
        counts["proposals"] += wrong
        if outcome.state in ("MISSED", "CRASH") or wrong or (name == "none" and outcome.state != "equal"):
            kind = f"{made.method} {made.case.dtype} {made.group} {made.case.codecs} thorough={thorough}"
            print(f"[{seed}, {number}] {name}, {kind}: {outcome}", flush=True)
    for thorough in (False, True):
        print(f"\nthorough={thorough}: " + "/".join(states))
        print(f"{'':18}" + "".join(f"{group:>24}" for group in GROUPS))
        for name in ("none", *MUTATIONS):
            cells = ["/".join(str(counts[thorough, name, group, state]) for state in states) for group in GROUPS]
            print(f"{name:18}" + "".join(f"{cell:>24}" for cell in cells))
    print(f"wrong proposals: {counts['proposals']}; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
