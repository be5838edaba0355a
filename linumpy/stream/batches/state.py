"""The state from which a pipeline resumes: integers, checked by the pipeline that loads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from linumpy.stream.arguments import integer
from linumpy.stream.config import WORD, Config
from linumpy.stream.errors import ArgumentTypeError, InvalidArgument

_VERSION = 2
#: Entries that must be the same in the pipeline that loads the state.
_SAME = ("version", "seed", "epoch", "rank", "world_size", "batch_size")


class Progress(NamedTuple):
    """Progress of the consumer.

    Attributes
    ----------
    batch_id : int
        Number of the next batch.
    position : int
        Position after the last sample that was popped.
    """

    batch_id: int = 0
    position: int = 0


def state_of(config: Config, progress: Progress, epochs: Sequence[int]) -> dict[str, object]:
    """Return the state of a pipeline; `epochs` are the first epochs of the samplers that were pushed."""
    return {
        "version": _VERSION, "position": progress.position, "batch_id": progress.batch_id, "seed": config.seed,
        "epoch": config.epoch, "rank": config.rank, "world_size": config.world_size,
        "batch_size": config.batch_size, "epochs": list(epochs),
    }  # fmt: skip


def checked(state: Mapping[str, object], config: Config) -> tuple[Progress, list[int]]:
    """Return the progress and the epochs of a state.

    Raises
    ------
    InvalidArgument
        The state is of another configuration.
    """
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(f"state must be what state_dict() returned (got {type(state).__name__})")
    own = state_of(config, Progress(), ())
    for name in _SAME:
        if state.get(name) != own[name]:
            raise InvalidArgument(f"the state has {name}={state.get(name)}, this pipeline has {own[name]}")
    missing = own.keys() - state.keys()
    if missing:
        raise InvalidArgument(f"the state has no {', '.join(sorted(missing))}: pass what state_dict() returned")
    position, batch_id = (integer(name, state[name], 0) for name in ("position", "batch_id"))
    if not isinstance(state["epochs"], (list, tuple)):
        raise ArgumentTypeError(f"epochs must be a list of ints (got {state['epochs']!r})")
    return Progress(batch_id, position), [integer("epochs", epoch, 0, WORD) for epoch in state["epochs"]]
