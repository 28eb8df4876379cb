"""Which commit each record's code is: its digest, looked for in the history of the checkout.

::

    regimes pack runs/small small.tar.xz
    regimes figure provenance data/reference            # every archive or folder of records in it
    regimes figure provenance small.tar.xz --strict     # exit code 1 if a digest has no commit

`regimes.records.provenance.code_digest` computes a digest, over ``regimes/**/*.py``. It is taken
of every commit that HEAD comes from and that touches ``regimes/``, out of git's objects; nothing is
checked out. A digest without a commit is of code that was never committed as it ran.
"""

from __future__ import annotations

import io
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated

import pandas as pd
import tyro

from regimes.base.console import stdout
from regimes.base.console.tables import Table
from regimes.base.errors import RecordError
from regimes.records import find_runs, read_header, unpack_records
from regimes.records.provenance import digest_of

from ..common.command import name_of

ROOT, PACKAGE = Path(__file__).parents[2], "regimes"
NONE = "no commit"
Tree = tuple[tuple[PurePosixPath, str], ...]  # the sources in it, each a path and a blob

# -- digests to commits ----------------------------------------------------------------------


def commits(repository: Path = ROOT) -> dict[str, str]:
    """Digest -> the first commit of HEAD's history that has it; equal trees are read once.

    Raises:
        RecordError: no git there, or no checkout with this package.
    """
    history = (
        _git(
            repository,
            "rev-list",
            "--full-history",
            "--topo-order",
            "--reverse",
            "HEAD",
            "--",
            PACKAGE,
        )
        .decode()
        .split()
    )
    asked = "".join(f"{commit}:{PACKAGE}\n" for commit in history)
    answers = _git(repository, "cat-file", "--batch-check", asked=asked).decode().splitlines()
    first: dict[str, str] = {}
    for commit, answer in zip(history, answers, strict=True):
        if not answer.endswith(" missing"):  # that commit took the package away
            first.setdefault(answer.split()[0], commit)
    trees = {tree: _sources(repository, tree) for tree in first}
    blobs = _contents(repository, {blob for rows in trees.values() for _, blob in rows})
    first_commit: dict[str, str] = {}
    for tree, rows in trees.items():
        first_commit.setdefault(digest_of((path, blobs[blob]) for path, blob in rows), first[tree])
    return first_commit


def _sources(repository: Path, tree: str) -> Tree:
    """The Python files of a tree."""
    lines = _git(repository, "ls-tree", "-r", "-z", tree).decode().rstrip("\0").split("\0")
    parts = [line.partition("\t") for line in lines if line.endswith(".py")]
    return tuple((PurePosixPath(path), about.split()[2]) for about, _, path in parts)


def _contents(repository: Path, blobs: Iterable[str]) -> dict[str, bytes]:
    """The bytes of many blobs, from one process of git."""
    asked = "".join(f"{blob}\n" for blob in sorted(blobs))
    stream, contents = io.BytesIO(_git(repository, "cat-file", "--batch", asked=asked)), {}
    while head := stream.readline().split():
        contents[head[0].decode()] = stream.read(int(head[2]))
        stream.readline()
    return contents


def _git(repository: Path, *words: str, asked: str = "") -> bytes:
    git = ["git", "-C", str(repository), *words]
    try:
        return subprocess.run(git, input=asked.encode(), capture_output=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        raise RecordError(
            f"{repository} is no checkout with {PACKAGE}/: a digest is looked for in git's history"
        ) from None


# -- records to digests ----------------------------------------------------------------------


def places(folder: Path) -> list[Path]:
    """The archives and the grids' folders in a folder; an archive, or a folder of runs, itself."""
    if folder.is_file():
        return [folder]
    grids = {path.parents[2] for path in folder.glob("*/*/*/run.json")}  # GRID/SCHEDULE/SEED
    return sorted(folder.glob("*.tar.xz")) + sorted(grids) or [folder]


def table(records: Sequence[Path], known: dict[str, str]) -> pd.DataFrame:
    """One row per archive and digest: archive, runs, digest, commit (empty: none has it).

    Raises:
        RecordError: no record there, or a damaged one.
    """
    rows = []
    for place in (inside for path in records for inside in places(path)):
        with unpack_records(place) as root:
            digests = Counter(str(read_header(run)["code"]["digest"]) for run in find_runs(root))
        if not digests:
            raise RecordError(f"no run in or under {place}")
        rows += [
            {
                "archive": name_of(place),
                "runs": runs,
                "digest": digest,
                "commit": known.get(digest, ""),
            }
            for digest, runs in digests.items()
        ]
    return pd.DataFrame(rows)


def as_text(rows: pd.DataFrame) -> Table:
    """The table, digests and commits by their first 12 digits."""
    lines = [
        (row["archive"], str(row["runs"]), row["digest"][:12], row["commit"][:12] or NONE)
        for row in rows.to_dict("records")
    ]
    return Table(("archive", "runs", "digest", "commit"), lines, texts=1, ends=2)


def summary(rows: pd.DataFrame) -> str:
    """How many runs have a commit."""
    without = int(rows.loc[rows["commit"] == "", "runs"].sum())
    return f"{without} of {int(rows['runs'].sum())} runs are of code that matches no commit"


def main(
    records: Annotated[tuple[Path, ...], tyro.conf.Positional], strict: bool = False
) -> pd.DataFrame:
    """Print which commit the code of each record is.

    Args:
        records: archives or folders of records, or folders of these.
        strict: end with exit code 1 if a digest has no commit.
    """
    if not records:  # before the history is read, which takes seconds
        raise RecordError("no records are named: expected folders or archives of runs")
    rows = table(records, commits())
    stdout.make_console(highlight=False).print(as_text(rows).drawn(), "", summary(rows), sep="\n")
    if strict and (rows["commit"] == "").any():
        sys.exit(1)
    return rows
