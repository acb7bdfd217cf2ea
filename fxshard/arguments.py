"""What an argument may be, judged alike wherever users give one."""

from __future__ import annotations

import inspect
from typing import Any

from fxshard.bytesize import is_count
from fxshard.errors import ConfigError


def check_flag(name: str, value: object) -> None:
    """Raise ConfigError for what is neither True nor False: "no" is true for Python."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: expected True or False.")


def check_progress(progress: object) -> None:
    """Raise ConfigError for what is neither None nor a flag."""
    if progress is not None:
        check_flag("progress", progress)


def check_called(name: str, value: Any, *given: str) -> None:
    """Raise ConfigError for what cannot be called with as many arguments; `given` names them."""
    takes = f"expected a function of {' and '.join(given) or 'nothing'}"
    if not callable(value):
        raise ConfigError(f"{name}={value!r}: {takes}.")
    try:
        inspect.signature(value).bind(*given)
    except TypeError as error:
        raise ConfigError(f"{name}={value!r}: {takes}, but of this one {error}.") from error
    except ValueError:  # of some builtins Python knows no signature
        pass


def check_count(name: str, value: object) -> None:
    """Raise ConfigError for what is no integer of at least 1."""
    if not is_count(value):
        raise ConfigError(f"{name}={value!r}: expected an integer >= 1.")
