"""Time linumpy beside its peers and the limits of the hardware: ``linum-benchmark SUITE``.

``cases`` has the records that suites make, and says how to add a suite; ``runner`` checks a result, then times it;
``command`` has the command and its options; ``report`` makes the table, the JSON document and the plot; ``machine``
describes the hardware, and empties the page cache; ``data`` makes voxels and images. Every module imports without a
GPU.
"""
