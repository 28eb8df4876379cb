"""Train cases with the code of the tree that is the current folder:
``python -m benchmarks.same_bits.train OUT TEXT NAME ...``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.same_bits.processes import Failed, train


def main(out: Path, text: Path, names: list[str]) -> None:
    """Leave the folder of each case in ``out``, and a file when it is done: empty, or with what
    went wrong."""
    if not names:
        return
    import regimes
    from benchmarks.same_bits.cases import CASES

    assert Path(regimes.__file__).parents[1] == Path.cwd(), "the code of another tree"
    for case in CASES:
        if case.name not in names:
            continue
        begin, error = time.perf_counter(), ""
        try:
            train(case, out / case.name, text)
        except Failed as failed:
            error = str(failed)
        print(f"{case.name}: {time.perf_counter() - begin:.1f} s", flush=True)
        (out / f"{case.name}.part").write_text(error)
        (out / f"{case.name}.part").replace(out / f"{case.name}.done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
