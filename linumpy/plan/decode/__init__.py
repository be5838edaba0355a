"""Plan the decoding of chunks: where it is done, the memory that it takes, the kernels that run."""
