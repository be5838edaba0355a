"""Batches of reads of files into host memory, by threads of the C library."""
