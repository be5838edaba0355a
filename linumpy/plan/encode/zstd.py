"""Plan how chunks are encoded as zstd frames on the device. Pure.

In: number and size of the chunks, and a preset. Out: :class:`~linumpy.plan.encode.launches.EncodePlan`.
"""
