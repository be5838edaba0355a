"""Names of parameters in the fixed interface of samplers: they work beside this package's names, with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def renamed_parameter(old: str, new: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function so that it also takes a keyword parameter by its old name, with a ``FutureWarning``."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
            if old not in options:
                return function(*args, **options)
            if new in options:
                raise TypeError(f"{old}= is the old name of {new}=: pass only {new}=")
            warnings.warn(f"{old}= is called {new}= now", FutureWarning, stacklevel=2)
            options[new] = options.pop(old)
            return function(*args, **options)

        return call

    return decorate
