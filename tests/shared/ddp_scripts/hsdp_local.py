"""Local steps of replicas: a sharded model within each, and whole models as the oracle."""

from __future__ import annotations

import warnings
from typing import Any

from ddp_scripts import hsdp
from ddp_scripts.hsdp import Case
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import regimes
from regimes.base.errors import RegimesError

DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
STREAMED = {**DILOCO, "fragments": 2, "delay": 1, "mixing": 0.5}
STEPS = 10
WAYS: dict[str, dict[str, Any]] = {
    "mean": {"policy": 3, "outer": {"states": "average"}},
    "DiLoCo": {"policy": 3, "outer": DILOCO},
    "streamed": {"policy": 4, "outer": STREAMED},
    "powersgd": {"policy": 2, "outer": DILOCO, "compressor": "powersgd", "level": 2},
    "periods": {"policy": "accordion", "periods": {"low": 1, "high": 3}},
}


def steps(
    net: nn.Module, own: Any, local: Any, case: Case, place: tuple[int, slice], span: range
) -> None:
    for step in span:
        own.zero_grad()
        loss = hsdp.loss_of(net, case, step, 0, *place)
        loss.backward()
        own.step()
        local.step()
        local.log(train_loss=loss)


def trained(rank: int, count: int, shards: int, sharded: bool) -> dict[str, Any]:
    """Weights and rows after local steps, way by way."""
    case, found = Case(adamw=True), {}
    mesh, place = hsdp.two_dimensions(count, shards), hsdp.place(rank, shards)
    for name, options in WAYS.items():
        net: Any = hsdp.build(case, seed=1 + place[0])  # replicas start apart
        if sharded:
            hsdp.shard(net, case, mesh["shard"])
        own = hsdp.optimiser(net, case)
        more = {"replicas": mesh["replicate"]} if sharded else {}
        local = regimes.local_steps(net, own, every=4, **more, **options)
        steps(net, own, local, case, place, range(STEPS))
        local.close()
        found[name] = {"weights": hsdp.weights(net), "rows": local.rows}
    return found


def resumed(rank: int, folder: str, first: int, last: int, *cuts: int) -> dict[str, Any]:
    """Steps ``first`` to ``last`` on two replicas of two, from a checkpoint and to another one."""
    case, place = Case(side=True), hsdp.place(rank, 2)
    mesh = hsdp.two_dimensions(2, 2)
    net: Any = hsdp.shard(hsdp.build(case), case, mesh["shard"])
    own = hsdp.optimiser(net, case)
    options = {"compressor": "topk", "level": 20, "outer": DILOCO, "record": f"{folder}/run"}
    local = regimes.local_steps(net, own, replicas=mesh["replicate"], policy=4, every=5, **options)
    replica = f"replica {place[0]}"  # between synchronisations each has its own

    def parts() -> dict[str, Any]:
        model, state = get_state_dict(net, own)
        return {replica: {"model": model, "optimizer": state}, "local": local.sharded_state()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, about itself
        if first:
            found = parts()
            states = found.pop("local")
            dcp.load(found, checkpoint_id=f"{folder}/{first}")
            model, state = found[replica]["model"], found[replica]["optimizer"]
            set_state_dict(net, own, model_state_dict=model, optim_state_dict=state)
            dcp.load({"local": states}, checkpoint_id=f"{folder}/{first}")
        steps(net, own, local, case, place, range(first, last))
        dcp.save(parts(), checkpoint_id=f"{folder}/{last}")
    local.close()
    return {"weights": hsdp.weights(net), "rows": local.rows}


def refused(rank: int) -> list[str]:
    """What is said of a sharded model without the other dimension, and of other levels."""
    case, mesh, said = Case(), hsdp.two_dimensions(2, 2), []
    net: Any = hsdp.shard(hsdp.build(case), case, mesh["shard"])
    own = hsdp.optimiser(net, case)
    for options in (
        {},
        {"replicas": mesh},
        {"replicas": mesh["replicate"], "policy": 2 + mesh["replicate"].get_local_rank()},
    ):
        try:
            said.append("")
            regimes.local_steps(net, own, timeout=20.0, **options)
        except RegimesError as error:
            said[-1] = str(error)
    return said
