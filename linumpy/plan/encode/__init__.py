"""Plan the encoding of chunks on the device: its memory and its kernels."""
