"""What is timed: each module makes the cases of a suite for :mod:`linumpy.benchmark.runner`."""

from linumpy.benchmark.suites import (
    fields,
    paging,
    rays,
    reading,
    regions,
    resample_zarr,
    resampling,
    sampling,
    scripts,
    stream,
    tissue,
    voxel,
)  # fmt: skip

_MODULES = (reading, regions, stream, resampling, resample_zarr, tissue, scripts, sampling, paging, rays, voxel, fields)
#: By the name of the sub-command.
SUITES = {module.SUITE.name: module.SUITE for module in _MODULES}
