"""Standard output as it is found: a terminal, a file, a pipe that closes, a full disk, or nothing.

The command line stands on it. A command that only prints ends when nobody reads; a training goes on
(`say`, `tell`), because what matters of it is the record. No torch; rich is imported late.
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
CLOSED = 128 + getattr(signal, "SIGPIPE", 13)  # as of a program that the signal has ended
WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline
LOST = (OSError, ValueError)  # a closed file and a letter that the encoding lacks are ValueErrors


def prepare() -> None:
    """Make printing safe: a letter that the encoding lacks is spelt out, and a stream that was
    closed before the start does not give its number to a file of ours."""
    with contextlib.suppress(OSError):
        while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(spare)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def spelt(text: str) -> str:
    """With its control characters spelt out: no text of a stranger's moves the cursor.

    >>> print(spelt("a\x1b[2J"))
    a\\x1b[2J
    """
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def is_terminal() -> bool:
    """Does somebody look at it? Not if it is closed."""
    try:
        return sys.stdout is not None and sys.stdout.isatty()
    except ValueError:
        return False


def console(**options: Any) -> Console:
    """A console whose closed pipe is an error like any other; rich's own would end the program."""
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            raise

    return Ours(**options)


def say(text: str) -> None:
    """Print what a training must not end for."""
    try:
        print(text, flush=True)
    except LOST as error:
        silence(error)


def tell(screen: Console, *what: Any, **how: Any) -> None:
    """The same on a console."""
    try:
        screen.print(*what, **how)
    except LOST as error:
        silence(error)


def silence(error: Exception | None = None) -> None:
    """Send standard output nowhere from now on, what it has not got rid of included."""
    if error is not None:
        with contextlib.suppress(*LOST):
            log.warning("standard output cannot be written and is silent from now on: %s", error)
    with contextlib.suppress(*LOST, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def flush() -> None:
    """Write what is left, here, where a failure can be told, not while Python shuts down."""
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def is_lost(error: OSError) -> bool:
    """Was it standard output that failed? Then what could not be written is still to be; nothing
    is kept without a buffer (``python -u``), where an error of writing that names no file must do.
    """
    if isinstance(error, BrokenPipeError):
        return True
    if getattr(sys.stdout, "write_through", False) and error.filename is None:
        return error.errno in WRITING
    try:
        flush()
    except OSError:
        return True
    return False


def lost(error: OSError) -> int:
    """End what only prints; returns the exit code. Quietly if the pipe was closed, as ``head``
    does when it has enough."""
    silence()
    if isinstance(error, BrokenPipeError):
        return CLOSED
    print(f"error: cannot write to standard output: {error.strerror}", file=sys.stderr)
    return 2
