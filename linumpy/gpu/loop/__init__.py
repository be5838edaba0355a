"""The one thread of a reader: requests of many jobs, carried out slab by slab."""
