"""The log level of :mod:`linumpy.stream`: damacy's numbers → levels of :mod:`logging`."""

from __future__ import annotations

import logging

from linumpy.stream.errors import InvalidArgument

#: TRACE, DEBUG, INFO, WARN, ERROR and FATAL, by number.
_LOG_LEVELS = (5, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


def set_log_level(level: int | str) -> None:
    """Set the lowest level that :mod:`linumpy.stream` logs.

    Parameters
    ----------
    level : int or str
        0 to 5 for TRACE, DEBUG, INFO, WARN, ERROR, FATAL, or one of these names; or a level of :mod:`logging`, 10 or
        more.

    Raises
    ------
    InvalidArgument
        `level` is another number or name.
    """
    number: int | None
    if isinstance(level, str):
        number = {"TRACE": _LOG_LEVELS[0], **logging.getLevelNamesMapping()}.get(level.upper())
    elif isinstance(level, bool) or not isinstance(level, int):
        number = None
    elif 0 <= level < len(_LOG_LEVELS):
        number = _LOG_LEVELS[level]
    else:
        number = level if level >= logging.DEBUG else None
    if not number:
        raise InvalidArgument(
            f"level must be 0 (TRACE) to 5 (FATAL), a level of logging, or the name of one (got {level!r})"
        )
    logging.getLogger("linumpy.stream").setLevel(number)
