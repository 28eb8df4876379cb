"""What the processes do whose hook's state outlives the model's layers or the processes' number.

No optimiser steps here: weights stay as they were built, so that hooks side by side see the same
gradients, and ``updates`` are all that a state can change.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_scripts import cases
from ddp_scripts.cases import Case
from ddp_scripts.jobs import sentence
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regimes import attach
from regimes.collectives.sharded_models import load_parts, save_parts
from regimes.hook.ddp import Hook
from regimes.job.state import place_state

CASE = Case()
Hooked = tuple[DistributedDataParallel, Hook]
RESIDUAL = "inner.weight"  # a compressed layer, whose residual is looked at


def hooked(
    net: nn.Module | None = None, group: Any = None, frozen: Sequence[str] = (), **settings: Any
) -> Hooked:
    """A hooked model; ``frozen``: modules of it that are not trained."""
    net = cases.build(CASE) if net is None else net
    for name in frozen:
        net.get_submodule(name).requires_grad_(False)
    model = DistributedDataParallel(net, process_group=group)
    chosen = {"policy": CASE.policy, "levels": dict(CASE.levels), "seed": 7, **settings}
    return model, attach(model, **chosen)


def gradients(net: nn.Module, step: int, rank: int) -> dict[str, Tensor]:
    """This process's own, which no hook has seen."""
    names = {name: p for name, p in net.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(cases.loss_of(net, CASE, step, 0, rank), list(names.values()))
    return dict(zip(names, found, strict=True))


def update(model: DistributedDataParallel, step: int, rank: int, scale: float = 1.0) -> Any:
    """What one backward pass leaves in ``.grad``."""
    model.zero_grad()
    (cases.loss_of(model, CASE, step, 0, rank) * scale).backward()
    found = {n: p.grad for n, p in model.module.named_parameters() if p.requires_grad}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def reread(value: Any) -> Any:
    """Written to a file and read back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def heard(action: Callable[[], Any]) -> list[str]:
    """The warnings of an action."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught]


# -- the number of processes -----------------------------------------------------------------


def resized(rank: int, stage: int, folder: Path, by_torch: bool = False) -> dict[str, Any]:
    """A hook that goes on from the file that the stage before has left, whose processes may have
    been more or fewer, and leaves one itself.

    Args:
        by_torch: it is a checkpoint of ``torch.distributed.checkpoint``.
    """
    model, hook = hooked()
    first = 10 * stage
    full = None
    if stage:
        full = torch.load(folder / f"{stage - 1}.pt", weights_only=True) if rank == 0 else None
        if by_torch:
            place = folder / f"dcp-{stage - 1}"
            load_parts({"hook": hook.sharded_state(saved=place)}, place)
        else:
            hook.load_full_state_dict(full)
    found = {
        "given": full,
        "loaded": hook.state_dict(),
        "levels": hook.levels,
        "gradients": gradients(model.module, first, rank),
    }
    found["updates"] = [update(model, first + i, rank) for i in range(3)]
    if stage % 2 == 0:  # every other state is saved within an epoch
        hook.epoch_end(lr=0.1)
        found["updates"] += [update(model, first + 3, rank)]
    saved = hook.full_state_dict()
    if by_torch:
        save_parts({"hook": hook.sharded_state()}, folder / f"dcp-{stage}")
    assert (saved is None) == (rank > 0)
    if saved is not None:
        torch.save(saved, folder / f"{stage}.pt")
    return found | {"rows": hook.rows}


def same_number(rank: int) -> dict[str, Any]:
    """A hook, and two more that continue from its own files and from the full one; then what the
    full one meets on one process alone. The loss is scaled, differently before and after."""
    scale = {"now": 8.0}

    class Scaler:
        def get_scale(self) -> float:
            return scale["now"]

    made = [hooked(scaler=Scaler(), signal="global") for _ in range(3)]
    for step in range(4):
        update(made[0][0], step, rank, scale["now"])
        if step == 1:
            made[0][1].epoch_end(lr=0.1)
    own, full = reread(made[0][1].state_dict()), reread(made[0][1].full_state_dict())
    scale["now"] = 2.0
    update(made[1][0], 0, rank, scale["now"])  # not in the way of what is loaded
    made[1][1].load_state_dict(own)
    made[2][1].load_full_state_dict(full)
    loaded = [hook.state_dict() for _, hook in made[1:]]
    after = [[update(model, step, rank, scale["now"]) for step in (5, 6)] for model, _ in made]
    for _, hook in made:
        hook.epoch_end(lr=0.1)
    alone = dist.new_group([0])  # all processes make it
    refused = ""
    if rank == 0:
        _, hook = hooked(group=alone, signal="global")
        refused = sentence(lambda: hook.load_full_state_dict(full))
    return {
        "own": own,
        "loaded": loaded,
        "after": after,
        "rows": [h.rows for _, h in made],
        "refused": refused,
    }


def refused(rank: int) -> dict[str, str]:
    """The sentence of each mistake that process 0 makes alone."""
    model, hook = hooked()
    update(model, 0, rank)
    own, full = hook.state_dict(), hook.full_state_dict()
    layers = own["layers"]
    alien = {f"old.{name}": layer for name, layer in layers.items()}
    _, other = hooked()

    def load(wrong: Any) -> Callable[[], Any]:
        return lambda: other.load_full_state_dict(wrong if rank == 0 else None)

    def without(key: str) -> Any:  # of process 1 alone
        return full and full | {"parts": [full["parts"][0], _less(full["parts"][1], key)]}

    found = {
        "nothing": load(None),
        "one of them": load(own),
        "other things": load({"a": 1}),
        "less than all": load(full and full | {"parts": full["parts"][:0:-1] * 2}),
        "no layers": load(without("layers")),
        "no process": load(without("process")),
        "full for one": lambda: other.load_state_dict(full or own | {"parts": [1, 2]}),
        "nothing in common": lambda: other.load_state_dict(
            {**own, "layers": alien, "parts": [{**own["parts"][0], "layers": alien}]}
        ),
        "another number": lambda: other.load_state_dict(place_state(own, 2, 4, [2])),
        "damaged": lambda: other.load_state_dict(_less(own, "gauges")),
        "fine": load(full),
    }
    heard = {name: sentence(action) for name, action in found.items()}
    ladder = {"name": "error-ladder", "levels": ["high", "low"]}
    model, hook = hooked(policy=ladder)
    update(model, 0, rank)
    return {**heard, "within an epoch": sentence(hook.full_state_dict)}


def due(rank: int) -> dict[str, Any]:
    """A policy that reads what cannot be saved within a unit: saved when its steps are done, and
    then continued beside the hook that goes on."""
    settings = {"policy": {"name": "error-ladder", "levels": ["high", "low"]}, "every": 3}
    hooks, found = [], {}
    for _ in range(2):
        net = cases.build(CASE)
        model = DistributedDataParallel(net)
        # steps that change no weight: a pass without a step would not count
        idle = torch.optim.SGD(net.parameters(), lr=1e-300)
        options = {"levels": dict(CASE.levels), "seed": 7, "optimizer": idle, **settings}
        hooks.append((model, attach(model, **options), idle))
    (model, hook, step), (other, continued, others_step) = hooks
    for number in range(2):
        update(model, number, rank)
        step.step()
    found["early"] = sentence(hook.full_state_dict)
    update(model, 2, rank)
    step.step()
    full = hook.full_state_dict()
    found["units"] = len(hook.rows)
    continued.load_full_state_dict(full)
    for number in range(3, 7):
        a, b = update(model, number, rank), update(other, number, rank)
        step.step()
        others_step.step()
        assert all(torch.equal(a[name], b[name]) for name in a)
    return {**found, "rows": [h.rows for _, h, _ in hooks]}


def _less(state: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != key}


# -- the model's layers ----------------------------------------------------------------------


def unfrozen(rank: int, policy: dict[str, Any], within: bool) -> dict[str, Any]:
    """A hook goes on; a second one continues from its state with two layers more, a third from the
    second's with two less; a fourth is new.

    Args:
        within: the state is saved within an epoch.
    """
    frozen = ["inner", "side"]
    made = [hooked(frozen=names, policy=policy) for names in (frozen, [], ["head"], [])]
    old, more, less = made[:3]
    for step in range(4):
        update(old[0], step, rank)
        if step % 2:
            old[1].epoch_end(lr=0.1)
    if within:
        update(old[0], 4, rank)
    said = [heard(lambda: more[1].load_state_dict(reread(old[1].state_dict())))]
    said += [heard(lambda: less[1].load_state_dict(reread(more[1].state_dict())))]
    rows = [copy.deepcopy(hook.rows) for _, hook in made]
    levels = [hook.levels for _, hook in made]
    updates = [[update(model, step, rank) for step in (5, 6)] for model, _ in made]
    decided = [
        {k: [d.level, (d.why or {}).get("rule")] for k, d in hook.epoch_end(lr=0.1).items()}
        for _, hook in made
    ]
    return {
        "said": said,
        "rows": rows,
        "levels": levels,
        "updates": updates,
        "decided": decided,
        "norms": [hook.rows[-1]["statistics"] for _, hook in made],
        "names": [[x.name for x in hook.layers] for _, hook in made],
    }


def compiled(rank: int) -> dict[str, Any]:
    """A plain model, one compiled as a whole, one in a part, and one in the user's own wrapper."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any) -> Tensor:
            return self.module(*args)

    part = cases.build(CASE)
    part.inner = torch.compile(part.inner, backend="eager")  # type: ignore[assignment]
    whole = torch.compile(cases.build(CASE), backend="eager")
    nets: list[Any] = [None, whole, part, Wrapper(cases.build(CASE))]
    random = {"compressor": "randomk", "levels": {"low": 50, "high": 10}}
    made = [hooked(net, **random) for net in nets]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        before = [list(update(model, 0, rank).values()) for model, _ in made]
        state = made[0][1].state_dict()
        news = heard(lambda: made[1][1].load_state_dict(state))
        news += heard(lambda: made[2][1].load_state_dict(made[1][1].state_dict()))
        after = [list(update(model, 1, rank).values()) for model, _ in made[:3]]
    return {
        "names": [[x.name for x in hook.layers] for _, hook in made],
        "before": before,
        "after": after,
        "news": news,
    }
