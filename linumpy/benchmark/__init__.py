"""Time linumpy beside its peers and beside what the hardware allows: ``linum-benchmark SUITE``.

``cases`` are the records that suites make, and how a suite is added; ``runner`` checks a result, then times it;
``command`` has the one command and its options; ``report`` makes the table, the JSON document and the plot; ``machine``
describes what it ran on, and empties the page cache; ``data`` makes voxels and images. Every module imports without a
GPU.
"""
