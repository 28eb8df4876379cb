"""The ``regimes`` command; also what torchrun starts (``torchrun ... -m regimes run PRESET``).

``python -m`` puts the current folder before all installed packages. That is undone here, before
anything else is imported, so that a ``rich.py`` in an unpacked archive is not run by a command that
reads the archive. (What Python itself does before, it does: for a folder with a ``regimes.py``, use
the script ``regimes`` or ``python -P -m regimes``.)
"""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    try:
        if sys.path[:1] in ([""], [os.getcwd()]):
            del sys.path[0]  # the package itself stays known, wherever it was found
    except OSError:  # the current folder is gone
        pass


def main() -> None:
    """Run the command line; errors made on purpose are one sentence and an exit code."""
    from regimes.console import stdout

    stdout.prepare()
    code = 0
    try:
        code = _command()
        stdout.flush()
    except OSError as error:
        if stdout.is_stdout_failure(error):
            lost = stdout.exit_code_of(error)
            code = code or lost  # a training's own failure is more telling
        elif error.filename is None:
            raise
        else:  # a place that nobody may look at, or a name too long to be one
            print(
                f"error: {stdout.escape_control(str(error.filename))}: {error.strerror}",
                file=sys.stderr,
            )
            code = 2
    sys.exit(code)


def _command() -> int:
    """The exit code."""
    from regimes.console.stdout import escape_control
    from regimes.errors import RegimesError
    from regimes.inputs import track_inputs

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
    about = "Train under a communication schedule; see README.md."
    try:
        with track_inputs():
            app.cli(prog="regimes", description=about)
    except RegimesError as error:
        print(f"error: {escape_control(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; continue with --resume", file=sys.stderr)
        return 130
    except SystemExit as stop:
        return stop.code  # type: ignore[return-value]  # of tyro and doctor; None is 0
    return 0


if __name__ == "__main__":
    main()
