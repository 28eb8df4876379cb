"""States saved by the releases, made with their code, and what each release itself continues to.

    python tests/data/states/make.py [--only NAME ...]   # 15 minutes; writes tests/data/states/0.*/

A file ``NAME.tar.xz`` has the folder ``state`` as the release left it, and ``continued.pt``: by way
of continuing, the weights, losses and rows of each process of the release that went on from it. The
cases are those of `ddp_scripts.released`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
RELEASES = {"0.2": "7d0b34c", "0.3": "c9ffd08"}  # the commits whose code is run


# -- in a process of torchrun, with the code of a release ------------------------------------------


def work(name: str, way: str, folder: Path, out: Path) -> None:
    """Begin a case (``way`` is empty), or continue it and write what came out."""
    from ddp_scripts import released

    import regimes

    sys.argv[1:] = [name]  # records keep the command
    torch.set_num_threads(1)
    assert Path(regimes.__file__).parents[1] == Path(os.environ["TREE"]), "the code of another tree"
    case, found = released.CASES[name], None
    if case.trains and way:
        released.continued(0, name, way, folder)
    elif case.trains:
        begin(case.work, folder, released.CUT)
    else:
        dist.init_process_group("gloo")
        found = released.continued(0, name, way or next(iter(case.ways)), folder)
        dist.barrier()
        dist.destroy_process_group()
    if way:
        torch.save(found, out / os.environ["RANK"])


def begin(train: Any, folder: Path, units: int) -> None:
    """A run that is stopped after so many units, as Ctrl-C does it; its trunk is not."""
    from regimes.training import loop

    unit = loop._train_unit

    def stopped(parts: Any, number: int, *rest: Any) -> Any:
        if number == units and (folder / "run").exists():
            raise KeyboardInterrupt
        return unit(parts, number, *rest)

    loop._train_unit = stopped
    try:
        train(folder)
    except KeyboardInterrupt:
        return
    raise AssertionError("it was not stopped")


# -- what starts them ------------------------------------------------------------------------------


def start(tree: Path, processes: int, *words: str | Path) -> None:
    """``work`` on so many processes, with the code of a tree."""
    path = os.pathsep.join([str(tree), str(ROOT / "tests" / "shared")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TREE": str(tree)}
    env["GLOO_SOCKET_IFNAME"] = "lo"
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", processes, HERE / "make.py", "--work", *words]
    done = subprocess.run(
        [str(word) for word in command], env=env, cwd=tree, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{words}: {done.stdout[-1000:]}\n{done.stderr[-3000:]}")


def make(release: str, tree: Path, name: str, released: Any) -> None:
    """One archive."""
    case = released.CASES[name]
    with tempfile.TemporaryDirectory(prefix="regimes-") as scratch:
        state, found = Path(scratch, "state"), {}
        state.mkdir()
        start(tree, case.processes, name, "", state, scratch)
        for way, (processes, _) in case.ways.items():
            folder, out = Path(scratch, way), Path(scratch, f"{way}-out")
            shutil.copytree(state, folder)
            out.mkdir()
            start(tree, processes, name, way, folder, out)
            if case.trains:
                found[way] = [outcome_of_run(folder / "run", released)]
            else:
                parts = [out / str(rank) for rank in range(processes)]
                found[way] = [torch.load(part, weights_only=True) for part in parts]
        tidy(state)
        torch.save(found, Path(scratch, "continued.pt"))
        file = HERE / release / f"{name}.tar.xz"
        file.parent.mkdir(exist_ok=True)
        with tarfile.open(file, "w:xz", preset=9) as archive:
            for part in ("state", "continued.pt"):
                archive.add(Path(scratch, part), part, filter=without_owner)
    print(f"{release} {name}: {file.stat().st_size} bytes", flush=True)


def outcome_of_run(folder: Path, released: Any) -> dict[str, Any]:
    """Weights and rows that a run of the trainer has left, in the layout of the releases."""
    last = max((folder / "checkpoints").iterdir())
    saved = torch.load(last / "process-0.pt", weights_only=True)
    rows = [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]
    numbers = [released.numbers(row) for row in rows]
    return {"weights": saved["shared"]["model"], "losses": [], "rows": numbers}


def tidy(state: Path) -> None:
    """Keep of checkpoints the newest, which a run continues, and the one that a branch begins
    with."""
    for lock in state.rglob(".lock"):
        lock.unlink()
    old = sorted(state.glob("run/checkpoints/*"))[:-1]
    for folder in (*old, *sorted(state.glob("trunk/checkpoints/*"))[1:]):
        shutil.rmtree(folder)


def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--releases", nargs="+", default=list(RELEASES))
    chosen = parser.parse_args()
    if chosen.work:
        name, way, folder, out = chosen.work
        work(name, way, Path(folder), Path(out))
        return
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "shared")]
    from ddp_scripts import released

    for release in chosen.releases:
        with tempfile.TemporaryDirectory(prefix="regimes-") as tree:
            command = ["git", "-C", str(ROOT), "archive", RELEASES[release]]
            content = subprocess.run(command, capture_output=True, check=True).stdout
            with tarfile.open(fileobj=BytesIO(content)) as archive:
                archive.extractall(tree, filter="data")
            for name, case in released.CASES.items():
                if case.since <= release and (not chosen.only or name in chosen.only):
                    make(release, Path(tree), name, released)


if __name__ == "__main__":
    main()
