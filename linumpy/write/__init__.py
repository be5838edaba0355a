"""Write OME-Zarr images from host or device memory: complete, or not there at all."""
