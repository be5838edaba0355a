"""Plan the decoding of chunks: on the device or the host, its memory and its kernels."""
