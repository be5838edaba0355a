"""Pure planning of reads, decoding, encoding, resampling and pyramids: opens no file and imports no GPU package.

In: an :class:`~linumpy.plan.layout.ArrayLayout`, a region, a grid. Out: frozen records that can be printed and tested.
"""
