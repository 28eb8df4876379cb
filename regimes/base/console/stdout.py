"""Standard output that may be a terminal, a file, a closed pipe, a full disk, or missing.

A command that only prints ends when its output cannot be written. A training goes on without
output (`try_print`), because its result is the record. Rich is imported late.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)
CLOSED_PIPE = 128 + getattr(signal, "SIGPIPE", 13)  # the exit code of a program ended by SIGPIPE
STDOUT = "<stdout>"  # in place of the file's name in an error of `flush_stdout`
WRITE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline
PRINT_ERRORS = (OSError, ValueError)  # ValueError: a closed file, or a letter without encoding


def prepare_stdout() -> None:
    """Make printing safe: letters outside the encoding are escaped, and the numbers of closed
    standard streams are occupied, so that no file opened later receives what is printed."""
    with contextlib.suppress(OSError):
        while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(spare)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def escape_control(text: str) -> str:
    """Escape control characters, so that text from a file cannot move the cursor.

    >>> print(escape_control("a\x1b[2J"))
    a\\x1b[2J
    """
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def is_terminal() -> bool:
    """Answer whether standard output is an open terminal."""
    try:
        return sys.stdout is not None and sys.stdout.isatty()
    except ValueError:
        return False


def make_console(**options: Any) -> Console:
    """Make a rich console that raises BrokenPipeError; rich's own would end the program."""
    from rich.console import Console

    class RaisingConsole(Console):
        def on_broken_pipe(self) -> None:
            raise

    return RaisingConsole(**options)


def try_print(*objects: Any, on: Console | None = None) -> None:
    """Print; a failure disables standard output in place of ending the training."""
    try:
        if on:
            on.print(*objects, soft_wrap=all(isinstance(x, str) for x in objects))
        else:
            print(*objects, flush=True)
    except PRINT_ERRORS as error:
        with contextlib.suppress(*PRINT_ERRORS):
            log.warning("standard output cannot be written and is silent from now on: %s", error)
        _disable_stdout()


def _disable_stdout() -> None:
    """Redirect standard output to the null device, its unwritten buffer included."""
    with contextlib.suppress(*PRINT_ERRORS, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def flush_stdout() -> None:
    """Write the buffer now: a failure while Python shuts down could not be handled."""
    if sys.stdout is not None and not sys.stdout.closed:
        try:
            sys.stdout.flush()
        except OSError as error:
            # Of more text than the buffer holds the rest is dropped, and a second flush succeeds.
            error.filename = STDOUT
            raise


def exit_code_of(error: OSError) -> int | None:
    """Return the exit code if standard output failed (an error of writing that names no file),
    which is then disabled; None for another error. A closed pipe (``head``) is no message."""
    pipe = isinstance(error, BrokenPipeError)
    if (
        not pipe
        and error.filename != STDOUT
        and (error.filename is not None or error.errno not in WRITE_ERRNOS)
    ):
        return None
    _disable_stdout()
    if pipe:
        return CLOSED_PIPE
    print(f"error: cannot write to standard output: {error.strerror}", file=sys.stderr)
    return 2
