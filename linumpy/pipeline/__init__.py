"""All stages of a brain, from mosaic grids to one volume, resumable, here or on a cluster."""
