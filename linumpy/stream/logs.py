"""From which level on the package logs: numbers of the interface → levels of :mod:`logging`."""

from __future__ import annotations

import logging
from typing import Any

from linumpy.stream.errors import InvalidArgument

#: Of TRACE, DEBUG, INFO, WARN, ERROR and FATAL, in the order of their numbers.
_LOG_LEVELS = (5, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


def set_log_level(level: int | str) -> None:
    """Set the level from which on the package logs.

    Parameters
    ----------
    level : int or str
        0 to 5 for TRACE, DEBUG, INFO, WARN, ERROR, FATAL, or their names; and levels of :mod:`logging`, from 10 on.

    Raises
    ------
    InvalidArgument
        Another number or name.
    """
    number: Any = level
    if isinstance(level, str):
        number = {"TRACE": _LOG_LEVELS[0], **logging.getLevelNamesMapping()}.get(level.upper())
    elif isinstance(level, bool) or not isinstance(level, int):
        number = None
    elif 0 <= level < len(_LOG_LEVELS):
        number = _LOG_LEVELS[level]
    elif level < logging.DEBUG:
        number = None
    if not number:
        raise InvalidArgument(
            f"level must be 0 (TRACE) to 5 (FATAL), a level of logging, or the name of one (got {level!r})"
        )
    logging.getLogger("linumpy.stream").setLevel(number)
