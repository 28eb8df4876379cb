"""CUDA graphs of the trainer on a pretended GPU. Oracle: the same run without them, bit for bit.

The pretended graph computes nothing while it is captured, refuses what waits, and reads and writes
the addresses of the capture (``pretended.graphs``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
from gpu_steps import LEVELS, NETWORKS, SMALL, TABLES, TEXT, Steps, config, waiting
from runs import break_off, same_bits
from torch import Tensor

import regimes
from regimes import compression
from regimes.base.config import override
from regimes.base.errors import ConfigError
from regimes.collectives.world import World
from regimes.compression import orthonormal
from regimes.compression.exchange import Exchange
from regimes.compression.recording import WARM_UP, Kinds, Recorder
from regimes.compression.sparse import TopK
from regimes.training import loop
from regimes.training.gradients import Gradients

TINY = ["model={name='gpu_steps:tiny'}", "workers=2", "batch_size=4"]
ALTERNATING = ["policy={name='windows', windows=[[0, 1], [2, 3]], inside='low', outside='high'}"]
HIGH = "policy={name='static', level='high'}"
LONG = ["data.train_size=48", "data.test_size=20", "unit_steps=6", "steps=24", *ALTERNATING]
POWERSGD = ["compressor={name='powersgd'}", "levels={low=2, high=1}"]


def of(name: str) -> list[str]:
    high = LEVELS[name]
    return [f"compressor={{name='{name}'}}", f"levels={{high={high}}}"]


def ranked(*more: str) -> list[str]:
    return [*TINY, *LONG, *POWERSGD, *more]


WHOLE = ("unit_steps=none", "steps=none", "epochs=8")
WARM_UP_RATES = "{schedule='cosine', per='step', warmup_steps=4, name='adamw', lr=0.01}"
FORKED = ("model={name='gpu_steps:Forked'}", "union_pass=false", "data.train_size=44", *WHOLE)
UPDATES = ("compressor={name='topk', residual='update'}", "levels={low=20, high=10}")
GROWING = "{name='windows', windows=[[0, 4]], inside='low', outside='high'}"
TABLED = [f"instruments.{name}={table}" for name, table in TABLES.items()]
CASES: dict[str, list[str]] = {
    "ranks that change": ranked(),
    "random numbers of the step": [*TINY, *of("randomk"), HIGH, "data.train_size=64"],
    "a layer that some batches do not use": [*TINY, *LONG, *of("topk"), HIGH, *FORKED],
}
SLOW: dict[str, list[str]] = {
    "dense and back": ranked("policy.inside=dense"),
    "the first steps dense": ranked("start_compressing_after=9"),
    "a last, smaller batch": ranked("data.train_size=44", "epochs=4"),
    "batches that grow": ranked(*WHOLE, "batch_levels={low=4, high=8}", f"batch_policy={GROWING}"),
    "a rescaled residual": ranked(*UPDATES, "optimizer={schedule='cosine', per='epoch'}"),
    "a warm-up by step": ranked(f"optimizer={WARM_UP_RATES}"),
    "gradient noise": ranked("deficit={name='gradient-noise', windows=[[0, 2]]}"),
    "every instrument": [*TINY, *LONG, *of("topk"), HIGH, "union_pass=false", *TABLED],
    "bfloat16": ranked("precision='bfloat16'"),
    "parameters in bfloat16": ranked("dtype='bfloat16'"),
    "clipped": ranked("optimizer.clip=0.5"),
    "gpt": [*TEXT, f"model={NETWORKS['gpt']}", *POWERSGD, HIGH, "data.train_size=400"],
    "resnet18": ["data.train_size=64"],
    **{
        name: [SMALL, "data.train_size=96", *of(name)]
        for name in compression.REGISTRY
        if name != "dense"
    },
}


@pytest.mark.parametrize(
    "settings",
    [*CASES.values(), *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW.values())],
    ids=[*CASES, *SLOW],
)
def test_a_run_has_the_bits_of_one_without(settings: list[str], tmp_path: Path) -> None:
    with pretended.gpu() as diary:
        regimes.run(config(*settings), tmp_path / "without")
        regimes.run(config(*settings, "graphs=4"), tmp_path / "with")
        assert diary.graphs["captured"] > 1
        assert diary.graphs["replayed"] > diary.graphs["captured"]
    same_bits(tmp_path / "without", tmp_path / "with")


class Watched:
    """Memory taken and addresses used by each step's gradients and reduction."""

    def __init__(self, diary: pretended.Diary, patch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[bool, int, int, set[int]]] = []
        take = loop.take_step

        def watched(gradients: Gradients, exchange: Exchange, *args: Any) -> Any:
            before = [c.total() for c in (diary.ops, diary.memory)]
            replays = diary.graphs["replayed"]
            reduced = take(gradients, exchange, *args)
            after = [c.total() for c in (diary.ops, diary.memory)]
            kept: list[Tensor] = [*reduced.updates, reduced.loss, gradients.stack]
            for state in exchange.reducer.states:
                kept += [x for x in vars(state).values() if isinstance(x, Tensor)]
            launched, taken = (b - a for a, b in zip(before, after, strict=True))
            whole = diary.graphs["replayed"] - replays == 2
            self.steps.append((whole, launched, taken, {x.data_ptr() for x in kept}))
            return reduced

        patch.setattr(loop, "take_step", watched)


def test_a_replayed_step_takes_no_memory_and_stays_in_its_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretended.gpu() as diary:
        watched = Watched(diary, monkeypatch)
        quiet = [*TINY, *POWERSGD, HIGH, "graphs=2"]
        regimes.run(config(*quiet, "data.train_size=64"), tmp_path / "run")
        assert diary.graphs == {"captured": 2, "replayed": diary.graphs["replayed"]}
    # another kind is the first step, before there are residuals; the first two replays are done
    # beside the same steps without graphs
    replayed = [step for step in watched.steps if step[0]][2:]
    assert len(replayed) >= len(watched.steps) - WARM_UP - 3
    # two replays, three copies into their places, and a copy of this process's losses
    assert {(launched, taken) for _, launched, taken, _ in replayed} == {(6, 1)}
    assert len({frozenset(places) for *_, places in replayed}) == 1


def test_a_bounded_number_of_graphs_is_kept() -> None:
    with pretended.gpu() as diary:
        kinds, recorder = Kinds(2), Recorder(torch.cuda.Stream())
        made, x = {}, torch.zeros(3, device="cuda")

        def use(kind: str) -> None:
            if kinds.find(kind) is not None:
                return
            if not kinds.is_due(kind):
                kinds.count(kind)
            else:
                made[kind] = recorder.record(lambda: x.add_(1), World(1))
                kinds.keep(kind, made[kind])

        for kind in "aaaabbbbacccc":  # the fourth of a kind is captured; "a" is used after "b"
            use(kind)
        assert list(kinds.kept) == ["a", "c"]
        assert diary.graphs["captured"] == 3
        use("b")  # warmed up anew: what its capture has prepared may be gone
        assert list(kinds.kept) == ["a", "c"]
        for number in range(1000):
            use(str(number))
        assert len(kinds._seen) <= 16
        made["a"].replay()
    assert x.tolist() == [4.0] * 3  # each is replayed once as it is recorded


def test_a_graph_outlives_the_caches_of_what_it_reads(tmp_path: Path) -> None:
    forgotten: list[int] = []

    class Forgets(Steps):
        def step(self, *_: Any) -> None:
            if self.diary.graphs["captured"] == 2:
                orthonormal._diagonals.forget()  # type: ignore[attr-defined]
                forgotten.append(1)

    with pretended.gpu() as diary:
        quiet = [*TINY, *POWERSGD, HIGH, "graphs=2"]
        c = config(*quiet, "data.train_size=64")
        regimes.run(c, tmp_path / "run", reporters=[Forgets(diary)])
        assert diary.graphs["replayed"] > 4
    assert forgotten


@pytest.mark.slow
@pytest.mark.parametrize("later", ["graphs=2", "graphs=none"])
def test_a_run_that_was_cut_off_goes_on_bit_for_bit(later: str, tmp_path: Path) -> None:
    """Also without graphs, which are a matter of the machine."""
    c = config(*TINY, *LONG, *POWERSGD, "graphs=2")
    with pretended.gpu():
        regimes.run(c, tmp_path / "whole")
        break_off(c, tmp_path / "broken", 2)
        regimes.run(override(c, [later]), tmp_path / "broken", resume=True)
    same_bits(tmp_path / "whole", tmp_path / "broken")


REFUSED: dict[str, tuple[list[str], str]] = {
    "dropout": (
        [*TEXT, "model={name='gpt', width=16, depth=1, heads=2, dropout=0.1}"],
        "with a model that draws random numbers",
    ),
    "a state": (
        [*TEXT, "model={name='lstm', width=8, depth=1, dropout=0.0}", "data.windows=streams"],
        "with a model that carries a state",
    ),
}


@pytest.mark.parametrize(("settings", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_captured_is_refused_at_the_start(
    settings: list[str], said: str, tmp_path: Path
) -> None:
    with pretended.gpu(), pytest.raises(ConfigError, match=said):
        regimes.run(config(*settings, "graphs=2"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_cpu_has_no_graphs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="graphs = 2: expected none on a CPU"):
        regimes.run(config(*TINY, "device=cpu", "graphs=2"), tmp_path / "run")


def test_a_wait_within_a_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = TopK.exchange

    def waits(*args: Any) -> Any:
        waiting()
        return exchange(*args)

    monkeypatch.setattr(TopK, "exchange", waits)
    settings = [*TINY, "compressor={name='topk'}", "levels={high=10}", "graphs=2"]
    with pretended.gpu(), pytest.raises(ConfigError, match=r"cannot be captured .*stream.*leave"):
        regimes.run(config(*settings, "data.train_size=64"), tmp_path / "run")


# -- the pretended graph ---------------------------------------------------------------------


def captured(work: Callable[[], Any]) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def test_a_capture_computes_nothing_and_a_replay_reads_what_is_there() -> None:
    with pretended.gpu() as diary:
        x, made = torch.ones(3, device="cuda"), []
        graph = captured(lambda: made.append((x.add_(1) * 10).sum()))
        assert x.tolist() == [1.0] * 3
        assert made[0].isnan()
        for expected in (60, 90):
            diary.clear()
            graph.replay()
            assert diary.ops == {"replay": 1}
            assert diary.memory.total() == 0
            assert float(made[0]) == expected
        x.fill_(0)
        graph.replay()
        assert x.tolist() == [1.0] * 3


def test_a_backward_pass_is_captured() -> None:
    with pretended.gpu():
        weight = torch.ones(3, device="cuda", requires_grad=True)
        weight.grad = torch.zeros(3, device="cuda")
        x = torch.ones(3, device="cuda")
        graph = captured(lambda: (weight * x).square().sum().backward())
        assert weight.grad.tolist() == [0.0] * 3
        x.fill_(3)
        graph.replay()
        graph.replay()
        assert weight.grad.tolist() == [36.0] * 3


FORBIDDEN: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda x: float(x[0]),
    "the stream": lambda _: torch.cuda.current_stream().synchronize(),
    "a question": lambda _: torch.cuda.Event().query(),
    "a copy": lambda _: torch.ones(3).to("cuda"),
    "a list": lambda _: torch.tensor([1.0], device="cuda"),
    "a mask": lambda x: x[x > 0],
}


@pytest.mark.parametrize("act", FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_a_capture_forbids(act: Callable[[Tensor], Any]) -> None:
    with pretended.gpu() as diary:
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match="stream is capturing"):
            captured(lambda: act(x))
        assert diary.capturing is None
        assert float(x[0]) == 1  # and now one may ask


def test_memory_that_has_been_freed_is_not_read() -> None:
    with pretended.gpu():
        there, total = [torch.ones(3, device="cuda")], torch.zeros((), device="cuda")
        graph = captured(lambda: total.copy_(there[0].sum()))
        there.clear()
        with pytest.raises(RuntimeError, match="freed since its capture"):
            graph.replay()
