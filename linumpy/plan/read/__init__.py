"""Plan reads: which bytes of which chunks are read, and where each of them lands."""
