"""What is timed: each module makes the cases of one suite for :mod:`linumpy.benchmark.runner`."""
