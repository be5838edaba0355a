"""Training batches streamed from Zarr: random crops of many arrays, decoded, augmented and batched on the device.

Batches are passed to PyTorch, JAX and CuPy through DLPack. Without a GPU the same classes give NumPy batches. Importing
this package imports no GPU package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from linumpy.stream.augment import Augment, Elastic
from linumpy.stream.batches.batch import Batch, BatchInfo, Tensor
from linumpy.stream.config import Config, Dtype, Part, Sample
from linumpy.stream.crops.histogram import Histogram
from linumpy.stream.crops.sampler import CropSampler, Volume
from linumpy.stream.crops.stitch import CropGrid, Stitcher
from linumpy.stream.errors import (
    DamacyError,
    DecodeError,
    DtypeMismatch,
    InvalidArgument,
    NativeCudaError,
    NotFound,
    OutOfMemory,
    RankMismatch,
    ShutdownError,
    Status,
    StorageError,
    StreamError,
    TryAgain,
    set_log_level,
)
from linumpy.stream.pipeline import Pipeline
from linumpy.stream.stats import Metric, Stats
from linumpy.stream.torch_dataset import torch_dataset

if TYPE_CHECKING:
    from linumpy.stream.inference import predict

__all__ = [
    "Augment",
    "Batch",
    "BatchInfo",
    "Config",
    "CropGrid",
    "CropSampler",
    "DamacyError",
    "DecodeError",
    "Dtype",
    "DtypeMismatch",
    "Elastic",
    "Histogram",
    "InvalidArgument",
    "Metric",
    "NativeCudaError",
    "NotFound",
    "OutOfMemory",
    "Part",
    "Pipeline",
    "RankMismatch",
    "Sample",
    "ShutdownError",
    "Stats",
    "Status",
    "Stitcher",
    "StorageError",
    "StreamError",
    "Tensor",
    "TryAgain",
    "Volume",
    "predict",
    "set_log_level",
    "torch_dataset",
]


if not TYPE_CHECKING:  # for type checkers a misspelt name is an error

    def __getattr__(name: str) -> object:
        if name != "predict":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from linumpy.stream.inference import predict  # only on use: it imports modules that training does not need

        return predict
