"""If this fails, MONAI or nnU-Net get other voxels, spacing or places than an image has.

Both need PyTorch: where they are not installed, the few names that the adapters use are stood in for.
"""

import importlib
import importlib.util
import pickle
import sys
import types

import numpy as np
import pytest

from linumpy.io.ome import open_image
from linumpy.write.writer import write_omezarr

SHAPE = (12, 20, 18)


def image(path, shape=SHAPE, axes=None, **options):
    values = np.random.default_rng(0).integers(0, 60_000, shape).astype("u2")
    write_omezarr(path, values, (10, 6, 5)[-min(3, len(shape)) :], axes=axes, **options)
    return values


def modules(monkeypatch, **contents):
    """Stand in for modules; ``a__b`` is ``a.b``."""
    for name, names in contents.items():
        module = types.ModuleType(name.replace("__", "."))
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def read_zarrd(monkeypatch):
    if importlib.util.find_spec("monai") is None:

        class MapTransform:
            def __init__(self, keys, allow_missing_keys=False):
                self.keys, self.allow_missing_keys = (
                    (keys,) if isinstance(keys, str) else tuple(keys),
                    allow_missing_keys,
                )

            def key_iterator(self, data):
                for key in self.keys:
                    if key in data:
                        yield key
                    elif not self.allow_missing_keys:
                        raise KeyError(key)

        class MetaTensor:
            def __init__(self, values, affine, meta):
                self.values, self.affine, self.meta = values, affine, meta
                self.shape, self.dtype = values.shape, values.dtype

            def numpy(self):
                return self.values

        modules(
            monkeypatch,
            monai={},
            monai__config={"KeysCollection": object},
            monai__data={"MetaTensor": MetaTensor},
            monai__transforms={"MapTransform": MapTransform},
        )
    monkeypatch.delitem(sys.modules, "linumpy.interop.monai", raising=False)
    yield importlib.import_module("linumpy.interop.monai").ReadZarrd
    sys.modules.pop("linumpy.interop.monai", None)


def test_monai_reads_regions_with_their_place(tmp_path, read_zarrd):
    values = image(tmp_path / "a", (2, *SHAPE), "czyx", origin=(1000, -200, 35))
    labels = image(tmp_path / "b")
    read = read_zarrd(["image", "label"], allow_missing_keys=True)
    item = read({"image": tmp_path / "a", "label": str(tmp_path / "b"), "region": np.s_[2:8, :, 3:9], "name": "x"})
    np.testing.assert_array_equal(item["image"].numpy(), values[:, 2:8, :, 3:9])
    np.testing.assert_array_equal(item["label"].numpy(), labels[None, 2:8, :, 3:9])
    assert item["name"] == "x"
    assert str(item["image"].dtype).endswith("float32")
    corner = np.asarray(item["image"].affine) @ (0, 0, 0, 1)  # of the voxel (2, 0, 3), x first
    np.testing.assert_allclose(corner, (0.035 + 3 * 0.005, -0.2, 1.0 + 2 * 0.010, 1), atol=1e-7)
    other = np.asarray(item["image"].affine) @ (1, 2, 3, 1) - corner  # along z, y, x
    np.testing.assert_allclose(other, (3 * 0.005, 2 * 0.006, 0.010, 0), atol=1e-7)
    (whole,) = read({"image": tmp_path / "a"}).values()
    np.testing.assert_array_equal(whole.numpy(), values)
    with pytest.raises(KeyError):
        read_zarrd("image")({})
    image(tmp_path / "t", (3, *SHAPE), "tzyx")
    with pytest.raises(ValueError, match="time="):
        read({"image": tmp_path / "t"})


def test_monai_reads_sections(tmp_path, read_zarrd):
    values = image(tmp_path / "a", SHAPE[1:], origin=(-200, 35))
    section = read_zarrd("image", level=0, dtype="u1")({"image": tmp_path / "a", "region": np.s_[4:, 5:7]})["image"]
    np.testing.assert_array_equal(section.numpy(), values[None, 4:, 5:7].astype("u1"))
    found = np.asarray(section.affine)
    corner = (found @ (0, 0, 0, 1))[:2] if found.shape == (4, 4) else (found @ (0, 0, 1))[:2]
    np.testing.assert_allclose(corner, (0.035 + 5 * 0.005, -0.2 + 4 * 0.006), atol=1e-7)


@pytest.fixture
def nnunet(monkeypatch):
    if importlib.util.find_spec("nnunetv2") is None:
        modules(
            monkeypatch,
            nnunetv2={},
            nnunetv2__imageio={},
            nnunetv2__imageio__reader_writer_registry={"LIST_OF_IO_CLASSES": []},
            nnunetv2__imageio__base_reader_writer={"BaseReaderWriter": type("BaseReaderWriter", (), {})},
        )
        package = sys.modules["nnunetv2.imageio"]
        package.reader_writer_registry = sys.modules["nnunetv2.imageio.reader_writer_registry"]
    monkeypatch.delitem(sys.modules, "linumpy.interop.nnunet", raising=False)
    yield importlib.import_module("linumpy.interop.nnunet")
    sys.modules.pop("linumpy.interop.nnunet", None)


def test_nnunet_reads_channels_and_writes_labels_at_the_place_of_the_image(tmp_path, nnunet):
    values = image(tmp_path / "a_0000.ozx", (2, *SHAPE), "czyx", origin=(1000, -200, 35))
    third = image(tmp_path / "a_0001.ozx")
    io = nnunet.OmeZarrIO()
    found, properties = io.read_images([str(tmp_path / "a_0000.ozx"), str(tmp_path / "a_0001.ozx")])
    np.testing.assert_array_equal(found, np.concatenate([values, third[None]]))
    assert found.dtype == np.float32
    np.testing.assert_allclose(properties["spacing"], (0.010, 0.006, 0.005))
    labels = (third % 3).astype("i8")
    io.write_seg(labels, str(tmp_path / "seg.ozx"), pickle.loads(pickle.dumps(properties)))
    written = open_image(tmp_path / "seg.ozx")
    assert (written.spacing[0], written.origin[0]) == ((10, 6, 5), (1000, -200, 35))
    assert written.levels[0].dtype == np.uint8
    again, _ = io.read_seg(str(tmp_path / "seg.ozx"))
    np.testing.assert_array_equal(again, labels[None])
    image(tmp_path / "b.ozx", (12, 20, 17))
    with pytest.raises(ValueError, match="same case"):
        io.read_images([str(tmp_path / "a_0001.ozx"), str(tmp_path / "b.ozx")])
    image(tmp_path / "t.ozx", (3, *SHAPE), "tzyx")
    with pytest.raises(ValueError, match="3 times"):
        io.read_images([str(tmp_path / "t.ozx")])


def test_nnunet_reads_sections_and_finds_the_reader(tmp_path, nnunet):
    values = image(tmp_path / "a.ozx", SHAPE[1:])
    io = nnunet.OmeZarrIO()
    found, properties = io.read_images([str(tmp_path / "a.ozx")])
    np.testing.assert_array_equal(found, values[None, None])
    np.testing.assert_allclose(properties["spacing"], (999, 0.006, 0.005))
    io.write_seg(values[None] % 700, str(tmp_path / "seg.ozx"), properties)
    written = open_image(tmp_path / "seg.ozx")
    np.testing.assert_array_equal(written.levels[0][...], values % 700)
    assert written.levels[0].dtype == np.uint16
    registry = sys.modules["nnunetv2.imageio.reader_writer_registry"]
    assert nnunet.OmeZarrIO in registry.LIST_OF_IO_CLASSES
    if hasattr(registry, "determine_reader_writer_from_dataset_json"):
        for json in ({"file_ending": ".ozx"}, {"file_ending": ".x", "overwrite_image_reader_writer": "OmeZarrIO"}):
            assert registry.determine_reader_writer_from_dataset_json(json) is nnunet.OmeZarrIO
