"""CUDA sources of :mod:`linumpy.rays`."""
