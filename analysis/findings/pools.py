"""Blocks of seeds pooled: only if configuration, code and data are the same.

A block is the folder or archive of a grid; blocks were run at different times. They may be pooled
if, for each chosen schedule, they are the same experiment (`records.same_experiment`) and of
the same code, or of codes that are declared to train the same bytes (`BIT_EQUAL`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from regimes.base.errors import RecordError
from regimes.records import Record, differing_fields, identify_experiment

BIT_EQUAL = (
    # Commits 28272e01, bfe363bb, 1ffbcafe, ef53b5e1: trained anew on one machine, each wrote the
    # same epochs.jsonl for small/accordion, seed 2000, all 24 epochs.
    frozenset(("5a6d620f1cd1", "a592eca4d04b", "b46159e85bbc", "e8150785b942")),
)
DIGITS = 12  # of a digest, as they are written here


def pool(blocks: Mapping[str, Sequence[Record]], schedules: Sequence[str]) -> list[Record]:
    """The runs of some schedules in all blocks.

    Args:
        blocks: name -> its runs.

    Raises:
        RecordError: two blocks are not the same experiment, or a seed is in both; says why.
    """
    names = " and ".join(blocks)
    pooled: dict[tuple[str, int], Record] = {}
    first: dict[str, Record] = {}
    for run in (run for runs in blocks.values() for run in runs if run.name in schedules):
        if why := difference(first.setdefault(run.name, run), run):
            raise RecordError(f"{names} cannot be pooled: {run.name} of seed {run.seed} {why}")
        if pooled.setdefault((run.name, run.seed), run) is not run:
            raise RecordError(
                f"{names} cannot be pooled: more than one has {run.name} of seed "
                f"{run.seed}, which would count twice"
            )
    return list(pooled.values())


def difference(a: Record, b: Record) -> str:
    """Why two runs are not the same experiment; empty if they are."""
    if differ := differing_fields([identify_experiment(a), identify_experiment(b)]):
        return f"has another {', '.join(differ)}"
    codes = [str(run.header.get("code", {}).get("digest"))[:DIGITS] for run in (a, b)]
    if not same_code(codes):
        return f"was run by code {codes[0]} and {codes[1]}, which are not known to train the same"
    return ""


def same_code(digests: Sequence[str]) -> bool:
    """Whether it is one code, or several that are declared to train the same bytes."""
    known = {digest[:DIGITS] for digest in digests}
    return len(known) == 1 or any(known <= equal for equal in BIT_EQUAL)
