"""Old names of parameters: they still work, with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def renamed_parameter(old: str, new: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function so that it also takes a keyword parameter by its old name.

    A call with the old name gives a ``FutureWarning``. If it raises a ``TypeError`` or ``ValueError`` whose message
    begins with the new name, the message gets the old name, which the caller typed. A call with both names is a
    ``TypeError``.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
            if old not in options:
                return function(*args, **options)
            if new in options:
                raise TypeError(f"{old}= is the old name of {new}=: pass only {new}=")
            warnings.warn(f"{old}= is called {new}= now", FutureWarning, stacklevel=2)
            options[new] = options.pop(old)
            try:
                return function(*args, **options)
            except (TypeError, ValueError) as error:
                if not str(error).startswith(f"{new}="):
                    raise
                raise type(error)(old + str(error).removeprefix(new)) from error

        return call

    return decorate
