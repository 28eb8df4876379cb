"""Faults injected at random moments into short trainings: what came of each, and what was lost.

    python -m benchmarks.faults --times 20      # Linux; root for the full disk; an hour

Digits and ACCORDION, six epochs, one to four processes. Where a fault ends a run, it is continued
afterwards and held against the same run undisturbed: equal bytes of ``epochs.jsonl``, equal bits of
the weights. *Lost* are epochs that were recorded when the fault came and that the continued run
does not have in the same bytes. Moments are uniform over epochs and within them, the start-up
included; one that comes after the end is drawn again. All draws follow from the seed, but the
machine's own timing decides what they hit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM
from typing import Any

from benchmarks import faults_around as around
from benchmarks.faults_bench import (
    CONFIG,
    EPOCHS,
    STEPS,
    Bench,
    Outcome,
    count_lost,
    lines_of,
)
from benchmarks.trainers import (
    Delay,
    End,
    OtherCode,
    Poison,
    Training,
    damage,
    epochs_of,
    same,
)
from regimes.base.config import RunConfig, override
from regimes.records import write_output


def _about(ends: Iterable[End], sentence: str) -> str:
    """Do all who were left alone say this?"""
    others = [end for end in ends if end.code != -SIGKILL]
    if any(end.code is None for end in others):
        return "the others HUNG"
    silent = [end for end in others if not re.search(sentence, end.said)]
    return f"the others stopped, naming it{f' but for {silent}' if silent else ''}"


# -- faults: each injects once ---------------------------------------------------------------


def killed(bench: Bench) -> Outcome:
    out = bench.folder()
    run = Training([CONFIG], out)
    bench.strike(run)
    hit = run.send(SIGKILL)
    run.ends()
    return bench.continued(out, 1, "ended at once") if hit else None


def one_killed(bench: Bench, ranks: range) -> Outcome:
    out, victim = bench.folder(), bench.draw.choice(ranks)
    run = Training([CONFIG] * 4, out)
    bench.strike(run)
    if not run.send(SIGKILL, victim):
        run.ends()
        return None
    ends = run.ends()
    return bench.continued(out, 4, _about(ends, rf"no sign of process (\d, )*{victim}"))


def asked_to_end(bench: Bench, count: int) -> Outcome:
    out = bench.folder()
    run = Training([CONFIG] * count, out)
    bench.strike(run)
    hit = run.send(SIGTERM)
    codes = {end.code for end in run.ends()}
    if not hit or codes == {0}:
        return None
    how = {143: "the epoch saved, exit code 143", -SIGTERM: "ended while starting"}
    return bench.continued(out, count, " or ".join(sorted(how.get(c, f"code {c}") for c in codes)))


def stands_still(bench: Bench) -> Outcome:
    out, victim = bench.folder(), bench.draw.randrange(4)
    run = Training([replace(CONFIG, timeout=5.0)] * 4, out)
    bench.strike(run, first=1)
    if not run.send(SIGSTOP, victim):
        run.ends()
        return None
    ends = [end for rank, end in enumerate(run.ends()) if rank != victim]
    return bench.continued(out, 4, _about(ends, f"no sign of process {victim}"))


def is_slow(bench: Bench) -> Outcome:
    out = bench.folder()
    delay = Delay(
        bench.draw.randrange(4), bench.draw.randrange(EPOCHS * STEPS), bench.draw.uniform(0.5, 3)
    )
    ends = Training([CONFIG] * 4, out, spoil=delay).ends()
    equal = all(end.code == 0 for end in ends) and same(out, bench.whole[4])
    return ("went on to the same bytes" if equal else "OTHER BYTES"), 0


def not_a_number(bench: Bench) -> Outcome:
    out, step = bench.folder(), bench.draw.randrange(EPOCHS * STEPS)
    poison = Poison(bench.draw.randrange(4), step)
    ends = Training([CONFIG] * 4, out, spoil=poison).ends()
    epoch, place = divmod(step, STEPS)
    sentence = f"of worker {poison.rank} is not finite in epoch {epoch}, step {place}"
    named = all(end.code == 3 and sentence in end.said for end in ends)
    return bench.continued(
        out,
        4,
        "stopped, " + ("naming worker, epoch and step" if named else f"saying {ends[0].said!r}"),
    )


def disk_full(bench: Bench, count: int) -> Outcome:
    """A tmpfs of a random size below what the run needs."""
    needs = sum(f.stat().st_size for f in bench.whole[count].rglob("*") if f.is_file())
    disk, out = bench.folder(), bench.folder()
    disk.mkdir()
    size = bench.draw.randrange(4096, int(1.3 * needs))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "regimes-faults", str(disk)]
    subprocess.run(mount, check=True)
    try:
        ends = Training([CONFIG] * count, disk / "run").ends()
        if all(end.code == 0 for end in ends):
            return None
        if (disk / "run").exists():
            shutil.copytree(disk / "run", out)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    odd = [end for end in ends if "cannot write" not in end.said]
    return bench.continued(out, count, "stopped, " + (f"saying {odd}" if odd else "saying so"))


def damaged(bench: Bench, how: str) -> Outcome:
    out = bench.stopped()
    newest = sorted((out / "checkpoints").glob("epoch-*"))[-1]
    damage(newest / bench.draw.choice(["process-0.pt", "manifest.json"]), how, bench.draw)
    return bench.continued(out, 1, "passed over for the one before")


def all_damaged(bench: Bench) -> Outcome:
    out = bench.stopped()
    for folder in (out / "checkpoints").glob("epoch-*"):
        damage(folder / "process-0.pt", "truncated", bench.draw)
    before = lines_of(out)
    end = Training([CONFIG], out).ends()[0]
    refused = end.code == 2 and "no checkpoint of" in end.said
    return ("refused" if refused else f"code {end.code}: {end.said}"), count_lost(
        before, lines_of(out)
    )


def torn(bench: Bench) -> Outcome:
    out = bench.stopped()
    following = lines_of(bench.whole[1])[len(epochs_of(out))]
    with (out / "epochs.jsonl").open("ab") as file:
        file.write(following[: bench.draw.randrange(1, len(following))])
    return bench.continued(out, 1, "left out")


def two_in_one(bench: Bench) -> Outcome:
    """Two start within a tenth of a second of each other, one of them perhaps to resume."""
    out = bench.folder()
    first = Training([CONFIG], out)
    time.sleep(bench.draw.uniform(0, 0.1))
    second = Training([CONFIG], out)
    ends = [*first.ends(), *second.ends()]
    refused = sum(end.code == 2 and bool(end.said) for end in ends)
    equal = any(end.code == 0 for end in ends) and same(out, bench.whole[1])
    return (
        f"{refused} of 2 refused, the other went on" if refused == 1 and equal else f"BOTH: {ends}"
    ), 0


def another_configuration(bench: Bench) -> Outcome:
    other = bench.draw.choice(["seed=1", "optimizer.lr=0.2", "levels.low=3", "bucket_mb=25"])
    return _disagree(bench, override(CONFIG, [other]), None)


def another_code(bench: Bench) -> Outcome:
    return _disagree(bench, CONFIG, OtherCode(1))


def _disagree(bench: Bench, other: RunConfig, spoil: Any) -> Outcome:
    out, victim = bench.folder(), 1
    ends = Training([CONFIG, other], out, spoil=spoil).ends()
    named = all(end.code == 2 and f"process {victim} holds another" in end.said for end in ends)
    return ("refused, naming it" if named else f"OTHERWISE: {ends}"), len(lines_of(out))


FAULTS: dict[str, tuple[Callable[[Bench], Outcome], bool]] = {  # True: as often as asked for
    "kill -9 of the trainer": (killed, True),
    "kill -9 of one of four processes": (partial(one_killed, ranks=range(1, 4)), True),
    "kill -9 of process 0 of four": (partial(one_killed, ranks=range(1)), True),
    "SIGTERM, one process": (partial(asked_to_end, count=1), True),
    "SIGTERM, four processes": (partial(asked_to_end, count=4), True),
    "a process of four stands still (SIGSTOP)": (stands_still, False),
    "a process of four is slow (0.5 to 3 s)": (is_slow, False),
    "NaN in the loss of one of four": (not_a_number, True),
    "the disk is full": (partial(disk_full, count=1), True),
    "the newest checkpoint truncated": (partial(damaged, how="truncated"), True),
    "the newest checkpoint tampered with (one bit)": (partial(damaged, how="tampered"), True),
    "both checkpoints truncated": (all_damaged, True),
    "the last line of the record torn": (torn, True),
    "two runs into one folder": (two_in_one, True),
    "another configuration on one of two": (another_configuration, True),
    "another code on one of two": (another_code, True),
    "the disk is full, two processes": (partial(disk_full, count=2), True),
    "the reader of standard output leaves": (around.pipe_closed, True),
    "the clock of one of two jumps by years": (around.clock_jumps, True),
    "kill -9 while a checkpoint is written": (around.killed_writing, True),
    "SIGTERM to an ablation": (around.ablation_ended, True),
    "a row edited while the run resumes": (around.edited, True),
    "two hooks in one job": (around.two_hooks, True),
}


# -- the report ------------------------------------------------------------------------------


def inject(bench: Bench, fault: Callable[[Bench], Outcome], times: int) -> dict[str, Any]:
    """One fault until it has hit so often."""
    outcomes: Counter[str] = Counter()
    lost = missed = 0
    start = time.monotonic()
    while outcomes.total() < times:
        outcome = fault(bench)
        if outcome is None:
            missed += 1
            continue
        outcomes[outcome[0]] += 1
        lost += outcome[1]
    return {
        "injected": times,
        "outcomes": dict(outcomes.most_common()),
        "epochs_lost": lost,
        "missed": missed,
        "seconds": time.monotonic() - start,
    }


def markdown(result: dict[str, Any]) -> str:
    text = [
        "This page shows what happens to a training run when a process, file, disk or clock "
        "fails. `python -m benchmarks.faults` injects each fault at random moments and "
        "compares the continued run with an undisturbed one.",
        "",
        "| fault | injected | outcome | recorded epochs lost |",
        "|---|---:|---|---:|",
    ]
    for name, row in result["faults"].items():
        found = "; ".join(f"{n} {what}" for what, n in row["outcomes"].items())
        text.append(f"| {name} | {row['injected']} | {found} | {row['epochs_lost']} |")
    total = sum(row["injected"] for row in result["faults"].values())
    text += ["", f"{total} faults, seed {result['seed']}, {result['machine']['minutes']:.0f} min."]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--report", type=Path, default=Path("benchmarks/faults.json"))
    parser.add_argument("--go-on", action="store_true", help="keep the rows that the report has")
    chosen = parser.parse_args()
    rows: dict[str, Any] = {}
    if chosen.go_on and chosen.report.exists():
        known = json.loads(chosen.report.read_text(encoding="utf-8"))
        if known["seed"] != chosen.seed:
            parser.error(f"--seed: the rows of {chosen.report} are of seed {known['seed']}")
        rows = known["faults"]
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), chosen.seed)
        for name, (fault, often) in FAULTS.items():
            if chosen.only in name and name not in rows:
                bench.draw = random.Random(f"{chosen.seed} {name}")
                rows[name] = inject(bench, fault, chosen.times if often else -(-chosen.times // 4))
                rows = {known: rows[known] for known in FAULTS if known in rows}
                print(f"{name}: {rows[name]}", flush=True)
                report(rows, bench, chosen.seed, chosen.report)


def report(rows: dict[str, Any], bench: Bench, seed: int, file: Path) -> None:
    """Write all rows so far, as JSON and as a page."""
    minutes = sum(row["seconds"] for row in rows.values()) / 60
    result = {
        "seed": seed,
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "minutes": minutes},
        "undisturbed_seconds": bench.seconds,
        "faults": rows,
    }
    write_output(file, json.dumps(result, indent=1) + "\n")
    write_output(file.with_suffix(".md"), markdown(result))


if __name__ == "__main__":
    main()
