"""Time linumpy beside its peers and beside what the hardware allows.

``runner`` checks a result, then times it, and says how a suite is added; ``command`` is what the commands share;
``report`` makes the table, the JSON document and the plot; ``kernels`` makes cases of functions in memory; ``data``
and ``volumes`` make voxels and images; ``machine`` and ``cache`` look at what it runs on. The cases are in ``suites``.
Every module imports without a GPU.
"""
