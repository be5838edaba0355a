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

    def objects(self, level):
        """Files of the chunks, or of the shards, of a level."""
        return sorted(f for f in (self.folder / str(level)).rglob("*") if f.is_file() and f.name not in METADATA)

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
    smooth = ndimage.gaussian_filter(rng.normal(size=shape), 2)
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


def make(folder, seed, codec=None):
    """Write an image of a kind that depends on the seed."""
    rng = np.random.default_rng(seed)
    group, zarr_format, codecs, in_shards = CODECS[codec or rng.choice(list(CODECS))]
    kind = rng.choice(["smooth", "tissue", "tissue", "labels"])
    method = "stride" if kind == "labels" else rng.choice(["mean", "mean", "stride", "smooth"])
    dtype = "u2" if kind == "labels" else rng.choice(["u1", "u2", "f4"])
    shape = tuple(map(int, rng.integers(24, 37) + rng.integers(0, 5, 3)))
    chunks = tuple(map(int, rng.choice([6, 8, 11, 16], 3)))
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
    datasets = [
        {"path": str(n), "coordinateTransformations": [
            {"type": "scale", "scale": scale[n]}, {"type": "translation", "translation": translation[n]}]}
        for n in range(len(levels))
    ]  # fmt: skip
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


def flip(rng, file, start=0, stop=None):
    """Flip one bit of a file."""
    stored = bytearray(file.read_bytes())
    stored[int(rng.integers(start, stop or len(stored)))] ^= 1 << int(rng.integers(8))
    file.write_bytes(stored)
    return [file]


def _index_nbytes(made):
    return 8 * 16 + 4 if made.case.shards else 0


def flip_chunk(rng, made, file):
    nbytes, size = _index_nbytes(made), file.stat().st_size
    return flip(rng, file, *((0, size - nbytes) if made.case.index_at_end else (nbytes, size)))


def flip_index(rng, made, file):
    nbytes, size = _index_nbytes(made), file.stat().st_size
    return nbytes and flip(rng, file, *((size - nbytes, size) if made.case.index_at_end else (0, nbytes)))


def flip_metadata(rng, made, file):
    return flip(rng, rng.choice(sorted(f for f in made.folder.rglob("*") if f.name in METADATA)))


def remove(rng, made, file):
    return file.unlink() or [file]


def cut(rng, made, file):
    return file.write_bytes(file.read_bytes()[: int(rng.integers(file.stat().st_size))]) and [file]


def extend(rng, made, file):
    return file.write_bytes(file.read_bytes() + rng.bytes(int(rng.integers(1, 40)))) and [file]


def zero_bytes(rng, made, file):
    return file.write_bytes(bytes(file.stat().st_size)) and [file]


def swap(rng, made, file):
    other = rng.choice(made.objects(file.relative_to(made.folder).parts[0]))
    first, second = file.read_bytes(), other.read_bytes()
    file.write_bytes(second)
    other.write_bytes(first)
    return [file, other]


def replace(rng, made, file):
    other = rng.choice(made.objects(file.relative_to(made.folder).parts[0]))
    return file.write_bytes(other.read_bytes()) and [file]


def _array(made, file):
    """Open the array of a file for writing; return it and the box of the file."""
    level = int(file.relative_to(made.folder).parts[0])
    array = zarr.open_array(made.folder / str(level), mode="r+", config={"write_empty_chunks": True})
    index = next(i for i, f in made.grid(level).items() if f == file)
    return array, tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, array.shards or array.chunks, strict=True))


def zero_chunk(rng, made, file):
    array, box = _array(made, file)
    array[box] = 0
    return [file]


def change_voxel(rng, made, file):
    array, box = _array(made, file)
    voxels = array[box]
    at = tuple(int(rng.integers(n)) for n in voxels.shape)
    voxels[at] = 101 if voxels[at] < 50 else voxels[at] // 2
    array[box] = voxels
    return [file]


def _remove_where(made, level, chosen):
    files = [file for index, file in made.grid(level).items() if chosen(index)]
    for file in files:
        file.unlink()
    return files


def remove_plane(rng, made, file):
    axis, level = int(rng.integers(3)), int(rng.integers(len(made.levels)))
    number = int(rng.choice([index[axis] for index in made.grid(level)]))
    return _remove_where(made, level, lambda index: index[axis] == number)


def remove_tile(rng, made, file):
    level = int(rng.integers(len(made.levels)))
    tile = rng.choice(list(made.grid(level)))[1:]
    return _remove_where(made, level, lambda index: index[1:] == tuple(tile))


def remove_tail(rng, made, file):
    level = int(rng.integers(len(made.levels)))
    first = tuple(rng.choice(list(made.grid(level))))
    return _remove_where(made, level, lambda index: index >= first)


def _coarse_level(rng, made):
    return int(rng.integers(1, len(made.levels)))


def _dataset(made, level, key, change):
    def edit(multiscale):
        number = ("scale", "translation").index(key)
        step = multiscale["datasets"][level]["coordinateTransformations"][number]
        step[key] = change(np.array(step[key])).tolist()

    made.edit(edit)
    return [made.folder / str(level)]


def _shift_metadata(rng, made, voxels):
    level, axis = _coarse_level(rng, made), int(rng.integers(3))
    by = np.eye(3)[axis] * rng.choice([-1, 1]) * voxels * made.scale[level]
    return _dataset(made, level, "translation", lambda old: old + by)


def shift_whole(rng, made, file):
    return _shift_metadata(rng, made, int(rng.integers(1, 3)))


def shift_half(rng, made, file):
    return _shift_metadata(rng, made, 0.5)


def shift_voxels(rng, made, file):
    level, axis = _coarse_level(rng, made), int(rng.integers(3))
    made.rewrite(level, ndimage.shift(made.levels[level], np.eye(3)[axis] * rng.choice([-1, 1]), order=0, mode="nearest"))
    return [made.folder / str(level)]


def shift_voxels_half(rng, made, file):
    level, axis = _coarse_level(rng, made), int(rng.integers(3))
    values = made.levels[level].astype(np.float64)
    if made.is_label:
        return None
    made.rewrite(level, ndimage.shift(values, np.eye(3)[axis] * 0.5, order=1, mode="nearest"))
    return [made.folder / str(level)]


def wrong_shape(rng, made, file):
    level, axis = _coarse_level(rng, made), int(rng.integers(3))
    by = int(rng.choice([-3, -2, 2, 3, 8]))

    def edit(document):
        document["shape"][axis] += by

    made.edit(edit, level)
    return [made.folder / str(level)]


def wrong_scale(rng, made, file):
    factor = rng.choice([0.5, 1.5, 2, 4])
    return _dataset(made, _coarse_level(rng, made), "scale", lambda old: old * factor)


def exchange_levels(rng, made, file):
    level, kept = _coarse_level(rng, made), made.folder / "kept"
    first, second = made.folder / str(level - 1), made.folder / str(level)
    for a, b in ((first, kept), (second, first), (kept, second)):
        a.rename(b)
    return [first, second]


def other_image(rng, made, file):
    level = _coarse_level(rng, made)
    kind = "labels" if made.is_label else "smooth"
    made.rewrite(level, content(rng, made.levels[level].shape, made.case.dtype, kind))
    return [made.folder / str(level)]


def average_labels(rng, made, file):
    level = _coarse_level(rng, made)
    return made.is_label and (made.rewrite(level, coarser(made.levels[level - 1], "mean", 0)) or [made.folder / str(level)])


def stale(rng, made, file):
    zarr.consolidate_metadata(zarr.storage.LocalStore(made.folder))
    level = int(rng.integers(len(made.levels)))
    document = made.folder / str(level) / ("zarr.json" if made.case.zarr_format == 3 else ".zarray")
    document.write_text(document.read_text().replace('"fill_value": 0', '"fill_value": 7'))
    return [made.folder, made.folder / str(level)]


CHUNKS = (flip_chunk, flip_index, remove, cut, extend, zero_bytes, zero_chunk, swap, replace, change_voxel,
          remove_plane, remove_tile, remove_tail)  # fmt: skip
MIN_LENGTH = 16
PLACED = (shift_whole, shift_half)
VOXELS = (shift_voxels, shift_voxels_half, other_image, average_labels)
LEVELS = (*PLACED, shift_voxels, shift_voxels_half, wrong_shape, wrong_scale, exchange_levels, other_image,
          average_labels, stale)  # fmt: skip
MUTATIONS = {one.__name__: one for one in (*CHUNKS, flip_metadata, *LEVELS)}


def decoded(folder, count):
    """Return the documents of the tree, and the voxels of the levels or what zarr-python raises."""
    found = []
    try:
        attributes = zarr.open_group(folder, mode="r", use_consolidated=False).attrs.asdict()
    except Exception as error:  # noqa: BLE001  # of any library that decodes
        attributes = error
    for level in range(count):
        try:
            found.append(zarr.open_array(folder / str(level), mode="r")[...])
        except Exception as error:  # noqa: BLE001
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
    mutation, by_shift = MUTATIONS.get(name), made.method == "smooth"
    if mutation in LEVELS:
        if equal and mutation in VOXELS:
            return ""
        # A shift between few voxels of smooth content is not told from chance.
        is_small = min(levels[int(paths[0].name)].shape) < MIN_LENGTH if paths[0] != made.folder else False
        return "nothing" if is_small and (mutation in VOXELS or (mutation in PLACED and by_shift)) else "level"
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
        except Exception:  # noqa: BLE001
            return Outcome(state="found")
        return Outcome(state="CRASH", text=repr(error))
    except Exception as error:  # noqa: BLE001
        return Outcome(state="CRASH", text=repr(error))
    named = {made.folder / finding.path for finding in result.findings}
    if not named:
        must = told in ("decoder", "level") or (thorough and told == "thorough")
        return Outcome(state="equal" if not told else "MISSED" if must else "limit", told=told)
    proposed = len(result.proposals) == 1 and all(
        np.allclose(one.translation, made.translation[one.level], atol=0.2 * made.scale[one.level][0], rtol=0)
        if made.method == "smooth" else np.allclose(one.translation, made.translation[one.level])
        for one in result.proposals
    )  # fmt: skip
    text = " | ".join(f"{one.harm} {one.path}: {one.what}" for one in result.findings[:4])
    return Outcome(state="found" if named & set(paths) else "beside", told=told, proposed=proposed, text=text)


def outcomes(count, seed, each=20):
    """Yield number, image, name of the mutation, thorough, outcome; for each image first those without a mutation."""
    warnings.simplefilter("ignore")
    names = list(MUTATIONS)
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
            level = int(rng.integers(len(made.levels)))
            name = names[int(rng.integers(len(names)))]
            paths = MUTATIONS[name](rng, made, rng.choice(made.objects(level)))
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
        wrong = MUTATIONS.get(name) in PLACED and not outcome.proposed and outcome.told == "level"
        counts["proposals"] += wrong
        if outcome.state in ("MISSED", "CRASH") or wrong or (name == "none" and outcome.state != "equal"):
            print(f"[{seed}, {number}] {name} {made.method} {made.case.dtype} {made.group} {made.case.codecs} thorough={thorough}: {outcome}", flush=True)  # fmt: skip
    for thorough in (False, True):
        print(f"\nthorough={thorough}: " + "/".join(states))
        print(f"{'':18}" + "".join(f"{group:>24}" for group in GROUPS))
        for name in ("none", *MUTATIONS):
            cells = ["/".join(str(counts[thorough, name, group, state]) for state in states) for group in GROUPS]
            print(f"{name:18}" + "".join(f"{cell:>24}" for cell in cells))
    print(f"wrong proposals: {counts['proposals']}; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
