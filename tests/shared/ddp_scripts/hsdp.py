"""One small training on replicas of shards (FSDP2), and in one process as its own oracle.

The oracle computes every replica's gradient by a backward pass over its whole batch and reduces the
stack with the compressors' generators in a simulated world: no shards, buckets or threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ddp_scripts import fsdp
from ddp_scripts.fsdp import BATCH, RATE, RULE, Net, optimiser, weights
from leveled import leveled
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.config import DENSE
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression import make_compressor
from regimes.compression.reducer import Reducer
from regimes.policies import make_policy
from regimes.policies.history import read_history
from regimes.training.gradients import layer_table

REDUCED_IN = {"reduce": torch.bfloat16, "compute": torch.float32, "as computed": None}
UNITS, STEPS = 3, 2


@dataclass(frozen=True)
class Case:
    """How to train; the defaults are the plainest way. ``clip``: the largest norm of a gradient."""

    compressor: Any = "powersgd"
    levels: tuple[tuple[str, Any], ...] = (("low", 2), ("high", 1))
    side: bool = False  # a branch that the second step of each unit uses
    accumulate: int = 1
    clip: float | None = None
    adamw: bool = False
    blocks: str = "plain"  # "checkpoint": one recomputed in backward; "compile": block by block
    reshard: bool = True
    half: str = ""  # "parameters", or with float32 parameters "reduce", "compute" or "as computed"
    rule: Any = None  # a policy in place of RULE
    decay: float = 1.0  # of the rate, from one unit to the next
    measured: bool = False  # with instruments and a guard
    scatter: Any = None  # how gradients are reduced within a replica; None: by FSDP2 itself
    gather: Any = None  # likewise, how weights are gathered

    def rate(self, step: int) -> float:
        return RATE / (10 if self.adamw else 1) * self.decay ** (step // STEPS)


def build(case: Case, seed: int = 1) -> Net:
    torch.manual_seed(seed)
    net = Net(convolves=True).to(torch.float32 if case.half else torch.float64)
    return net.bfloat16() if case.half == "parameters" else net


def loss_of(net: nn.Module, case: Case, step: int, part: int, worker: int, rows: slice) -> Tensor:
    x, y = fsdp.batch(step, part, worker, shape=(2, 4, 4))
    like = torch.float32 if case.half in REDUCED_IN else next(net.parameters()).dtype
    answer = net(x[rows].to(like), case.side and step % STEPS == 1)
    return F.cross_entropy(answer.to(torch.float64), y[rows]) / case.accumulate


def shard(net: Net, case: Case, mesh: DeviceMesh) -> Net:
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": case.reshard}
    if case.half in REDUCED_IN:
        reduced = REDUCED_IN[case.half]
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=reduced)
    if case.blocks == "compile":
        net.inner.compile(backend="eager")
        net.side.compile(backend="eager")
    net.recompute = case.blocks == "checkpoint"
    for module in (net.conv, net.inner, net.frozen, net.side):
        fully_shard(module, **options)
    return fully_shard(net, **options)


def train(net: Any, optimizer: torch.optim.Optimizer, case: Case, worker: int, rows: slice) -> None:
    for step in range(UNITS * STEPS):
        optimizer.param_groups[0]["lr"] = case.rate(step)
        optimizer.zero_grad()
        for part in range(case.accumulate):
            if case.accumulate > 1:
                net.set_requires_gradient_sync(part == case.accumulate - 1)
            loss_of(net, case, step, part, worker, rows).backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        optimizer.step()


def two_dimensions(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def place(rank: int, shards: int) -> tuple[int, slice]:
    """The replica, and the rows of its batch that are this process's."""
    replica, part = divmod(rank, shards)
    return replica, slice(part * BATCH // shards, (part + 1) * BATCH // shards)


def within(case: Case) -> dict[str, Any]:
    """Arguments of ``attach_replicas`` for what goes within replicas."""
    return {"scatter": case.scatter, "gather": case.gather}


def trained(rank: int, replicas: int, shards: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """What one process has in the end, case by case."""
    mesh, (replica, rows) = two_dimensions(replicas, shards), place(rank, shards)
    results = []
    for case in cases:
        net = shard(build(case, seed=1 + replica), case, mesh["shard"])  # replicas start apart
        optimizer = optimiser(net, case)
        measured = {"instruments": {"error", "residual"}, "check_every": 2}
        hook = regimes.attach_replicas(
            net,
            mesh["replicate"],
            optimizer,
            every=STEPS,
            policy=case.rule or RULE,
            compressor=leveled(case.compressor, dict(case.levels)),
            seed=7,
            record=regimes.RecordOptions(**measured if case.measured else {}),
            **within(case),
        )
        train(net, optimizer, case, replica, rows)
        hook.close()
        results.append(
            {
                "weights": weights(net),
                "rows": hook.rows,
                "per_step": hook.header["per_step"],
                "residuals": [state.residual for state in hook.reducer.states],
            }
        )
    return results


def native(rank: int, replicas: int, shards: int) -> list[dict[str, Tensor]]:
    """Without compression: the hook, torch's HSDP, and DDP on as many processes as replicas."""
    case = Case(compressor="dense", levels=(("low", DENSE), ("high", DENSE)))
    (ours,) = trained(rank, replicas, shards, [case])
    mesh, (replica, rows) = two_dimensions(replicas, shards), place(rank, shards)
    net: Any = shard(build(case), case, mesh)
    train(net, optimiser(net, case), case, replica, rows)
    theirs = weights(net)
    net = DistributedDataParallel(build(case), find_unused_parameters=True)
    train(net, optimiser(net, case), case, replica, rows)
    return [ours["weights"], theirs, weights(net.module)]


def beside_ddp(rank: int, case: Case) -> list[dict[str, Any]]:
    """Replicas of one process each, and the hook of DDP."""
    (ours,) = trained(rank, 2, 1, [case])
    net = build(case)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = optimiser(net, case)
    compressor = leveled(case.compressor, dict(case.levels))
    options = {"policy": RULE, "compressor": compressor}
    hook = regimes.attach(model, optimizer, every=STEPS, seed=7, **options)
    train(model, optimizer, case, rank, slice(0, BATCH))
    hook.close()
    levels = [[row["layers"]["level"] for row in rows] for rows in (ours["rows"], hook.rows)]
    return [
        {"weights": ours["weights"], "levels": levels[0]},
        {"weights": weights(net), "levels": levels[1]},
    ]


# -- the oracle ------------------------------------------------------------------------------


def simulated(replicas: int, shards: int, case: Case) -> dict[str, Any]:
    """The same in one process. Compressors that do not join shards see each as a layer."""
    net, world = build(case), World(replicas)
    world.meter.dtype = torch.float64
    parameters = [p for p in net.parameters() if p.requires_grad]
    layers = layer_table(net)
    named = case.compressor if isinstance(case.compressor, dict) else {"name": case.compressor}
    chosen = make_compressor(named)
    pieces = [_pieces(layer, shards, chosen.joins_shards) for layer in layers]
    flat = [piece for of_one in pieces for piece in of_one]
    reducer = Reducer(chosen, flat, world, seed=7)
    compressed = [i for i, layer in enumerate(layers) if layer.compressed]
    rule, values, optimizer = (
        make_policy(case.rule or RULE),
        dict(case.levels),
        optimiser(net, case),
    )
    names = [layers[i].name for i in compressed]
    rows: list[dict[str, Any]] = []
    inside = Inside(replicas, shards, case)
    for unit in range(UNITS):
        decisions = rule.decide(read_history(rows, compressed, "update"), names)
        levels = [DENSE] * len(layers)
        for i, decision in zip(compressed, decisions, strict=True):
            levels[i] = decision.level
        sums = [torch.zeros_like(p) for p in parameters]
        for step in range(unit * STEPS, (unit + 1) * STEPS):
            rate = optimizer.param_groups[0]["lr"] = case.rate(step)
            for state in reducer.states:
                state.rate = rate if chosen.reads_rate else state.rate
            gradients = inside.gradients(net, parameters, step)
            first = 0
            for i, (p, stack) in enumerate(zip(parameters, gradients, strict=True)):
                places = range(first, first := first + len(pieces[i]))
                p.grad = None
                if stack is None:
                    continue
                parts = stack.split([piece.shape[0] for piece in pieces[i]], dim=1)
                level = values.get(levels[i], DENSE)
                own = dict(zip(places, parts, strict=True))
                p.grad = torch.cat(
                    [*reducer.reduce(places, own, dict.fromkeys(own, level)).values()]
                )
                sums[i] += p.grad
            if case.clip is not None:
                nn.utils.clip_grad_norm_(parameters, case.clip)
            optimizer.step()
        norms = [s.norm().item() for s in sums]
        rows.append(
            {
                "lr": case.rate(unit * STEPS),
                "next_lr": case.rate((unit + 1) * STEPS),
                "layers": {"level": levels},
                "model": {},
                "statistics": {"norm:update": norms},
            }
        )
    return {"weights": weights(net), "rows": rows, "residuals": _joined(reducer, pieces)}


def _pieces(layer: Layer, shards: int, joins: bool) -> list[Layer]:
    if joins or shards == 1:
        return [layer]
    parts = [layer.on(i, shards) for i in range(shards)]
    return [Layer(f"{p.name}/{i}", p.shape) for i, p in enumerate(parts) if p.shape[0]]


def _joined(reducer: Reducer, pieces: list[list[Layer]]) -> list[Tensor | None]:
    states = iter(reducer.residuals())
    found = [[next(states) for _ in of_one] for of_one in pieces]
    return [None if x[0] is None else torch.cat([t for t in x if t is not None], 1) for x in found]


MODULES = {  # by call of ``fully_shard``, in the order of its flat tensor
    "conv": ["conv.weight", "conv.bias"],
    "inner": ["inner.weight", "inner.bias"],
    "frozen": ["frozen.weight", "frozen.bias"],
    "side": ["side.weight", "side.bias"],
    "(root)": ["left.weight", "left.bias", "right.bias", "head.weight", "head.bias"],
}


class Inside:
    """The gradients of every replica, which its shards reduce as a plain loop does."""

    def __init__(self, replicas: int, shards: int, case: Case) -> None:
        self.replicas, self.shards, self.case = replicas, shards, case
        table = case.scatter or {}
        self.loops = {
            (replica, module): fsdp.Loop(module, shards, table, replica * shards)
            for replica in range(replicas)
            for module in MODULES
        }

    def gradients(self, net: Net, parameters: list[nn.Parameter], step: int) -> list[Tensor | None]:
        """Of each layer, stacked; None of one that the step does not use."""
        named = dict(net.named_parameters())
        masters = {name: p.detach().clone() for name, p in named.items()}
        if self.case.gather:
            fsdp.round_weights(named, MODULES, self.shards, self.case.gather)
        found = [self._of_replica(net, named, step, replica) for replica in range(self.replicas)]
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(masters[name])
        names = [name for p in parameters for name, q in named.items() if q is p]
        return [torch.stack([x[k] for x in found]) if k in found[0] else None for k in names]

    def _of_replica(
        self, net: Net, named: dict[str, Any], step: int, replica: int
    ) -> dict[str, Tensor]:
        case, apart = self.case, self.case.scatter is not None
        by_rank = []
        for part in range(self.shards) if apart else [None]:
            rows = slice(None)
            if part is not None:
                rows = place(replica * self.shards + part, self.shards)[1]
            net.zero_grad()
            for half in range(case.accumulate):
                loss_of(net, case, step, half, replica, rows).backward()
            by_rank.append({k: p.grad.clone() for k, p in named.items() if p.grad is not None})
        if not apart:
            return by_rank[0]
        means: dict[str, Tensor] = {}
        for module, names in MODULES.items():
            if used := [name for name in names if name in by_rank[0]]:
                own = [[g[name] for name in used] for g in by_rank]
                reduced = self.loops[replica, module].reduce(own, case.scatter["level"])
                means |= zip(used, reduced, strict=True)
        return means


# -- checkpoints -------------------------------------------------------------------------------


def resumed(
    rank: int,
    replicas: int,
    shards: int,
    case: Case,
    folder: str,
    first: int,
    last: int,
    branch: dict[str, Any] | None = None,
    regroup: bool = False,
) -> dict[str, Any]:
    """Steps ``first`` to ``last`` of the training, from a checkpoint and to another one.

    Args:
        branch: another policy from ``first`` on.
        regroup: the checkpoint is of another number of replicas.
    """
    mesh, (replica, rows) = two_dimensions(replicas, shards), place(rank, shards)
    net = shard(build(case), case, mesh["shard"])
    optimizer = optimiser(net, case)
    rule = RULE if branch is None else branch
    compressor = leveled(case.compressor, dict(case.levels))
    options: dict[str, Any] = {"policy": rule, "compressor": compressor, "seed": 7}
    hook = regimes.attach_replicas(
        net,
        mesh["replicate"],
        optimizer,
        every=STEPS,
        record=regimes.RecordOptions(f"{folder}/run", batch_size=BATCH // shards),
        **options,
        **within(case),
    )

    def parts(saved: str | None = None) -> dict[str, Any]:
        model, state = get_state_dict(net, optimizer)
        own = hook.sharded_state(branch=branch is not None, saved=saved)
        return {"model": model, "optimizer": state, "hook": own}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, about itself
        if first:
            before = f"{folder}/{first}"
            dcp.load(found := parts(before if regroup else None), checkpoint_id=before)
            model, state = found["model"], found["optimizer"]
            set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
        begin = [None if s.residual is None else s.residual.clone() for s in hook.reducer.states]
        for step in range(first, last):
            optimizer.zero_grad()
            loss_of(net, case, step, 0, replica, rows).backward()
            optimizer.step()
        if folder:
            dcp.save(parts(), checkpoint_id=f"{folder}/{last}")
    residuals = [None if s.residual is None else s.residual.clone() for s in hook.reducer.states]
    hook.close()
    found = {"weights": weights(net), "residuals": residuals, "rows": hook.rows}
    return found | {"begin": begin, "names": [layer.name for layer in hook.layers]}
