"""The one kind of error that a person is expected to see."""

import struct
from contextlib import contextmanager


class ExportError(Exception):
    """One line: what, where, expected, found, and what to do."""


@contextmanager
def malformed(what: str):
    """Around code that takes metadata apart: values of a wrong kind become an error about what."""
    try:
        yield
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        struct.error,
    ) as error:
        kind = type(error).__name__
        raise ExportError(f"{what} is malformed ({kind}: {error})") from None
