"""Planning a read, purely: no file is opened here and no GPU package imported.

In: an :class:`~linumpy.plan.layout.ArrayLayout` and a region. Out: a :class:`~linumpy.plan.read.plan.ReadPlan` and,
from it, the pieces of chunks to read, the slabs they travel in, and the tables that say where each piece lands.
"""
