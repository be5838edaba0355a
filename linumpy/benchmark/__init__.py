"""``linum-benchmark read``: reading a Zarr array into GPU memory, beside zarr's GPU mode and others.

``timing`` is the helper of all benchmarks; those that are not installed are in ``benchmarks`` of the source.
"""
