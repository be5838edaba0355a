"""Plan, read, make and write the blocks of a resampled image."""
