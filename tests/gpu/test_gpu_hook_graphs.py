"""CUDA graphs of the hook on pretended GPUs, two processes of DDP. Oracle: the same training
without graphs, bit for bit: weights, residuals, traffic, rows.

What happens at each step is drawn (``graphed.walk``): a pass that is not finite, thrown away, or
follows others under ``no_sync``; a state that is saved and loaded; another scale of the loss; and
levels change every few steps.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
from ddp_scripts import gpus, group
from gpu_steps import waiting
from leveled import leveled
from tensors import alike
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from benchmarks.cases import hooks
from regimes.base.errors import ConfigError
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression import REGISTRY
from regimes.compression.graphs import ExchangeGraphs
from regimes.compression.powersgd import PowerSGD
from regimes.compression.recording import Recorder
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import TopK
from regimes.hook.ddp import Hook

UNIT = 6  # steps
QUIET = regimes.RecordOptions(summary=False)
WINDOWS = {
    "name": "windows",
    "windows": [[0, 1], [2, 3], [4, 5]],
    "inside": "low",
    "outside": "high",
}
EVENTS = ("plain", "not finite", "thrown away", "accumulated", "saved and loaded", "another scale")


class Net(nn.Module):
    """Layers of two shapes, of which one comes twice, and some that are not compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.inner, self.twin = nn.Linear(64, 24), nn.Linear(24, 24)
        self.other, self.head = nn.Linear(24, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.conv(x).relu().flatten(1)).relu()
        return self.head(self.other(self.twin(x).relu()).relu())


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    seed = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 2, 4, 4, generator=seed).to(dtype), torch.randint(5, (6,), generator=seed)


def walk(steps: int, seed: int, events: tuple[str, ...] = EVENTS) -> list[str]:
    """What happens at each step, half of which are plain."""
    draw = random.Random(seed)
    return [draw.choice(events) if draw.random() < 0.5 else "plain" for _ in range(steps)]


class Job:
    """A model, its hook and its optimiser."""

    def __init__(
        self,
        rank: int,
        compressor: Any,
        levels: dict[str, Any],
        *,
        graphs: int | None,  # 0: no hook
        ddp: dict[str, Any],
        dtype: str = "float32",
        **options: Any,
    ) -> None:
        torch.manual_seed(1)
        self.rank, self.dtype = rank, getattr(torch, dtype)
        net = Net().to(self.dtype).to(f"cuda:{rank}")
        self.model = DistributedDataParallel(net, **{"bucket_cap_mb": 0.006, **ddp})
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        self.scale = 1.0
        self.hook: Hook | None = None
        if graphs == 0:
            return
        given = {"policy": WINDOWS, "every": UNIT, "scaler": self, "record": QUIET, **options}
        self.hook = regimes.attach(
            self.model,
            self.optimizer,
            compressor=leveled(compressor, levels),
            seed=7,
            graphs=graphs,
            **given,
        )

    def get_scale(self) -> float:  # of a GradScaler
        return self.scale

    def step(self, number: int, event: str) -> None:
        if event == "saved and loaded" and self.hook is not None:
            self.hook.load_state_dict(copy.deepcopy(self.hook.state_dict()))
        if event == "another scale":
            self.scale = 1024.0 if self.scale == 1 else 1.0
        if event == "thrown away":
            self.pass_of(number + 500)
            self.optimizer.zero_grad()
        if event == "accumulated":
            with self.model.no_sync():
                self.pass_of(number + 600)
        broken = event == "not finite" and self.rank == 0
        self.pass_of(number, torch.nan if broken else 1.0)
        if event != "not finite":
            for parameter in self.model.parameters():
                parameter.grad.div_(self.scale)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=number % 2 == 0)

    def pass_of(self, number: int, factor: float = 1.0) -> None:
        x, y = (t.to(f"cuda:{self.rank}") for t in batch(number, self.rank, self.dtype))
        (nn.functional.cross_entropy(self.model(x), y) * factor * self.scale).backward()

    def left(self) -> list[Any]:
        """What there is in the end."""
        assert self.hook is not None
        self.hook.close()
        state = self.hook.state_dict()
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in self.hook.rows]
        return [state, rows, [p.detach().clone() for p in self.model.parameters()]]


def compared(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each case with and without graphs: is what they leave the same, how many graphs were
    captured and replayed, and the launches of the last step above those of DDP."""
    answers = {}
    for name, case in cases.items():
        options = dict(case)
        events, most = options.pop("events"), options.pop("graphs", 2)
        found, launches = list[Any](), list[int]()
        for graphs in (None, most, 0):
            with gpus.nccl(rank) as (diary, _):
                job = Job(rank, graphs=graphs, **options)
                for number, event in enumerate(events if graphs != 0 else ["plain"] * 3):
                    diary.ops.clear()
                    job.step(number, event)
                launches.append(diary.ops.total())
                if job.hook is not None:
                    found.append(job.left())
                    counts = dict(diary.graphs)
        above = [n - launches[2] for n in launches[:2]]
        answers[name] = {"same": alike(*found), "graphs": counts, "launches": above}
    return answers


LEVELS: dict[str, dict[str, Any]] = {
    "powersgd": {"low": 3, "high": 1},
    "quantised-all-reduce": {"low": 8, "high": 4},
    "topk": {"low": 30, "high": 5},
    "acp-sgd": {"low": 3, "high": 1},
    "randomk": {"low": 30, "high": 10},
    "dense": {"low": "dense", "high": "dense"},
    "cast": {"low": "bf16", "high": "fp16"},
    "chunked-topk": {"low": 30, "high": 5},
    "quantise": {"low": 8, "high": 4},
    "sign": {"low": "dense", "high": 1},
}
FEW = ("powersgd", "acp-sgd", "quantised-all-reduce")


def case(name: str, seed: int, *events: str, **options: Any) -> dict[str, Any]:
    drawn = walk(28, seed, *([events] if events else []))
    return {"compressor": name, "levels": LEVELS[name], "events": drawn, "ddp": {}, **options}


CASES = {"a walk": {"powersgd": case("powersgd", 3)}}
SLOW = {
    "a walk of each": {name: case(name, seed) for seed, name in enumerate(LEVELS)},
    "four graphs": {name: case(name, 10, graphs=4) for name in FEW},
    "in the buckets": {name: case(name, 5, ddp={"gradient_as_bucket_view": True}) for name in FEW},
    "a static graph": {name: case(name, 6, ddp={"static_graph": True}) for name in FEW[:1]},
    "one bucket": {name: case(name, 7, ddp={"bucket_cap_mb": 25}) for name in FEW},
    "bfloat16": {name: case(name, 8, dtype="bfloat16") for name in FEW},
    "a norm that reads gradients": {
        name: case(name, 9, "plain", "not finite", "accumulated", signal="global") for name in FEW
    },
    "a residual in updates": {
        "topk": case("topk", 9) | {"compressor": {"name": "topk", "residual": "update"}}
    },
}


@pytest.mark.parametrize(
    "cases",
    [*CASES.values(), *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW.values())],
    ids=[*CASES, *SLOW],
)
def test_a_job_has_the_bits_of_one_without(cases: dict[str, dict[str, Any]]) -> None:
    for answer in group.run(compared, 2, cases, timeout=240):
        for name, found in answer.items():
            assert found["same"], name
            assert found["graphs"]["replayed"] > found["graphs"]["captured"] > 1, name


@pytest.mark.slow
def test_nodes_that_are_workers_have_the_bits_of_a_job_without() -> None:
    for answer in group.run(compared, 4, {"": case("powersgd", 4, nodes=2)}, timeout=240):
        assert answer[""]["same"]
        assert answer[""]["graphs"]["replayed"] > answer[""]["graphs"]["captured"] > 1


def test_every_compressor_that_can_be_replayed_is_tried() -> None:
    known = {name for name in REGISTRY if REGISTRY.load(name).replayable}
    assert known == {*LEVELS} == {*SLOW["a walk of each"]}


# Launches of a step above those of DDP without a hook, without graphs and with. Of the latter 10
# are outside of the exchange; each of two buckets has a copy of its memories, where there are any,
# and a launch for each segment.
LAUNCHES = {
    "dense": (26, 10 + 2 * 2),
    "powersgd": (80, 10 + 2 * (1 + 3)),
    "topk": (191, 10 + 2 * (1 + 4)),
    "quantised-all-reduce": (200, 10 + 2 * (1 + 4)),
}


def test_a_replayed_step_launches_its_segments_alone() -> None:
    cases = {name: case(name, 0, "plain", every=100) for name in LAUNCHES}
    for answer in group.run(compared, 2, cases):
        assert {name: tuple(found["launches"]) for name, found in answer.items()} == LAUNCHES


NETWORKS = {"ResNet-18": (2, 95, 18), "GPT-2": (4, 384, 50)}  # rank of PowerSGD, and launches


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("network", NETWORKS)
def test_launches_are_those_of_the_page(network: str) -> None:
    """Layers as many and in as many buckets as those networks have, and narrow."""
    rank, *expected = NETWORKS[network]
    launches = []
    for graphs in (0, None, 2):
        with gpus.nccl(0) as (diary, _):
            model = hooks.wrap(network, "cuda")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            options: Any = {"compressor": PowerSGD(rank=rank), "record": QUIET}
            hook = None if graphs == 0 else regimes.attach(model, graphs=graphs, **options)
            x, y = (t.to("cuda") for t in hooks.batch(network))
            for _ in range(7):
                diary.ops.clear()
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x).flatten(0, -2), y).backward()
                optimizer.step()
            launches.append(diary.ops.total())
            del hook
    assert [n - launches[0] for n in launches[1:]] == expected
    page = Path(regimes.__file__).parents[1].joinpath("docs/how-to/ddp.md").read_text()
    assert f"rank {rank}, " in page
    assert f" | {expected[0]} | {expected[1]} |" in page


# -- what is refused ---------------------------------------------------------------------------


def attached(device: str, graphs: Any, compressor: Any) -> tuple[Any, Any, regimes.Hook]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(24, 24).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    chosen = {"compressor": compressor, "record": QUIET}
    return model, optimizer, regimes.attach(model, optimizer, graphs=graphs, **chosen)


REFUSED: dict[str, tuple[str, Any, Any, str]] = {
    "a CPU": ("cpu", 2, PowerSGD(rank=2), "graphs = 2: expected none on a CPU: there is nothing"),
    "no number": ("cuda", 0, PowerSGD(rank=2), "graphs = 0: expected a number from 1 up, or none"),
    "a compressor": (
        "cuda",
        2,
        {"name": "threshold", "level": 0.1},
        "graphs = 2: expected none with the compressor Threshold: what it launches depends on",
    ),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("device", "graphs", "compressor", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_captured_is_refused_at_the_start(
    device: str, graphs: Any, compressor: Any, said: str
) -> None:
    with gpus.nccl(0), pytest.raises(ConfigError, match=said):
        attached(device, graphs, compressor)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("graphs", [None, 2])
def test_a_record_says_how_many_graphs_were_kept(graphs: int | None) -> None:
    with gpus.nccl(0):
        hook = attached("cuda", graphs, PowerSGD(rank=2))[2]
        assert hook.header["config"].get("graphs") == graphs


class Waits(TopK):
    def exchange(self, bucket: Any, comm: Any) -> list[Tensor]:
        waiting()
        return super().exchange(bucket, comm)


class ReadsItsStep(TopK):
    """Says that it can be replayed, and launches other numbers in each step."""

    def exchange(self, bucket: Any, comm: Any) -> list[Tensor]:
        updates = super().exchange(bucket, comm)
        return [x * bucket.states[0].step for x in updates]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("compressor", "said", "good"),
    [
        (Waits, r"cannot be captured \(.*stream is capturing: stream\): leave graphs out", 4),
        (ReadsItsStep, "replayed has given other numbers than the same step without graphs", 5),
    ],
)
def test_a_wrong_graph_ends_the_job_after_a_step_that_is_right(
    compressor: type[TopK], said: str, good: int
) -> None:
    found = []
    for graphs in (None, 2):
        with gpus.nccl(0):
            model, optimizer, hook = attached("cuda", graphs, compressor(percent=10))
            for step in range(good + 1):
                x = torch.randn(3, 24, generator=torch.Generator().manual_seed(step)).to("cuda")
                optimizer.zero_grad()
                loss = model(x).square().mean()
                if graphs is None or step < good:
                    loss.backward()
                    optimizer.step()
                else:
                    with pytest.raises(ConfigError, match=said):
                        loss.backward()
            rows = [*hook.steps.own.values()]
            found.append([x.clone() for x in (*rows, hook.reducer.states[0].residual)])
    assert all(map(torch.equal, *found))


# -- addresses ---------------------------------------------------------------------------------


def test_tensors_that_have_moved_are_another_kind_and_memories_are_copied() -> None:
    """In one process, as a hook does it: DDP may make other buckets, a state may be loaded."""
    layers = [Layer("a", (12, 8)), Layer("b", (12, 8)), Layer("c", (8,))]
    with pretended.gpu() as diary:
        reducers = [Reducer(PowerSGD(), layers, World(2), seed=0) for _ in range(2)]
        graphs = ExchangeGraphs(reducers[1], 4, Recorder(torch.cuda.Stream()))
        rows: list[dict[int, Tensor]] = []
        for step in range(24):
            if step % 8 == 0:
                rows = [
                    {i: torch.zeros(2, *x.shape, device="cuda") for i, x in enumerate(layers)}
                    for _ in reducers
                ]
            for i in range(len(layers)):
                drawn = torch.randn(rows[0][i].shape, generator=torch.Generator().manual_seed(step))
                for own in rows:
                    own[i].copy_(drawn.to("cuda"))
            found = []
            for reducer, own in zip(reducers, rows, strict=True):
                reducer.tentative = True
                if step % 5 == 4:  # elsewhere
                    for state in reducer.states:
                        if state.residual is not None:
                            state.residual = state.residual.clone()

                def work(reducer: Reducer = reducer, own: dict[int, Tensor] = own) -> list[Tensor]:
                    updates = reducer.reduce([*own], own, [2] * len(layers))
                    for i, update in updates.items():
                        own[i][0].copy_(update)
                    return [updates[0]]

                if reducer is reducers[0]:
                    reducer.keep(own)
                    work()
                else:
                    graphs.run((*own,), [2] * len(layers), work, [*own.values()])
                    graphs.make_graphs()
                reducer.settle_step(unapplied=own if step % 3 == 2 else ())
                found.append([*own.values(), *(x for x in reducer.residuals() if x is not None)])
            assert all(map(torch.equal, *found)), step
        assert diary.graphs["captured"] == 3
        assert diary.graphs["replayed"] > 3


def test_what_a_bucket_returns_outlasts_the_other_buckets_of_its_step() -> None:
    """The first bucket gets graphs after the others have theirs."""
    shapes = [(12 + 2 * i, 10 + i) for i in range(18)]
    layers = [Layer(str(i), shape) for i, shape in enumerate(shapes)]
    buckets = [(i, i + 1) for i in range(0, 18, 2)]  # of several sizes
    with pretended.gpu() as diary:
        reducers = [Reducer(PowerSGD(), layers, World(2), seed=0) for _ in range(2)]
        graphs = ExchangeGraphs(reducers[1], 2, Recorder(torch.cuda.Stream()))
        rows = [torch.randn(2, *x.shape, device="cuda") for x in layers]
        for step in range(10):
            levels = [1, 3] * 9 if step < 2 else [2, 3, *[1, 3] * 8]
            found: list[list[Tensor]] = [[], []]
            for bucket in buckets:
                for reducer, answers in zip(reducers, found, strict=True):

                    def work(one: Reducer = reducer, of: Any = bucket, at: Any = levels) -> Any:
                        return [*one.reduce(of, rows, at).values()]

                    own = reducer is reducers[0]
                    answers += work() if own else graphs.run(bucket, levels, work)
            graphs.make_graphs()
            assert all(map(torch.equal, *found)), step
        assert diary.graphs["replayed"] > 4 * diary.graphs["captured"]
