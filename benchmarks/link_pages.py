"""The command of a benchmark on limited links: its options, and the two files that it leaves."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regimes.records import write_output


def measure_and_write(
    name: str,
    doc: str | None,
    measure: Callable[..., dict[str, Any]],
    markdown: Callable[[dict[str, Any]], str],
    **defaults: Any,
) -> None:
    """Measure with the options of the command line, write NAME.json and NAME.md, and print the
    page.

    Args:
        doc: of the benchmark; its first line is the help.
        defaults: the arguments of ``measure``, each an option; several numbers for a tuple.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for option, default in defaults.items():
        several = "+" if isinstance(default, tuple) else None
        unit = "Mbit/s" if option == "rates" else None
        parser.add_argument(f"--{option}", type=int, nargs=several, default=default, help=unit)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    chosen = vars(parser.parse_args())
    out = chosen.pop("out")
    result = measure(**chosen)
    write_output(out / f"{name}.json", json.dumps(result, indent=1) + "\n")
    write_output(out / f"{name}.md", markdown(result))
    print(markdown(result))
