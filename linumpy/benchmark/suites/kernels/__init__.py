"""Suites of functions on arrays in memory, timed by CUDA events beside the same function of a peer."""
