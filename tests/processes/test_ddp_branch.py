"""A job continued from its hook's saved state under another configuration (oracles: a job whose
policy makes the same change itself, conservation of what is owed)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from ddp_scripts import cases, group, state_jobs
from ddp_scripts.cases import Case
from ddp_scripts.jobs import sentence
from torch.nn.parallel import DistributedDataParallel

from regimes import attach
from regimes.hook.ddp import Hook

CASE = Case()
UNITS, STEPS, AT = 4, 2, 2
LOW = {"name": "static", "level": "low"}
HIGH = {"name": "static", "level": "high"}
BOTH = {"name": "windows", "windows": [[0, AT]], "inside": "low", "outside": "high"}
LEVELS = {"low": 2, "high": 1}
TOPK = {"name": "topk"}


class Job:
    """A hooked model, whose unit ends by epoch_end or by itself."""

    def __init__(self, rank: int, counted: bool, policy: Any, **given: Any) -> None:
        self.rank, self.counted, self.step = rank, counted, 0
        self.model = DistributedDataParallel(cases.build(CASE))
        self.sgd = cases.sgd(self.model.module)
        more = {"optimizer": self.sgd, "every": STEPS} if counted else {}
        chosen = {"levels": LEVELS, "seed": 7, **given, **more}
        self.hook: Hook = attach(self.model, policy=policy, **chosen)

    def units(self, count: int) -> Job:
        for _ in range(count):
            for _ in range(STEPS):
                cases.step_of(self.model, self.sgd, CASE, self.step, self.rank)
                self.step += 1
            if not self.counted:
                self.hook.epoch_end(lr=cases.RATE)
        return self

    def save(self) -> Any:
        """Model, optimiser and hook, through a file."""
        parts = self.model.module.state_dict(), self.sgd.state_dict()
        return state_jobs.reread([*parts, self.hook.state_dict(), self.hook.full_state_dict()])

    def load(self, saved: Any, full: bool = False) -> Job:
        self.model.module.load_state_dict(saved[0])
        self.sgd.load_state_dict(copy.deepcopy(saved[1]))
        if full:
            self.hook.load_full_state_dict(saved[3], branch=True)
        else:
            self.hook.load_state_dict(saved[2], branch=True)
        self.step = AT * STEPS
        return self

    def end(self) -> dict[str, Any]:
        self.hook.close()
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in self.hook.rows]
        owed = states.owed(self.hook.state_dict())
        return {"weights": cases.weights(self.model.module), "rows": rows, "owed": owed}


def same(ours: dict[str, Any], theirs: dict[str, Any], reasons: bool = True) -> None:
    """Bit for bit; the reasons of levels only where the policies are alike."""
    for part in ("weights", "owed"):
        for name, value in ours[part].items():
            other = theirs[part][name]
            assert value is other is None or torch.equal(value, other), (part, name)
    strip: Callable[[Any], Any] = lambda row: row if reasons else without_reasons(row)  # noqa: E731
    assert [*map(strip, ours["rows"])] == [*map(strip, theirs["rows"])]


def without_reasons(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "layers": {k: v for k, v in row["layers"].items() if k != "why"}}


# -- the same change, made by a policy -------------------------------------------------------


def changes(rank: int, counted: bool) -> list[Any]:
    saved = Job(rank, counted, LOW).units(AT).save()
    whole = Job(rank, counted, LOW).units(UNITS).end()
    by_policy = Job(rank, counted, BOTH).units(UNITS).end()
    ends = [
        Job(rank, counted, policy).load(saved, full).units(UNITS - AT).end()
        for policy in (LOW, HIGH)
        for full in (False, True)
    ]
    again = Job(rank, counted, HIGH).load(saved).units(1)  # a branch saved and continued
    kept, other = again.save(), Job(rank, counted, HIGH)
    other.model.module.load_state_dict(kept[0])
    other.sgd.load_state_dict(kept[1])
    other.hook.load_state_dict(kept[2])
    other.step = again.step
    return [whole, by_policy, *ends, other.units(UNITS - AT - 1).end()]


@pytest.mark.parametrize("counted", [False, True])
def test_a_branch_is_the_job_whose_policy_changes_by_itself(counted: bool) -> None:
    for whole, by_policy, *ends in group.run(changes, 2, counted):
        unchanged, changed = ends[:2], ends[2:]
        for end in unchanged:
            same(end, whole)
        for end in changed:
            same(end, by_policy, reasons=False)
        levels = [{*row["layers"]["level"]} - {"dense"} for row in by_policy["rows"]]
        assert levels == [{"low"}] * AT + [{"high"}] * (UNITS - AT)


# -- another compressor, a policy with other levels ------------------------------------------


def others(rank: int) -> dict[str, Any]:
    accordion = {"name": "accordion", "interval": 1, "eta": 0.2}
    saved = Job(rank, False, accordion).units(AT).save()
    found: dict[str, Any] = {"before": states.owed(saved[2]), "rows": saved[2]["rows"]}
    always = {**accordion, "eta": 1e-9, "low": "a", "high": "b"}
    renamed = Job(rank, False, always, levels={"a": 3, "b": 1}).load(saved)
    found["levels"] = renamed.hook.levels
    found["after"] = renamed.units(1).hook.rows
    for name, feedback in (("kept", True), ("dropped", False)):
        table = {**TOPK, "error_feedback": feedback}
        sparse = Job(rank, False, HIGH, compressor=table, levels={"low": 40, "high": 10})
        net = sparse.load(saved).model.module
        grads = state_jobs.gradients(net, sparse.step, rank)
        update = state_jobs.update(sparse.model, sparse.step, rank)
        owed = states.owed(sparse.hook.state_dict())
        found[name] = {"gradients": grads, "update": update, "owed": owed}
    return found


@cache
def of_both() -> list[dict[str, Any]]:
    return group.run(others, 2)


def test_what_is_owed_stays_with_another_compressor() -> None:
    both = of_both()
    for name in ("inner.weight", "head.weight"):
        before, gradients = (
            sum(
                one[key][name].view(-1) if key == "before" else one["kept"][key][name].view(-1)
                for one in both
            )
            / 2
            for key in ("before", "gradients")
        )
        update = both[0]["kept"]["update"][name].view(-1)
        owed = sum(one["kept"]["owed"][name].view(-1) for one in both) / 2
        assert before.abs().max() > 0
        torch.testing.assert_close(update + owed, before + gradients, rtol=1e-12, atol=1e-14)
        for one in both:
            assert one["dropped"]["owed"][name] is None
            sent = one["dropped"]["update"][name]
            assert sent.count_nonzero() <= 2 * round(0.1 * sent.numel())


def test_a_policy_meets_no_level_that_it_does_not_know() -> None:
    for one in of_both():
        assert {*one["levels"].values()} == {"a", "dense"}
        rows = one["after"]
        assert rows[:AT] == one["rows"]  # as the trunk had them
        known = {level for row in rows[:AT] for level in row["layers"]["level"]}
        assert known <= {"low", "high", "dense"}
        assert {*rows[AT]["layers"]["level"]} == {"a", "dense"}


# -- record and mistakes ---------------------------------------------------------------------


def recorded(rank: int, folder: str) -> None:
    trunk = Job(rank, True, LOW, record=f"{folder}/trunk").units(AT)
    saved = trunk.save()
    trunk.units(UNITS - AT).hook.close()
    Job(rank, True, HIGH, record=f"{folder}/branch").load(saved).units(UNITS - AT).hook.close()


def test_a_branchs_record_has_its_trunks_rows_and_says_where_it_begins(tmp_path: Path) -> None:
    group.run(recorded, 2, str(tmp_path))
    trunk, branch = (
        [json.loads(x) for x in (tmp_path / name / "epochs.jsonl").read_text().splitlines()]
        for name in ("trunk", "branch")
    )
    assert len(trunk) == len(branch) == UNITS
    for ours, theirs in zip(branch[:AT], trunk, strict=False):
        assert ours["layers"]["level"] == theirs["layers"]["level"]
    assert "high" in branch[AT]["layers"]["level"]
    events = [json.loads(x) for x in (tmp_path / "branch/events.jsonl").read_text().splitlines()]
    assert [e["epoch"] for e in events if e["event"] == "changed"] == [AT]


def refused(rank: int) -> dict[str, str]:
    trunk = Job(rank, False, LOW).units(AT)
    saved = trunk.save()
    cases.step_of(trunk.model, trunk.sgd, CASE, 0, rank)
    within = trunk.save()
    frozen, less = state_jobs.hooked(frozen=["head"], policy=HIGH, levels=LEVELS)
    assert frozen is not None
    norms = Job(rank, False, {"name": "accordion", "interval": 1})
    plain = Job(rank, False, HIGH, levels={"low": 4, "high": 1}).hook
    other = Job(rank, False, HIGH).hook
    calls: dict[str, Callable[[], Any]] = {
        "within": lambda: other.load_state_dict(within[2], branch=True),
        "layers": lambda: less.load_state_dict(saved[2], branch=True),
        "norms": lambda: norms.hook.load_state_dict(saved[2], branch=True),
        "not a branch": lambda: plain.load_state_dict(saved[2]),
    }
    return {name: sentence(call) for name, call in calls.items()}


def test_mistakes_are_one_sentence() -> None:
    start = "cannot load the hook's state: "
    for said in group.run(refused, 2):
        assert f"{start}it was saved after 1 steps of a unit; branch where a unit" in said["within"]
        assert f"{start}branch and trunk must train the same layers" in said["layers"]
        assert "'head.weight'" in said["layers"] or "'head.bias'" in said["layers"]
        assert (
            f"{start}the policy reads norms, which the trunk's policy did not read" in said["norms"]
        )
        assert f"{start}its level low is 2, this hook's is 4" in said["not a branch"]
