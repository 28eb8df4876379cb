"""The ``regimes`` command; also what torchrun starts (``torchrun ... -m regimes run PRESET``)."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; errors made on purpose are one sentence and an exit code."""
    from regimes.errors import RegimesError

    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")  # a plug-in beside the user, package.module:Class
    try:
        from regimes.cli import app
    except ModuleNotFoundError as error:
        if error.name != "tyro":
            raise
        sys.exit(
            "error: the command line needs tyro: pip install tyro (from Python, use regimes.run)"
        )
    try:
        app.cli(prog="regimes", description="Train under a communication schedule; see README.md.")
    except RegimesError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted; continue with --resume", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
