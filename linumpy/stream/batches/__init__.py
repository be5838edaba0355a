"""Samples → batches: pulled, planned, submitted and assembled, in memory allocated once."""
