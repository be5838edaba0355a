"""CUDA C++ sources of the fields, compiled at run time by :mod:`linumpy.gpu.kernels`."""
