"""Plan reads: the region of an array, the chunks that it touches, and which backend reads them."""
