"""If this fails, encoded images are timed that are wrong, or streams that other readers decode to something else."""

import numpy as np
import pytest

from linumpy.benchmark.command import run
from linumpy.benchmark.runner import Settings
from linumpy.benchmark.suites import write
from linumpy.gpu.codecs.encode import Encoded
from linumpy.io.codecs import host_encoder
from linumpy.write.writer import OmeZarrWriter

CHUNKS = {(work.codec, work.chunk) for work in write._ENCODE}


@pytest.fixture(autouse=True)
def small(request, monkeypatch):
    if "scale" in request.fixturenames:
        return
    monkeypatch.setattr(write, "_SHAPE", (64, 128, 64))
    monkeypatch.setattr(write, "_WRITE", tuple(write.Write("zstd", s, "") for s in (None, (64, 128, 64))))


def measure(folder):
    with write.write_cases(folder=folder, scale=1, use_gpu=False) as (where, cases):
        return run(cases, Settings(1), None, where)


def verdicts(results):
    return [{entry.name: entry.verdict for entry in result.entries} for result in results]


def test_a_small_run(tmp_path):
    *results, converted, halved = measure(tmp_path)
    assert verdicts((converted, halved)) == [{"linumpy": "ok"}] * 2
    assert [{name: each[name] for name in ("write", "flat", "zarr")} for each in verdicts(results)] == [
        dict.fromkeys(("write", "flat", "zarr"), "ok")
    ] * 2
    assert {each["tensorstore"] for each in verdicts(results)} <= {"ok", "not installed"}
    assert all(entry.note.startswith("ratio") for result in results for entry in result.entries[:1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scale", [0.01, 0.1, 0.13, 0.3, 0.7, 0.99, 1])
def test_chunks_of_a_volume_of_any_scale(scale):
    """Each chunk to encode is whole: cut in pieces, the voxels are the same as chunk by chunk."""
    shape = write._shape(scale)
    assert scale < 1 or shape == write._SHAPE
    for _, chunk in CHUNKS:
        assert all(size and size % part == 0 for size, part in zip(shape, chunk, strict=True)), (shape, chunk)
    voxels = np.arange(128**3, dtype=np.uint16).reshape(128, 128, 128)
    rows = write._rows(voxels, (64, 128, 128))
    assert [row.tobytes() for row in rows] == [voxels[:64].tobytes(), voxels[64:].tobytes()]


def test_other_voxels_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(OmeZarrWriter, "__setitem__", lambda self, at, block: self.write(at, np.roll(block, 1)))
    *written, converted, halved = verdicts(measure(tmp_path))
    assert [each["write"] for each in written] == ["WRONG", "WRONG"]
    assert converted == halved == {"linumpy": "WRONG"}


@pytest.mark.parametrize(("change", "expected"), [(None, ""), ("byte", "decoded to other bytes"), ("size", "ratio")])
def test_streams_are_decoded(tmp_path, monkeypatch, change, expected):
    voxels = write._voxels((64, 128, 64))
    encode = host_encoder(write.parse_codec("zstd", 2))

    def encode_chunks(rows, encoding):
        streams = [bytes(encode(row)) for row in rows]
        if change == "byte":
            streams[0] = bytes(encode(rows[1]))
        if change == "size":
            streams = [bytes(write.numcodecs.Zstd(level=-50).encode(row)) for row in rows]
        sizes = [len(stream) for stream in streams]
        return Encoded(np.frombuffer(b"".join(streams), np.uint8), np.cumsum([0, *sizes]))

    monkeypatch.setattr("linumpy.gpu.codecs.encode.encode_chunks", encode_chunks)
    case = write._encode_case(write.Encode("zstd", (32, 32, 32), 8), voxels, voxels, tmp_path, 1)
    with case.entries[0].prepare() as prepared:
        found = prepared.check(prepared.call())
    assert expected in found if expected else found == ""
