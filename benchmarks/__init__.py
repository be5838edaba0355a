"""Benchmarks of linumpy beside its peers and the limits of the hardware; they are not installed.

``python -m benchmarks SUITE`` in the root of a checkout, or ``linum-benchmark SUITE`` after ``pip install --editable``,
runs a suite; each module has one (``SUITE``). ``linumpy.benchmark.timing`` checks results, takes times and prints them.
"""
