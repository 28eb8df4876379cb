"""The ``regimes`` command, also for torchrun (``torchrun ... -m regimes run PRESET``).

``python -m`` puts the current folder before all installed packages. It is removed here before any
other import, so that a command never runs a ``rich.py`` from an unpacked archive that it reads. In
a folder with a ``regimes.py``, use the script ``regimes`` or ``python -P -m regimes``.
"""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    try:
        if sys.path[:1] in ([""], [os.getcwd()]):
            del sys.path[0]  # the package itself is imported already
    except OSError:  # the current folder is gone
        pass


def main() -> None:
    """Run the command line; an error of the user is one sentence and an exit code."""
    from regimes.base.console import stdout

    stdout.prepare_stdout()
    code = 0
    try:
        code = _command()
        stdout.flush_stdout()
    except OSError as error:
        if (lost := stdout.exit_code_of(error)) is not None:
            code = code or lost  # the training's own failure comes first
        elif error.filename is None:
            raise
        else:  # an unreadable place, or a name that is too long
            name = stdout.escape_control(str(error.filename))
            print(f"error: {name}: {error.strerror}", file=sys.stderr)
            code = 2
    sys.exit(code)


def _command() -> int:
    """The exit code."""
    from regimes.base.console.stdout import escape_control
    from regimes.base.errors import RegimesError
    from regimes.base.inputs import track_inputs

    try:
        from regimes.cli import app
    except ModuleNotFoundError as error:
        if error.name != "tyro":
            raise
        hint = "pip install tyro (from Python, use regimes.run)"
        print(f"error: the command line needs tyro: {hint}", file=sys.stderr)
        return 1
    try:
        with track_inputs():
            about = (
                "Train under changing gradient compression, measure critical regimes, and read the "
                "records. `regimes COMMAND --help` explains a command."
            )
            app.cli(prog="regimes", description=about)
    except RegimesError as error:
        print(f"error: {escape_control(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"interrupted{_remedy(sys.argv[1:2])}", file=sys.stderr)
        return 130
    except SystemExit as stop:
        return stop.code  # type: ignore[return-value]  # of tyro and doctor; None is 0
    return 0


def _remedy(verb: list[str]) -> str:
    """How to go on after Ctrl-C: not every command has something to go on with."""
    if verb == ["run"]:
        return "; continue with --resume"
    again = "; start the same command again to go on"
    return again if {*verb} & {"ablate", "tune", "branch", "harm", "plan"} else ""


if __name__ == "__main__":
    main()
