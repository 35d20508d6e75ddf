"""The one exception for mistakes that the person at the keyboard can mend."""

from typing import get_args


class UserError(Exception):
    """A mistake in a config, in data or in a checkpoint.

    The message is one sentence that says what was given, what is allowed and what to do. The command line prints it
    without a traceback and exits with a status that is not 0.
    """


def one_of(setting: str, value: object, choices: object) -> None:
    """Raises UserError unless a value is one of a ``Literal``'s, which the command line checks and Python does not."""
    allowed = get_args(choices)
    if value not in allowed:
        raise UserError(f"{setting} is {value!r}, but it must be one of {', '.join(map(str, allowed))}.")


def finite(setting: str, value: float) -> None:
    """Raises UserError unless a value is a number that float32 can hold."""
    if not abs(value) < 3.4e38:
        raise UserError(f"{setting} is {value}, but it must be a finite number.")
