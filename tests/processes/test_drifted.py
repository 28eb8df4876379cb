"""Weights that a script changes beside a job: replicas end equal, or an error names the cause
(oracle: the weights of both processes, side by side)."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ddp_scripts import group
from ddp_scripts.fsdp import flat_mesh, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.errors import RegimesError

STEPS, UNIT = 12, 4
QUIET = {"summary": False, "timeout": 30.0}
KINDS = ["DDP", "replicas", "local"]


class Net(nn.Module):
    """A network with a side that a pass may leave out, a BatchNorm and a Dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.side, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.2)
        self.takes_side = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(torch.tanh(self.first(x))))
        return self.last(x + self.side(x) if self.takes_side else x)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def all_weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([whole(p).detach().flatten() for p in net.parameters()])


def divide(net: nn.Module, mesh: Any) -> None:
    for part in (*net.children(), net):
        if [*part.parameters()]:
            fully_shard(part, mesh=mesh)


def pairs(outer: int) -> Any:
    shape = (outer, 2 // outer)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


# -- what a script does to the model, its optimiser, on this rank ----------------------------------


def write(net: Any, factor: float) -> None:
    with torch.no_grad():
        for p in trained(net):
            p.mul_(factor)


def rebind(net: Any, *names: str) -> None:
    for name in names:
        p = net.get_parameter(name)
        p.data = p.data.clone()


def add_group(net: Any, optimizer: Any) -> None:
    net.first.requires_grad_(True)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if more := [p for p in net.first.parameters() if id(p) not in held]:
        optimizer.add_param_group({"params": more})


def step_inside(net: Any) -> None:
    def step(parameter: Any) -> None:
        local = getattr(parameter, "_local_tensor", parameter)
        grad = getattr(parameter.grad, "_local_tensor", parameter.grad)
        local.detach().sub_(0.05 * grad)

    for parameter in trained(net):
        parameter.register_post_accumulate_grad_hook(step)


def assign(net: Any, optimizer: Any) -> None:
    """Other parameters, and a new optimiser of them in the place of the old one."""
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
    optimizer.__dict__.update(torch.optim.SGD(trained(net), lr=0.1).__dict__)


def set_rate(optimizer: Any, rate: float) -> None:
    for one in optimizer.param_groups:
        one["lr"] = rate


WAYS: dict[str, Any] = {
    "rebound": lambda net, optimizer, rank: rebind(net, "first.weight", "last.bias"),
    "rebound on one": lambda net, optimizer, rank: rebind(net, *["last.weight"] * rank),
    "scaled": lambda net, optimizer, rank: write(net, 0.9),
    "scaled apart": lambda net, optimizer, rank: write(net, 1 - 0.1 * rank),
    "frozen": lambda net, optimizer, rank: net.last.requires_grad_(False),
    "frozen on one": lambda net, optimizer, rank: net.last.requires_grad_(not rank),
    "unfrozen": lambda net, optimizer, rank: add_group(net, optimizer),
    "unused": lambda net, optimizer, rank: setattr(net, "takes_side", False),
    "unused on one": lambda net, optimizer, rank: setattr(net, "takes_side", not rank),
    "used again": lambda net, optimizer, rank: setattr(net, "takes_side", True),
    "in evaluation": lambda net, optimizer, rank: net.eval(),
    "in evaluation on one": lambda net, optimizer, rank: net.train(not rank),
    "stepped inside": lambda net, optimizer, rank: step_inside(net),
    "another rate on one": lambda net, optimizer, rank: set_rate(optimizer, 0.1 + 0.05 * rank),
    "zeroed": lambda net, optimizer, rank: optimizer.zero_grad(set_to_none=False),
}
FURTHER = {
    "nothing": lambda *_: None,
    "assign": lambda net, optimizer, rank: assign(net, optimizer),
}


def job(rank: int, kind: str, ways: tuple[str, ...], compares: bool = True) -> Any:
    """A job in which the script does one of the ways after the other, two steps apart. Returns what
    was raised, how far the weights are apart after that or at the end, and the number of units."""
    net: Any = Net().double()
    net.first.requires_grad_("unfrozen" not in ways)
    options: dict[str, Any] = {**QUIET, "every": UNIT}
    if kind == "replicas":
        mesh = pairs(2)
        divide(net, mesh["shard"])
        options["replicas"] = mesh["replicate"]
    model = DistributedDataParallel(net, find_unused_parameters=True) if kind == "DDP" else net
    optimizer = torch.optim.SGD(trained(net), lr=0.1, momentum=0.9, weight_decay=0.1)
    if not compares:
        options["compare_weights"] = False
    attachment: Any
    if kind == "local":
        attachment = regimes.local_steps(net, optimizer, policy=2, **options)
    else:
        pressed = {"compressor": "powersgd", "level": 1}
        attachment = regimes.attach(model, optimizer, **pressed, **options)
    torch.manual_seed(10 + rank)
    said = ""
    try:
        for step in range(STEPS):
            if step % 2 and step // 2 < len(ways):
                (WAYS | FURTHER)[ways[step // 2]](net, optimizer, rank)
            optimizer.zero_grad()
            model(torch.randn(8, 6).double() + rank).square().mean().backward()
            optimizer.step()
            if kind == "local":
                attachment.step()
        attachment.close()
    except RegimesError as error:
        said = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RegimesError):
            attachment.close()
    own = all_weights(net)
    both = [torch.zeros_like(own) for _ in range(2)]
    torch.distributed.all_gather(both, own)
    return said, float((both[0] - both[1]).abs().max()), len(attachment.rows)


def run(*jobs: tuple[str, tuple[str, ...]]) -> Iterator[tuple[Any, list[Any]]]:
    """Each with what its processes end with."""
    return zip(jobs, group.run_in_turn(2, *((job, *one) for one in jobs)), strict=True)


def test_replicas_that_nothing_disturbs_are_equal() -> None:
    """Nor a parameter with other memory, ``p.data = ...``, as in a hand-written SAM."""
    for one, found in run(*((kind, (what,)) for kind in KINDS for what in ("nothing", "rebound"))):
        assert found == [("", 0.0, STEPS // UNIT)] * 2, one


ERRORS = {  # what a script does to the model -> what is said, of hooks
    "scaled apart": "TrainingError: process 1 holds other weights than .*: the replicas have dri",
    "assign": "ConfigError: .*first.weight.* is another object than the one that was attached",
    "unfrozen": "ConfigError: .*first.weight.* is trained, and was not when this job was attached",
}


def test_weights_that_drift_apart_are_named_on_all_processes() -> None:
    for (kind, (what,)), found in run(*((k, (w,)) for k in ("DDP", "replicas") for w in ERRORS)):
        if (kind, what) == ("replicas", "assign"):  # torch's HSDP follows them, as does the hook
            assert [x[:2] for x in found] == [("", 0.0)] * 2
            continue
        for said, spread, _ in found:
            assert re.search(ERRORS[what], said), (kind, said)
            assert spread > 0, (kind, what)
        assert found[0][0] == found[1][0]


def test_local_steps_go_on_with_the_objects_that_the_model_has() -> None:
    (_, assigned), (_, unfrozen) = run(("local", ("assign",)), ("local", ("unfrozen",)))
    assert [x[:2] for x in assigned] == [("", 0.0)] * 2
    for said, _, _ in unfrozen:
        assert "is trained, and was not when this job was attached" in said


def test_one_word_turns_the_comparison_off() -> None:
    for said, spread, _ in group.run(job, 2, "DDP", ("scaled apart",), False):
        assert said == ""
        assert spread > 0


def drawn(seeds: range) -> list[tuple[str, tuple[str, ...]]]:
    """Kinds of job in turn, each with three ways to change a model, one after the other."""
    return [(KINDS[seed % 3], tuple(random.Random(seed).sample([*WAYS], 3))) for seed in seeds]


def check_equal_or_named(cases: list[tuple[str, tuple[str, ...]]]) -> None:
    """After any of them replicas are equal, or both processes say the same of who differs."""
    for case, (mine, theirs) in run(*cases):
        said, spread, units = mine
        assert mine == theirs, case
        if said:
            assert re.match(r"(Config|Training)Error: .*(process|used) ", said), (case, said)
        else:
            assert (spread, units) == (0.0, STEPS // UNIT), case


def test_whatever_a_script_does_replicas_are_equal_or_named() -> None:
    cases = drawn(range(18))
    assert {way for _, ways in cases for way in ways} == {*WAYS}
    check_equal_or_named(cases)


@pytest.mark.slow
@pytest.mark.parametrize("first", [100, 200])
def test_more_of_what_a_script_may_do(first: int) -> None:
    check_equal_or_named(drawn(range(first, first + 45)))


# -- FSDP2 -----------------------------------------------------------------------------------------


def stepped_inside(rank: int, inside: bool, scatter: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """FSDP2's own collectives under optimisers that step within backward, or after it: weights and
    units."""
    net, mesh = plain(), flat_mesh(2)
    divide(net, mesh)
    each = {p: torch.optim.SGD([p], lr=0.05) for p in net.parameters()}
    hook = regimes.attach_shards(net, mesh, [*each.values()], scatter=scatter, every=5, **QUIET)

    def step(parameter: Any) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    if inside:
        for parameter in each:
            parameter.register_post_accumulate_grad_hook(step)
    torch.manual_seed(3 + rank)
    for _ in range(STEPS):
        net(torch.randn(8, 6).double()).square().mean().backward()
        if not inside:
            for parameter in each:
                step(parameter)
    return all_weights(net), len(hook.rows)


def test_steps_within_backward_are_steps_after_it() -> None:
    tables = {"level": 8}, {"level": 4, "stochastic": False, "error_feedback": True}
    ways = [(stepped_inside, inside, x) for x in tables for inside in (True, False)]
    found = group.run_in_turn(2, *ways)
    for inside, after in zip(found[::2], found[1::2], strict=True):
        for (mine, units), (theirs, as_many) in zip(inside, after, strict=True):
            assert torch.equal(mine, theirs)
            assert units == as_many == 2


def reloaded(rank: int, way: str, chosen: dict[str, Any], assign: bool) -> tuple[Any, list[int]]:
    """The weights of a job that loads other ones on its way, twice, and the steps of its units;
    each optimiser is a new one."""
    net: Any = plain()
    mesh = pairs(1 if way == "both" else 2)
    place: dict[str, Any] = {"replicas": mesh["replicate"]}
    inside = mesh["shard"]
    if way == "shards":
        inside = flat_mesh(2)
        place = {"shards": inside}
    if way == "both":
        place |= {"shards": mesh["shard"], "scatter": {"level": 8}}
    divide(net, inside)
    optimizer = torch.optim.SGD(trained(net), lr=0.1)
    hook = regimes.attach(net, optimizer, every=UNIT, **place, **chosen, **QUIET)
    torch.manual_seed(10 + rank)
    for step in range(2 * UNIT):
        if step in (0, 3, UNIT):
            values = {k: v.clone() * 0.9 for k, v in net.state_dict().items()}
            net.load_state_dict(values, assign=assign)
            optimizer = torch.optim.SGD(trained(net), lr=0.1)
        optimizer.zero_grad()
        net(torch.randn(8, 6).double() + rank).square().mean().backward()
        optimizer.step()
    hook.close()
    return all_weights(net), [row["steps"] for row in hook.rows]


def test_parameters_in_the_places_of_others_are_exchanged_like_them() -> None:
    """Oracle: the same job, in which the same values were loaded into the parameters."""
    ways: list[tuple[str, dict[str, Any]]] = [
        (way, {"compressor": name, "level": level})
        for way in ("replicas", "both")
        for name, level in (("powersgd", 1), ("quantised-all-reduce", 4))
    ]
    ways += [
        ("shards", {"scatter": {"level": 4, "error_feedback": owes, "stochastic": not owes}})
        for owes in (False, True)
    ]
    jobs = [(reloaded, *way, assign) for way in ways for assign in (True, False)]
    found = group.run_in_turn(2, *jobs)
    for way, moved, loaded in zip(ways, found[::2], found[1::2], strict=True):
        for (mine, units), (theirs, as_many) in zip(moved, loaded, strict=True):
            assert torch.equal(mine, theirs), way
            assert units == as_many, way
