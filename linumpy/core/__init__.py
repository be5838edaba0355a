"""The native core: a small C++ library that reads, decodes and copies chunks without Python's lock."""
