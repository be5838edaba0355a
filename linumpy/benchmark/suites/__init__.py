"""The suites of the benchmark: each module makes cases for :mod:`linumpy.benchmark.runner`.

In: the name of a suite. Out: a :class:`~linumpy.benchmark.cases.Suite`. A suite is imported when it is chosen, so that
the list of suites needs no packages of other suites. Suites of functions on arrays in memory are in ``kernels``.
"""

import importlib

from linumpy.benchmark.cases import Suite

#: Module and summary of each suite, by the name of its sub-command.
_MODULES = {
    "read": ("reading", "a Zarr array into GPU memory"),
    "regions": ("regions", "regions and crops of open arrays by one Reader"),
    "stream": ("stream", "batches of random crops"),
    "resampling": ("kernels.resampling", "resampling of arrays"),
    "resample-zarr": ("resample_zarr", "resample_zarr on a volume on disk"),
    "tissue": ("kernels.tissue", "work on tissue"),
    "correction": ("kernels.correction", "corrections of intensity"),
    "scripts": ("scripts", "whole scripts on a mosaic"),
    "remote": ("remote", "arrays in object stores, from a server on this machine"),
    "write": ("write", "encoding on the device, writing, conversion"),
    "sampling": ("kernels.sampling", "samples of volumes in device memory"),
    "paging": ("paging", "samples of volumes on disk"),
    "rays": ("kernels.rays", "samples along rays"),
    "voxel": ("kernels.voxel", "voxel operations by Warp"),
    "fields": ("kernels.fields", "values of fields that are not arrays"),
}
#: Summary of each suite, by the name of its sub-command.
SUITES = {name: summary for name, (_, summary) in _MODULES.items()}


def load_suite(name: str) -> Suite:
    """Import a suite."""
    suite: Suite = importlib.import_module(f"{__name__}.{_MODULES[name][0]}").SUITE
    return suite
