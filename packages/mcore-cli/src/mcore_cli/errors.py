"""User mistakes: what counts as one, and how it is told. No torch.

A user mistake is a :class:`UserError`, any ``ValueError`` that mcore's own code raises, or a file that cannot be opened
by mcore's own code. It becomes plain lines and exit code 2. Everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from types import TracebackType

USER_ERROR_CODE = 2
FILE_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


class UserError(ValueError):
    """One or several user mistakes, each one line with the value, the rule and the fix."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type[UserError], tuple[str, ...]]:
        return type(self), self.problems


class RunFailed(RuntimeError):
    """The run itself went wrong (not a user mistake, not a bug): one line, exit code 1."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"`` for the nearest of ``known``, or nothing if none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def is_user_error(error: BaseException) -> bool:
    """Whether ``error`` tells the user of a mistake, rather than us of a bug."""
    if isinstance(error, UserError):
        return True
    if isinstance(error, ValueError) or (isinstance(error, FILE_ERRORS) and error.filename is not None):
        return _raised_by_mcore(error.__traceback__)
    return False


def problems_of(error: BaseException) -> tuple[str, ...]:
    """The lines that tell the user mistake ``error``."""
    if isinstance(error, UserError):
        return error.problems
    if isinstance(error, OSError):
        return (f"{error.filename}: {error.strerror}",)
    return (" ".join(str(error).split("\n")),)


def describe(problems: Iterable[str]) -> str:
    """The text shown for ``problems``: a heading when there are several, and one line for each."""
    lines = list(problems)
    if len(lines) == 1:
        return f"error: {lines[0]}"
    return "\n".join([f"{len(lines)} errors:", *(f"  - {line}" for line in lines)])


def _raised_by_mcore(trace: TracebackType | None) -> bool:
    # A ValueError out of torch or numpy is not a message for users, however deep in our own calls it was raised.
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0].startswith("mcore_")
