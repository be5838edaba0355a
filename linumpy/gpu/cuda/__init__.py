"""CUDA C++ sources, compiled at run time by :mod:`linumpy.gpu.kernels`."""
