"""Devices in host memory, and compilers of kernels."""
