"""Curvature of a model that FSDP2 divides (oracles: the whole model on all samples at once; the job
without instruments; the number of calls of fully_shard)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import regimes
from regimes.base.seeding import derive_seed
from regimes.collectives.process_group import GATHER
from regimes.instruments.hessian import (
    HessianProduct,
    critical_sharpness,
    eigenvalues,
    layer_traces,
)

STEPS, SHARE, SEED = 3, 6, 3
TOLERANCE = 1e-7  # of a residual; an eigenvalue errs by its square
TABLES: dict[str, Any] = {"largest": 2, "probes": 2, "tolerance": TOLERANCE, "max_products": 60}
GROUPS = 3  # calls of fully_shard
# the modules that each of them divides, by the name of its layer
MODULES = {
    "(root)": ["left.weight", "left.bias", "head.weight"],
    "inner": ["inner.weight", "inner.bias"],
    "norm": ["norm.weight", "norm.bias"],
}


class Net(nn.Module):
    """A weight of two layers, a frozen one, statistics, dropout; five rows, which no number of
    shards divides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.right.weight = self.left.weight
        self.right.bias.requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.norm(self.inner(x))))
        return self.head(self.right(torch.tanh(self.left(x))))


def build() -> Net:
    torch.manual_seed(0)
    return Net().double()


def samples(seed: int, count: int = SHARE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return x, x.argmax(1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def divide(net: Net, mesh: DeviceMesh, **options: Any) -> Any:
    fully_shard(net.inner, mesh=mesh, **options)
    usual = options.get("mp_policy", MixedPrecisionPolicy())
    # statistics are never of another type
    exact = MixedPrecisionPolicy(torch.float64, output_dtype=usual.param_dtype)
    fully_shard(net.norm, mesh=mesh, **options | {"mp_policy": exact})
    return fully_shard(net, mesh=mesh, **options)


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {
        k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone()
        for k, v in tensors.items()
    }


@contextmanager
def gathers() -> Iterator[list[Any]]:
    """The all-gathers of tensors inside, torch's own included."""
    calls, usual = list[Any](), getattr(dist, GATHER)

    def gather(*args: Any, **options: Any) -> Any:
        calls.append(args[1].numel())
        return usual(*args, **options)

    with patch.object(dist, GATHER, gather):
        yield calls


def trained(rank: int, how: str, measured: bool, folder: str) -> dict[str, Any]:
    """A unit, and a few steps more: its row, and the state of the model where it was measured and
    in the end."""
    flat = how == "1 x 4"
    mesh = init_device_mesh("cpu", (4,) if flat else (2, 2), mesh_dim_names=("a", "b")[: 2 - flat])
    given: dict[str, Any] = {"gather": {"level": 8} if flat else {}, "scatter": {"level": 8}}
    if not flat:
        given["compressor"] = regimes.PowerSGD(rank=2)
    net = divide(build(), mesh if flat else mesh["b"])
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    if measured:
        given["record"] = regimes.RecordOptions(
            folder,
            instruments={"curvature": TABLES, "sharpness": {}},
            probe=(loss, [samples(100 + rank)]),
        )
    attach: Any = regimes.attach_shards if flat else regimes.attach_replicas
    hook = attach(net, mesh if flat else mesh["a"], optimizer, seed=SEED, **given)
    # as the optimiser steps them: the module may have them whole, and rounded
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    states, gathered = [], 0
    torch.manual_seed(rank)
    for unit in range(2):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(net, samples(1000 * unit + 10 * step + rank)).backward()
            optimizer.step()
        for buffer in net.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= 4
        with torch.no_grad():  # leaves the root's weights whole
            net.eval()(samples(5)[0])
            net.train()
        states.append(whole(tensors))
        if not unit:
            with gathers() as calls:
                hook.epoch_end()
            gathered = len(calls)
    hook.close()
    return {
        "row": hook.rows[0],
        "states": states,
        "gathers": gathered,
        "weights": hook.world.instruments.calls.get("weights", 0),
        "draw": float(torch.rand(1)),
        "layers": [layer.name for layer in hook.layers],
    }


def continued(rank: int, folder: str) -> list[dict[str, Any]]:
    """What is measured after a unit, with the weights: of a job, and of one that goes on from its
    state, whose searches begin where the last ones have ended."""
    mesh, found = init_device_mesh("cpu", (4,)), []
    for going_on in (False, True):
        net = divide(build(), mesh).eval()
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        tables = {"curvature": {"tolerance": 0.1}, "sharpness": {}}
        record = regimes.RecordOptions(instruments=tables, probe=(loss, [samples(100 + rank)]))
        hook = regimes.attach_shards(net, mesh, optimizer, scatter={"level": 8}, record=record)
        for unit in range(2):
            if not unit and going_on:
                state = {"model": net.state_dict(), "hook": hook.sharded_state()}
                dcp.load(state, checkpoint_id=folder)
                continue
            optimizer.zero_grad()
            loss(net, samples(10 * unit + rank)).backward()
            optimizer.step()
            hook.epoch_end()
            if not unit:
                state = {"model": net.state_dict(), "hook": hook.sharded_state()}
                dcp.save(state, checkpoint_id=folder)
        found.append({"row": hook.rows[1]["model"], **whole(dict(net.named_parameters()))})
    return found


def expected(state: dict[str, Tensor], by_module: bool) -> Any:
    """What the instruments find of the whole model, on all samples at once."""
    net = build()
    net.load_state_dict(state, strict=False)
    shares = [samples(100 + rank) for rank in range(4)]
    batches = [(torch.cat([x for x, _ in shares]), torch.cat([y for _, y in shares]))]
    hessian, seed = (
        HessianProduct(net, loss, batches, mode="eval"),
        derive_seed(SEED, "curvature", 0),
    )
    top = eigenvalues(hessian, largest=2, seed=seed, tolerance=TOLERANCE, max_products=60)
    layers = MODULES if by_module else None
    traces = [t.value for t in layer_traces(hessian, layers=layers, probes=2, seed=seed).values()]
    sharp = critical_sharpness(net, loss, batches, mode="eval")
    model = {"eigenvalue": float(top.largest[0]), "eigenvalue_2": float(top.largest[1])}
    model |= {"hessian_trace": sum(traces), "critical_sharpness": sharp.value}
    return model, traces


def without_a_job(rank: int) -> dict[str, Any]:
    """`whole_model` without a job: numbers, all-gathers, and what is left of it."""
    mesh, batch = init_device_mesh("cpu", (4,)), samples(100 + rank)
    policy = MixedPrecisionPolicy(torch.bfloat16)  # no part of a measurement
    net, found = divide(build(), mesh, reshard_after_forward=2, mp_policy=policy), {}
    with torch.no_grad():
        net.eval()(batch[0])
    compiled = []  # torch's own counter takes seconds to import
    if rank == 0:  # so does the compiler
        net.compile(backend=lambda graph, inputs: compiled.append(graph) or graph)
    before = [(module, dict(module._parameters)) for module in net.modules()]
    for products in (2, 8):
        with gathers() as calls, regimes.whole_model(net) as mean:
            found[f"bytes {products}"] = sum(p.numel() * p.element_size() for p in net.parameters())
            copies = [ref(p) for p in net.parameters()]
            loss(net, batch)
            for kind in ("hessian", "gauss-newton"):
                hessian = HessianProduct(net, loss, [batch], mode="eval", mean=mean, kind=kind)
                vectors = torch.ones(products, hessian.dimension, dtype=torch.float64)
                found[kind] = hessian(vectors)[-1]
                del hessian
        found[f"gathers {products}"] = len(calls)
        found[f"kept {products}"] = sum(copy() is not None for copy in copies)
    found["compiled"] = len(compiled)
    found["same"] = all(
        module._parameters.keys() == slots.keys()
        and all(module._parameters[name] is p for name, p in slots.items())
        for module, slots in before
    )
    return found


LIMIT = 1e-10
HOW = ["2 x 2", "1 x 4"]


def everything(rank: int, folder: str) -> dict[str, Any]:
    """What jobs have, with instruments and without; and what `whole_model` gives without a job."""
    return {
        "alone": without_a_job(rank),
        "jobs": {
            how: [trained(rank, how, x, f"{folder}/{how}") for x in (True, False)] for how in HOW
        },
    }


@cache
def found() -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        return group.run(everything, 4, folder)


def job(how: str) -> list[tuple[Any, Any]]:
    """By process, with instruments and without."""
    return [one["jobs"][how] for one in found()]


@pytest.mark.parametrize("how", HOW)
def test_a_job_measures_what_the_whole_model_has(how: str) -> None:
    measured = [one for one, _ in job(how)]
    by_module = how == "1 x 4"
    if by_module:
        assert measured[0]["layers"] == [*MODULES]
    model, traces = expected(measured[0]["states"][0], by_module)
    for one in measured:
        for name, value in model.items():
            assert one["row"]["model"][name] == pytest.approx(value, rel=LIMIT, abs=LIMIT), name
        by_layer = one["row"]["statistics"]["hessian_trace"]
        assert by_layer == pytest.approx(traces, rel=LIMIT, abs=LIMIT)


@pytest.mark.parametrize("how", HOW)
def test_the_job_is_the_one_without(how: str) -> None:
    for measured, plain in job(how):
        for a, b in zip(measured["states"], plain["states"], strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[name], b[name]) for name in b)
        assert measured["draw"] == plain["draw"]
        a, b = measured["row"], plain["row"]
        assert a["layers"] == b["layers"]
        assert a["collectives"] == b["collectives"]
        assert a["statistics"].items() >= b["statistics"].items()


@pytest.mark.parametrize("how", HOW)
def test_each_group_of_parameters_is_gathered_once_for_a_reading(how: str) -> None:
    """Two instruments read, each with weights of its own; the check before the first step is a
    third. Between replicas, sums among shards have all-gathers of their own."""
    for measured, plain in job(how):
        assert measured["weights"] == GROUPS * 3
        assert plain["weights"] == 0
        if how == "1 x 4":
            assert measured["gathers"] == GROUPS * 2
            assert plain["gathers"] == 0


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return [one["alone"] for one in found()]


def test_products_need_no_further_gather_and_leave_nothing(alone: Any) -> None:
    net = build()
    size = sum(p.numel() for p in net.parameters()) * 8  # bytes of float64
    for process in alone:
        for products in (2, 8):
            assert process[f"gathers {products}"] == GROUPS
            assert process[f"bytes {products}"] == size
            assert process[f"kept {products}"] == 0
        assert process["same"]
        assert process["compiled"] == 0


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
def test_products_are_those_of_the_whole_model(kind: str, alone: Any) -> None:
    net = build().eval()
    shares = [samples(100 + rank) for rank in range(4)]
    batch = torch.cat([x for x, _ in shares]), torch.cat([y for _, y in shares])
    hessian = HessianProduct(net, loss, [batch], kind=kind)
    image = hessian(torch.ones(hessian.dimension, dtype=torch.float64))
    assert image.norm() > 0.1
    for process in alone:
        assert (process[kind] - image).abs().max() < LIMIT


@pytest.mark.slow
def test_a_job_that_goes_on_measures_the_same_bits(tmp_path: Path) -> None:
    for whole, resumed in group.run(continued, 4, str(tmp_path)):
        assert whole.pop("row") == resumed.pop("row")
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
