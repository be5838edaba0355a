"""What is timed: each module makes the cases of a suite for :mod:`linumpy.benchmark.runner`.

In: the name of a suite. Out: its :class:`~linumpy.benchmark.cases.Suite`. A suite is imported when it is chosen, so
that the list of suites needs none of their packages.
"""

import importlib

from linumpy.benchmark.cases import Suite

#: Line in the list of suites, by the name of the sub-command.
SUITES = {
    "read": "a Zarr array into GPU memory",
    "regions": "regions and crops of open arrays by one Reader",
    "stream": "batches of random crops",
    "resampling": "resampling of arrays",
    "resample-zarr": "resample_zarr on a volume on disk",
    "tissue": "work on tissue",
    "correction": "corrections of intensity",
    "scripts": "whole scripts on a mosaic",
    "remote": "arrays in object stores, from a server on this machine",
    "write": "encoding on the device, writing, conversion",
    "sampling": "samples of volumes in device memory",
    "paging": "samples of volumes on disk",
    "rays": "samples along rays",
    "voxel": "voxel operations by Warp",
    "fields": "values of fields that are no arrays",
}


def load_suite(name: str) -> Suite:
    """Import a suite."""
    module = "reading" if name == "read" else name.replace("-", "_")
    suite: Suite = importlib.import_module(f"{__name__}.{module}").SUITE
    return suite
