"""Time linumpy beside its peers and the limits of the hardware: ``linum-benchmark SUITE``.

``cases`` has the records that suites make, and says how to add a suite; ``runner`` checks a result, then times the
calls; ``command`` has the command and its options; ``report`` makes the table, the JSON document and the plot;
``machine`` describes the hardware, and drops files from the page cache; ``data`` makes voxels and images; ``suites``
has the cases, and ``shared`` what several suites use. Every module can be imported without a GPU.
"""
