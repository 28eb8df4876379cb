"""The ``regimes`` command; also what torchrun starts (``torchrun ... -m regimes run PRESET``)."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; errors made on purpose are one sentence and an exit code."""
    from regimes import terminal

    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")  # a plug-in beside the user, package.module:Class
    terminal.prepare()
    code = 0
    try:
        code = _command()
        terminal.flush()
    except OSError as error:
        if not terminal.is_lost(error):
            raise
        lost = terminal.lost(error)
        code = code or lost  # a training's own failure is more telling
    sys.exit(code)


def _command() -> int:
    """The exit code."""
    from regimes.errors import RegimesError

    try:
        from regimes.cli import app
    except ModuleNotFoundError as error:
        if error.name != "tyro":
            raise
        print(
            "error: the command line needs tyro: pip install tyro (from Python, use regimes.run)",
            file=sys.stderr,
        )
        return 1
    try:
        app.cli(prog="regimes", description="Train under a communication schedule; see README.md.")
    except RegimesError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; continue with --resume", file=sys.stderr)
        return 130
    except SystemExit as stop:
        return stop.code  # type: ignore[return-value]  # of tyro and doctor; None is 0
    return 0


if __name__ == "__main__":
    main()
