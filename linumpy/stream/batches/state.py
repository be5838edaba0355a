"""The state from which a pipeline resumes: a dict of integers and a list of integers, checked when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from linumpy.stream.arguments import integer
from linumpy.stream.config import WORD, Config
from linumpy.stream.errors import ArgumentTypeError, InvalidArgument

_VERSION = 2
#: Entries that must be equal in the state and in the pipeline that loads it.
_EQUAL_ENTRIES = ("version", "seed", "epoch", "rank", "world_size", "batch_size")


class Progress(NamedTuple):
    """How many batches and samples were popped."""

    batch_id: int = 0  # number of the next batch
    position: int = 0  # position, among all samples that were pushed, after the last sample that was popped


def state_of(config: Config, progress: Progress, epochs: Sequence[int]) -> dict[str, object]:
    """Return the state of a pipeline; `epochs` are the first epochs of the samplers that were pushed."""
    return {
        "version": _VERSION, "position": progress.position, "batch_id": progress.batch_id, "seed": config.seed,
        "epoch": config.epoch, "rank": config.rank, "world_size": config.world_size,
        "batch_size": config.batch_size, "epochs": list(epochs),
    }  # fmt: skip


def progress_and_epochs(state: Mapping[str, object], config: Config) -> tuple[Progress, list[int]]:
    """Check a state, and return its progress and its epochs."""
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(f"state must be what state_dict() returned (got {type(state).__name__})")
    expected = state_of(config, Progress(), ())
    for name in _EQUAL_ENTRIES:
        if state.get(name) != expected[name]:
            raise InvalidArgument(f"the state has {name}={state.get(name)}, this pipeline has {expected[name]}")
    missing = expected.keys() - state.keys()
    if missing:
        raise InvalidArgument(f"the state has no {', '.join(sorted(missing))}: pass what state_dict() returned")
    position, batch_id = (integer(name, state[name], 0) for name in ("position", "batch_id"))
    if not isinstance(state["epochs"], (list, tuple)):
        raise ArgumentTypeError(f"epochs must be a list of ints (got {state['epochs']!r})")
    return Progress(batch_id, position), [integer("epochs", epoch, 0, WORD) for epoch in state["epochs"]]
