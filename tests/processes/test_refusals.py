"""A hook or local steps held wrong: one sentence, before any step, that names what is wrong. On one
process where a sentence depends on no other; where it does, on each of two the same."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate as copied
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes import compression
from regimes.base.errors import ConfigError
from regimes.compression.powersgd import PowerSGD
from regimes.job.state import place_state

# -- how each is held ------------------------------------------------------------------------------


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def grid(outer: int = 2, names: tuple[str, str] = ("replicate", "shard")) -> DeviceMesh:
    shape = (outer, dist.get_world_size() // outer)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def net(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4, **options), nn.Linear(4, 4, **options))


def divided(mesh: DeviceMesh, model: Any = None, **options: Any) -> Any:
    return fully_shard(net() if model is None else model, mesh=mesh, **options)


def blocks_only(mesh: DeviceMesh) -> Any:
    model = net()
    fully_shard(model[0], mesh=mesh)
    return model


def shards(model: Any = None, mesh: Any = None, **options: Any) -> Any:
    mesh = mesh or line()
    model = divided(mesh) if model is None else model
    return regimes.attach_shards(model, mesh, timeout=20.0, **{"scatter": {"level": 4}} | options)


def replicas(model: Any = None, mesh: Any = None, **options: Any) -> Any:
    both = grid()
    model = divided(both["shard"]) if model is None else model
    return regimes.attach_replicas(model, mesh or both["replicate"], timeout=20.0, **options)


def ddp(model: Any = None, **options: Any) -> regimes.Hook:
    given = {"policy": "accordion"} | options
    return regimes.attach(DistributedDataParallel(net() if model is None else model), **given)


def local(model: Any = None, optimizer: Any = None, **options: Any) -> regimes.LocalSteps:
    model = net() if model is None else model
    return regimes.local_steps(model, optimizer or sgd(model), **{"policy": 2} | options)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def probed(**options: Any) -> None:
    model, x = DistributedDataParallel(net()), {"x": torch.ones(4, 4)}
    given = {"instruments": {"curvature": {}}, "probe": (mean, x)}
    regimes.attach(model, sgd(model), **given | options)


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).mean()


def stepped(**options: Any) -> regimes.Hook:
    """After one backward pass of DDP."""
    model = DistributedDataParallel(net())
    hook = regimes.attach(model, **{"policy": "accordion"} | options)
    model(torch.ones(2, 4)).sum().backward()
    return hook


def reloaded(change: Callable[[dict[str, Any]], Any] = lambda state: state, **options: Any) -> None:
    levels = {"low": 2, "high": 1}
    ddp(levels=levels, **options).load_state_dict(change(stepped(levels=levels).state_dict()))


def rows(state: dict[str, Any], **change: Any) -> dict[str, Any]:
    """The state with another entry of its first layer."""
    state = copy.deepcopy(state)
    state["layers"]["0.weight"].update(change)
    return state


def twice(attach: Callable[..., Any], model: Any) -> None:
    kept = [attach(model)]
    attach(model)
    del kept


def a_part(passes: int) -> None:
    """torch knows after a pass which module is the root."""
    model: Any = divided(line(), blocks_only(line()))
    for _ in range(passes):
        model(torch.zeros(1, 4)).sum().backward()
    shards(model[0])
    model(torch.zeros(1, 4)).sum().backward()


def columns() -> None:
    mesh, model = grid(), nn.Linear(4, 6, bias=False)
    divided(mesh["shard"], model, shard_placement_fn=lambda _: Shard(1))
    local(model, replicas=mesh["replicate"])


def of_a_mesh_of_its_own() -> None:
    """torch from 2.12 on: some parameters of a module on a mesh of their own."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    if not hasattr(common, "ShardPlacementResult"):
        raise ConfigError("those of the mesh: use one for all modules, and give")
    model, other = net(), common.FSDPMeshInfo(grid(2)["shard"], shard_mesh_dim=0)

    def place(p: nn.Parameter) -> Any:
        return common.ShardPlacementResult(Shard(0), other) if p is model[0].weight else None

    shards(divided(line(), model, shard_placement_fn=place))


def in_tensor_parallel() -> None:
    both, model = grid(names=("a", "b")), net()
    model[0].weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), both["b"], [Shard(0)]))
    whole(divided(both["a"], model))


def whole(model: nn.Module) -> None:
    with regimes.whole_model(model):
        pass


def factor_in_a_step() -> None:
    mesh = grid()
    model = divided(mesh["shard"])
    replicas(model, mesh["replicate"], compressor="dense", level="dense")
    loss = model(torch.ones(1, 4)).sum()
    model.set_gradient_divide_factor(1.0)
    loss.backward()


def stepped_within(clears: bool, early: bool) -> None:
    """An optimiser that steps a parameter as soon as its gradient is there, and may clear it;
    registered before the hook is attached, or after it."""
    mesh = grid()
    model = divided(mesh["shard"])

    def step(parameter: nn.Parameter, one: torch.optim.Optimizer) -> None:
        one.step()
        if clears:
            one.zero_grad()

    def register() -> None:
        for p in model.parameters():
            one = torch.optim.SGD([p], 0.1)
            p.register_post_accumulate_grad_hook(lambda p, one=one: step(p, one))

    if early:
        register()
    hook = replicas(model, mesh["replicate"], compressor="powersgd", level=1)
    if not early:
        register()
    model(torch.ones(2, 4)).sum().backward()
    hook.close()


def logged(placement: Any) -> None:
    mesh = line()
    shards(mesh=mesh).log(norm=DTensor.from_local(torch.ones(1), mesh, [placement]))


def after_the_end() -> None:
    model = net()
    local(model).close()
    again = local(model)  # closed ones are no obstacle
    again.close()
    again.step()


def without_losses() -> None:
    model = net()
    optimizer = sgd(model)
    steps = local(model, optimizer, policy="adacomm", every=2)
    for _ in range(3):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        steps.step()
        steps.log(test_loss=1.0)


class Nameless(PowerSGD):
    """A compressor that says nothing of levels."""

    usual: ClassVar[Mapping[str, Any]] = {}


def complex_layer() -> nn.Module:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
    return layer


def on_meta() -> Any:
    return net(device="meta")


# -- what is said ----------------------------------------------------------------------------------

NO_DDP = "attach needs a DistributedDataParallel model, got"
OF_RANKS = regimes.Accordion(low=regimes.PowerSGD(rank=2), high=regimes.PowerSGD(rank=1))
REVERSED = regimes.Accordion(low=regimes.PowerSGD(rank=1), high=regimes.PowerSGD(rank=2))
FED = {"level": 4, "error_feedback": True, "stochastic": False}
SHARDS: list[tuple[str, Callable[[], Any]]] = [
    ("the owner of a part", lambda: shards(scatter=FED | {"error_feedback": "owner"})),
    ("scatter.residual_bits = 8", lambda: shards(scatter={"level": 4, "residual_bits": 8})),
    ("scatter.residual_bits = 4", lambda: shards(scatter=FED | {"residual_bits": 4})),
    ("scatter.name = 'powersgd'", lambda: shards(scatter={"name": "powersgd", "level": 4})),
    (
        "instruments.error",
        lambda: shards(scatter=None, compressor="powersgd", level=2, instruments={"error"}),
    ),
    (
        "whole gradients are exchanged",
        lambda: shards(scatter=None, compressor={"name": "quantised-scatter"}, level=8),
    ),
    ("has copies on all processes", lambda: shards(copied(net(), mesh=line()))),
    ("a model of fully_shard (FSDP2), got Sequential", lambda: shards(net())),
    ("call fully_shard on the whole model", lambda: shards(blocks_only(line()))),
    ("over a mesh of 2 dimensions", lambda: shards(divided(grid()))),
    ("mesh: got a mesh of 2 dimensions", lambda: shards(divided(line()), grid())),
    (
        "(CPUOffloadPolicy)",
        lambda: shards(divided(line(), offload_policy=CPUOffloadPolicy(pin_memory=False))),
    ),
    ("scatter.block = 0", lambda: shards(scatter={"level": 4, "block": 0})),
    ('{"levels": {"low": 8, "high": ...}}', lambda: shards(scatter={"levels": {"low": 8}})),
    (
        "leave no parameter to ignored_params",
        lambda: shards(divided(line(), model := net(), ignored_params={model[0].weight})),
    ),
    ("signal = 'global'", lambda: shards(signal="global")),
    ("compressor = 'topk'", lambda: shards(compressor="topk")),
    ("compressor = 'powersgd'", lambda: shards(compressor="powersgd")),
    ('scatter: it names no level: scatter={"level": 8}', lambda: shards(scatter={"block": 32})),
    ("it is a part of a larger model", lambda: a_part(0)),
    ("a part of a larger model that fully_shard has divided", lambda: a_part(1)),
    ("level = 4: the bits of gradients are in scatter", lambda: shards(level=4)),
    ("level of quantised-", lambda: shards(scatter={"level": 3})),
    ("did you mean 'block'?", lambda: shards(scatter={"level": 4, "blok": 3})),
    ("gather.level = 'high'", lambda: shards(gather={"level": "high"})),
    ("policy: it decides the levels of scatter", lambda: shards(scatter=None, policy="accordion")),
    ("the policy's levels are compressors already", lambda: shards(policy=OF_RANKS)),
    (
        "the policy's levels are compressors already",
        lambda: shards(scatter=None, compressor="powersgd", policy=OF_RANKS),
    ),
    ("full_state_dict: this model is sharded", lambda: shards().full_state_dict()),
    (
        "scatter: it compresses what FSDP2 exchanges",
        lambda: regimes.attach(divided(line()), scatter={"level": 4}),
    ),
    ("no module of the model is divided by fully_shard", lambda: whole(net())),
    ("is on the device meta", lambda: whole(divided(line(), on_meta()))),
    ("parameter '0.weight' is divided as", in_tensor_parallel),
    *(("log: norm is a DTensor", lambda at=at: logged(at)) for at in (Partial(), Shard(0))),
]
if torch.__version__.startswith("2.9."):  # its `replicate` takes no mesh of one dimension
    SHARDS = [x for x in SHARDS if "copies" not in x[0]]
REPLICAS: list[tuple[str, Callable[[], Any]]] = [
    ("scatter.levels", lambda: replicas(scatter={"levels": {"low": 8, "high": 4}})),
    ("scatter.error_feedback = True: expected false with replicas", lambda: replicas(scatter=FED)),
    ("(FSDP2): it keeps a part", lambda: regimes.attach(divided(grid()["shard"]), policy="static")),
    (
        "by name",
        lambda: replicas(divided(grid(names=("a", "b"))), grid(names=("a", "b"))["b"]),
    ),
    ("got a mesh of 2 dimensions", lambda: replicas(mesh=grid(), policy="accordion")),
    ("got a str, expected one dimension", lambda: replicas(mesh="replicate", policy="accordion")),
    ("'0.weight' is not sharded: call fully_shard on the whole model", lambda: replicas(net())),
    ("is not sharded", lambda: replicas(DistributedDataParallel(net()))),
    (
        "is not sharded",
        lambda: replicas(
            FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
        ),
    ),
    ("is not sharded: call", lambda: replicas(blocks_only(grid()["shard"]))),
    ("'weight' is not divided by its rows", columns),
    ("not divided by its rows", lambda: local(divided(grid()), replicas=grid()["replicate"])),
    ("a mesh of 2 dimensions", lambda: local(divided(grid()["shard"]), replicas=grid())),
    ("the model is divided by fully_shard", lambda: local(divided(line()))),
    ("call it before attach", factor_in_a_step),
    *(
        ("an optimiser has stepped within the backward", lambda c=c, e=e: stepped_within(c, e))
        for c in (False, True)
        for e in (False, True)
    ),
]
DIVIDED: list[tuple[str, Callable[[Any, Any], Any]]] = [  # of both: attach, and its mesh
    ("no parameter to train", lambda to, at: to(divided(at).requires_grad_(False))),
    ("type torch.float16: the hook needs", lambda to, at: to(divided(at, net().half()))),
    ("on the device meta: attach after", lambda to, at: to(divided(at, on_meta()))),
    ("this model has a hook already", lambda to, at: twice(to, divided(at))),
]
DDP: list[tuple[str, Callable[[], Any]]] = [
    (f"{NO_DDP} Linear: wrap it", lambda: regimes.attach(nn.Linear(4, 4), policy="accordion")),
    (
        f"{NO_DDP} DataParallel: it is one process",
        lambda: regimes.attach(nn.DataParallel(net()), policy="accordion"),
    ),
    (
        f"{NO_DDP} a compiled DistributedDataParallel: attach before compiling",
        lambda: regimes.attach(
            torch.compile(DistributedDataParallel(net()), backend="eager"), policy="accordion"
        ),
    ),
    (
        "has a communication hook already",
        lambda: twice(lambda m: regimes.attach(m, policy="static"), DistributedDataParallel(net())),
    ),
    ("did you mean 'accordion'", lambda: ddp(policy="acordion")),
    ("policy = 3", lambda: ddp(policy=3)),
    ("level 'medium'", lambda: ddp(policy={"name": "static", "level": "medium"})),
    (
        "'fisher_trace': expected norm, noise_scale, ",
        lambda: ddp(policy={"name": "detected", "detector": {"name": "fisher-change"}}),
    ),
    ("did you mean 'powersgd'", lambda: ddp(compressor="powersdg")),
    ("a table with a name, or a Compressor", lambda: ddp(compressor=regimes.PowerSGD)),
    ("level of PowerSGD = 0", lambda: ddp(levels={"low": 0, "high": 1})),
    ('"dense" is always known', lambda: ddp(levels={"dense": 4})),
    ("levels.low = 1 sends less than", lambda: ddp(levels={"low": 1, "high": 4})),
    ("Nameless has no default levels", lambda: ddp(compressor=Nameless())),
    ("did you mean 'update'", lambda: ddp(signal="updates")),
    ("torch.complex64: expected float32, ", lambda: ddp(complex_layer())),
    ("build it with sparse=False", lambda: ddp(nn.Embedding(4, 4, sparse=True))),
    ("every = 2: the hook reads the learning rate", lambda: ddp(every=2)),
    ("every = 0", lambda: ddp(every=0)),
    ("it has none of the model's", lambda: ddp(optimizer=sgd(nn.Linear(2, 2)), every=2)),
    ("epoch_end: no gradient has been reduced", lambda: ddp().epoch_end(lr=0.1)),
    ("epoch_end: give the learning rate", lambda: stepped().epoch_end()),
    ("lr = -1.0", lambda: stepped().epoch_end(lr=-1.0)),
    ("lr = True", lambda: stepped().epoch_end(lr=True)),
    (
        "saved by process 2 of 4, this is process 0 of 1",
        lambda: reloaded(lambda state: place_state(state, 2, 4, [2])),
    ),
    ("shape [7, 24] in the state", lambda: reloaded(lambda state: rows(state, shape=[7, 24]))),
    (
        "saved with compressor TopK(), this hook has",
        lambda: reloaded(lambda state: {**state, "compressor": "TopK()"}),
    ),
    ("level 'medium', this hook's", lambda: reloaded(lambda state: rows(state, level="medium"))),
    ("reads other statistics", lambda: reloaded(lambda state: {**state, "gauges": {}})),
    ("returned by hook.state_dict()", lambda: reloaded(lambda state: {"a": 1})),
    ("a pair (loss, batches)", lambda: probed(probe=None)),
    ('a table like {"curvature": {}}', lambda: probed(instruments=None)),
    ("did you mean 'curvature'", lambda: probed(instruments={"curvatur": {}})),
    ("larges", lambda: probed(instruments={"curvature": {"larges": 1}})),
    ("the probe has its own", lambda: probed(instruments={"curvature": {"images": 5}})),
    ("with tensors in it", lambda: probed(probe=(len, 3))),
    ("a pair (loss, batches)", lambda: probed(probe=len)),
]
LOCAL: list[tuple[str, Callable[[], Any]]] = [
    ("exchanges something at each step", lambda: local(DistributedDataParallel(net()))),
    ("other parameters than the model trains", lambda: local(optimizer=sgd(net()))),
    ("policy = 0: expected a period", lambda: local(policy=0)),
    ("none beside the constant period 2", lambda: local(periods={"low": 1, "high": 4})),
    (
        "periods.low = 4 is longer than periods.high = 1",
        lambda: local(policy="accordion", periods={"low": 4, "high": 1}),
    ),
    ("levels.low = 1 sends less", lambda: local(level_policy=REVERSED)),
    ("outer.period_one = 'gradients'", lambda: local(outer={"period_one": "gradients"})),
    ("did you mean 'accordion'", lambda: local(policy="accordeon")),
    (
        "'eigenvalue': expected norm, noise_scale, ",
        lambda: local(policy={"name": "detected", "detector": {"name": "eigenvalue-change"}}),
    ),
    ("outer.lr = 0.0", lambda: local(outer={"lr": 0})),
    ("unknown key 'outer.rate'", lambda: local(outer={"rate": 1})),
    ("level of PowerSGD = 0", lambda: local(compressor=regimes.PowerSGD(rank=0))),
    *(
        (f"say {kind.__name__}({kind.level_word}=...)", lambda given=given: local(compressor=given))
        for kind in (regimes.PowerSGD, regimes.TopK, regimes.QuantisedAllReduce)
        for given in (kind(), {"name": compression.REGISTRY.table(kind())["name"]})
    ),
    ("every = 'epoch'", lambda: local(every="epoch")),
    ("this model has local steps already", lambda: twice(local, net())),
    ("close() has ended these local steps", after_the_end),
    (
        "of several types, float32 (0.bias), float64 (1.bias)",
        lambda: local(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())),
    ),
    ("'0.weight' is on the device meta", lambda: local(on_meta())),
    (
        "'1.weight' is on the device meta",
        lambda: local(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).to("meta"))),
    ),
    ("none was reported so far: call log(", without_losses),
]
BOTH: list[tuple[str, Callable[[int], Any]]] = [  # on two processes
    (
        "`replicas` must be the mesh's other dimension",
        lambda rank: regimes.attach_replicas(divided(mesh := line()), mesh, compressor="powersgd"),
    ),
    ("those of the mesh: use one for all modules", lambda rank: of_a_mesh_of_its_own()),
    ("divided among other processes than", lambda rank: shards(divided(grid(2)["shard"]), line())),
    (
        "is sharded over another mesh than",
        lambda rank: replicas(divided(grid()["shard"], blocks_only(grid()["replicate"]))),
    ),
    ("process 1 has levels.constant = 8", lambda rank: shards(scatter={"level": 4 + 4 * rank})),
    (
        "process 1 has shards.gather.level = 8",
        lambda rank: shards(gather={"level": 4 + 4 * rank}),
    ),
    (
        "process 1 has seed = 1, process 0 has seed = 0",
        lambda rank: replicas(divided((at := grid(2))["shard"]), at["replicate"], seed=rank),
    ),
    (
        "process 1 has policy.level = '3', process 0 has policy.level = '2'",
        lambda rank: local(
            divided((at := grid(2))["shard"]), replicas=at["replicate"], policy=2 + rank
        ),
    ),
    (
        "every process loads its own file",
        lambda rank: (hook := shards()).load_state_dict(_of_the_next(hook.state_dict())),
    ),
    (
        "probe",
        lambda rank: probed(probe=(mean, {"x": torch.ones(4 + rank, 4)})),
    ),
]


def _of_the_next(state: dict[str, Any]) -> dict[str, Any]:
    state["parts"][0]["process"] += 1
    return state


def said(call: Callable[..., Any], *given: Any) -> str:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            call(*given)
        except ConfigError as error:
            return str(error)
        except Exception as error:
            return f"unforeseen {type(error).__name__}: {error}"
    return ""


def alone(rank: int) -> list[list[str]]:
    return [[words, said(call)] for words, call in DDP + LOCAL]


def together(rank: int) -> list[list[str]]:
    found = [[words, said(call)] for words, call in SHARDS + REPLICAS]
    found += [[words, said(call, rank)] for words, call in BOTH]
    ways = (shards, line()), (replicas, grid()["shard"])
    return found + [[words, said(call, *way)] for words, call in DIVIDED for way in ways]


@pytest.mark.parametrize(("work", "processes"), [(alone, 1), (together, 2)])
def test_a_wrong_use_is_one_sentence_on_every_process(work: Any, processes: int) -> None:
    for found in group.run(work, processes):
        other = [x for x in found if x[0] not in x[1] or "\n" in x[1] or x[1][:10] == "unforeseen"]
        assert not other


def without_effect(rank: int) -> list[list[str]]:
    """The warnings of three passes with torch's option, with replicas, and without it."""
    found, option = [], "set_separate_reduce_scatter_group"
    for attach, given in ((shards, {}), (replicas, {"compressor": "powersgd", "level": 1})):
        for value in (True, False):
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                model = divided(line() if attach is shards else grid()["shard"])
                hook = attach(model, **given)
                getattr(model, option)(value)
                for _ in range(3):
                    model(torch.ones(2, 4)).sum().backward()
                hook.close()
            found.append([str(x.message) for x in heard if "has no effect" in str(x.message)])
    return found


def test_an_option_of_torchs_without_effect_is_said_once() -> None:
    if not hasattr(FSDPModule, "set_separate_reduce_scatter_group"):
        pytest.skip("torch has this option since 2.13")
    first, other = group.run(without_effect, 2)
    assert [len(heard) for heard in first] == [1, 0, 0, 0]
    assert first[0][0].startswith("set_separate_reduce_scatter_group has no effect")
    assert other == [[]] * 4


def test_without_a_group_local_steps_say_so() -> None:
    with pytest.raises(ConfigError, match="there is no process group: start with torchrun"):
        regimes.local_steps(model := net(), sgd(model))
