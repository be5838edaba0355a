"""Data types of zarr v3 that neither NumPy nor zarr-python has: bfloat16, and floats and integers of up to 8 bits.

They are data types of the package ml_dtypes. An element is stored in one byte (bfloat16: in two), as tensorstore and
zarrs do. Nothing is registered with zarr-python, which still refuses these types.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from zarr.core.dtype.common import HasItemSize
from zarr.core.metadata.v3 import ArrayV3Metadata
from zarr.dtype import ZDType

from linumpy.errors import SourceError

#: Names of the data types, the same in the registry zarr-extensions and in ml_dtypes.
NAMES = frozenset([
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "int2", "int4", "uint2",
    "uint4",
])  # fmt: skip


@dataclass(frozen=True)
class SmallType(ZDType[Any, Any], HasItemSize):
    """A data type of ml_dtypes, by its name."""

    name: str = "bfloat16"

    def to_native_dtype(self) -> np.dtype:
        """Return NumPy's dtype."""
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, self.name))

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return int(self.to_native_dtype().itemsize)

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype) -> Self:
        """Return the data type of a NumPy dtype that ml_dtypes has registered."""
        return cls(dtype.name)

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise NotImplementedError(f"{data}: zarr v2 has no such data type")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        return cls(data)

    def to_json(self, zarr_format: Any) -> Any:
        """Return the name in metadata."""
        return self.name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (int, float, np.generic))

    def cast_scalar(self, data: object) -> Any:
        """Return a number as an element of this type."""
        return np.asarray(data).astype(self.to_native_dtype())[()]

    def default_scalar(self) -> Any:
        """Return zero."""
        return self.cast_scalar(0)

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
        """Read a fill value: a number, ``"NaN"``, ``"Infinity"``, ``"-Infinity"``, or its bits, such as ``"0x7f"``."""
        if isinstance(data, str) and data.startswith("0x"):
            return np.array(int(data, 16), f"u{self.item_size}").view(self.to_native_dtype())[()]
        return self.cast_scalar(float(data))

    def to_json_scalar(self, data: object, *, zarr_format: Any) -> Any:
        """Write a fill value as its bits."""
        element = np.asarray(data, self.to_native_dtype())
        return f"0x{int(element.view(f'u{self.item_size}')):0{2 * self.item_size}x}"


def small_type_of(document: Mapping[str, Any]) -> str | None:
    """Return the data type in a metadata document of zarr v3 if it is one of :data:`NAMES`; otherwise None."""
    data_type = document.get("data_type")
    return data_type if isinstance(data_type, str) and data_type in NAMES else None


def metadata_of(document: Mapping[str, Any], data_type: str, name: str) -> ArrayV3Metadata:
    """Parse the metadata document of the array `name`, whose data type is one of :data:`NAMES`."""
    try:
        import ml_dtypes  # noqa: F401
    except ImportError as error:
        raise SourceError(
            f"{name!r} holds {data_type}, which NumPy has by the package ml_dtypes: pip install ml_dtypes"
        ) from error
    small = SmallType(data_type)
    if small.item_size > 1 and '"big"' in json.dumps(_chunk_codecs(document["codecs"])):
        raise SourceError(f"{name!r} holds {data_type} in big-endian order, which is not read")
    fill = small.from_json_scalar(document.get("fill_value") or 0, zarr_format=3)
    metadata = ArrayV3Metadata.from_dict({**document, "data_type": f"uint{8 * small.item_size}", "fill_value": 0})
    return dataclasses.replace(metadata, data_type=small, fill_value=fill)


def _chunk_codecs(codecs: Sequence[Any]) -> Sequence[Any]:
    """Return the codecs of chunks, or of the inner chunks of shards; without the codecs of a shard's index."""
    for codec in codecs:
        if isinstance(codec, Mapping) and codec.get("name") == "sharding_indexed":
            return _chunk_codecs(codec["configuration"]["codecs"])
    return codecs
