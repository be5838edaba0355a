"""CUDA C++ sources of samplers, compiled at run time by :mod:`linumpy.gpu.kernels`."""
