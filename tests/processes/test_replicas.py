"""Replicas of torchft that leave and join, each in a thread with a manager of its own.

Oracles: a loop that averages over those present, torchft's own DiLoCo, our local steps in a process
group, sums of residuals, and equality of all replicas.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from ddp_scripts import group, own_loop
from replicas import lighthouse, managed, together
from torch import Tensor, nn

import regimes
from regimes.errors import ConfigError

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.skipif(
        importlib.util.find_spec("torchft") is None,
        reason='needs torchft: pip install -e ".[torchft]", as `make integrations` does',
    ),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),  # of torch's reader
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torchft's loggers
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of torchft's HTTP server
]
DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
RATE = 0.1
GENERATOR = threading.Lock()


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model


def loss_of(model: nn.Module, step: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + replica)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return (model(x) ** 2).mean()


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def averaged(model: nn.Module, present: list[list[int]]) -> Tensor:
    """The weights after SGD on the mean gradient of the replicas that are present in each step."""
    for step, replicas in enumerate(present):
        gradients = [
            torch.autograd.grad(loss_of(model, step, i), list(model.parameters())) for i in replicas
        ]
        with torch.no_grad():
            for p, *mine in zip(model.parameters(), *gradients, strict=True):
                p -= RATE * torch.stack(mine).mean(0)
    return flat(model.parameters())


class Replica:
    """A bare model with its optimiser and hook."""

    def __init__(self, manager: Any, number: int, **options: Any) -> None:
        import torchft

        self.manager, self.number, self.model = manager, number, network()
        inner = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.optimizer = torchft.Optimizer(manager, inner)
        chosen = {"policy": {"name": "static", "level": "dense"}, "every": 4} | options
        self.hook = regimes.attach(self.model, optimizer=self.optimizer, manager=manager, **chosen)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, self.manager.current_step(), self.number).backward()

    def until(self, steps: int) -> None:
        while self.manager.current_step() < steps:
            self.backward()
            self.optimizer.step()

    @property
    def weights(self) -> Tensor:
        return flat(self.model.parameters())


def residuals(hook: Any) -> list[Tensor]:
    return [r for r in hook.reducer.residuals() if r is not None]


@pytest.fixture(autouse=True)
def _free_sockets() -> Iterator[None]:
    """torchft leaves sockets of its servers to the garbage collector, with a warning for each."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(least=1, join_ms=3000) as found:
        yield found


STEPS = 30


def test_the_mean_is_over_those_present_and_a_replica_joins(address: str, tmp_path: Path) -> None:
    """Replica 2 leaves after step 4; replica 3 joins later. The policy's rows are all the same."""
    left, alone, attached = threading.Event(), threading.Event(), threading.Event()
    options = {"policy": {"name": "accordion", "interval": 1}, "start_compressing_after": 99}
    first: list[int] = []
    barrier = threading.Barrier(3)  # or one of them would begin alone

    def live(i: int) -> Any:
        if i == 3:
            alone.wait(60)
        with managed(address, f"r{i}") as manager:
            replica = Replica(manager, i, record=tmp_path / "record", **options)
            if i < 3:
                barrier.wait(60)
            if i == 2:
                replica.until(4)
                left.set()
                return None
            if i == 3:
                attached.set()
                replica.backward()
                first.append(manager.current_step())
                assert not any(r.any() for r in residuals(replica.hook))
                replica.optimizer.step()
            else:
                replica.until(4)
                left.wait(60)
                replica.until(8)
                alone.set()
                attached.wait(60)
            while manager.current_step() < STEPS:
                replica.until(manager.current_step() + 1)
                time.sleep(0.02)
            replica.hook.close()
            return replica.weights, replica.hook.rows

    ends = [end for end in together(4, live) if end is not None]
    for weights, rows in ends[1:]:
        assert torch.equal(weights, ends[0][0])
        for column in ("layers", "statistics", "unit"):
            assert [row[column] for row in rows] == [row[column] for row in ends[0][1]]
    start = first[0]
    present = [[0, 1, 2]] * 4 + [[0, 1]] * (start - 4) + [[0, 1, 3]] * (STEPS - start)
    torch.testing.assert_close(ends[0][0], averaged(network(), present), rtol=1e-12, atol=1e-13)
    record = regimes.load(tmp_path / "record")
    columns = [row["replicas"] for row in record.rows]
    assert sum(c["left"] for c in columns) == sum(c["joined"] for c in columns) == 1
    assert min(c["least"] for c in columns) == 2
    spans = [row["unit"] for row in record.rows]
    assert [span["first"] for span in spans] == [0, *(span["stop"] for span in spans[:-1])]
    assert record.header["world"]["workers"] == 3


@pytest.mark.parametrize("compressor", ["powersgd", "topk"])
def test_what_was_not_sent_is_kept(address: str, compressor: str) -> None:
    """Sum of gradients and residuals before = W times the update + the sum of residuals after."""
    level = {"powersgd": 1, "topk": 10.0}[compressor]
    chosen = {"compressor": compressor, "levels": {"sent": level}, "policy": STATIC}
    barrier = threading.Barrier(3)

    def live(i: int) -> Any:
        with managed(address, f"r{i}") as manager:
            replica = Replica(manager, i, **chosen)
            barrier.wait(60)
            replica.until(3)
            before = flat(residuals(replica.hook))
            mine = torch.autograd.grad(
                loss_of(replica.model, 3, i), list(replica.model.parameters())
            )
            replica.backward()
            update = [p.grad for p in replica.model.parameters() if p.ndim > 1]
            after = flat(residuals(replica.hook))
            replica.optimizer.step()
            return before + flat(g for g in mine if g.ndim > 1), flat(update), after

    ends = together(3, live)
    torch.testing.assert_close(
        sum(end[0] for end in ends),
        3 * ends[0][1] + sum(end[2] for end in ends),
        rtol=1e-12,
        atol=1e-13,
    )


STATIC = {"name": "static", "level": "sent"}


def test_a_replica_that_joins_has_all_but_the_residual(address: str) -> None:
    chosen = {"compressor": "powersgd", "levels": {"sent": 1}, "policy": STATIC}
    waits, joined = threading.Event(), threading.Event()

    def live(i: int) -> Any:
        if i:
            waits.wait(60)
        with managed(address, f"r{i}") as manager:
            replica = Replica(manager, i, **chosen)
            if i:
                replica.optimizer.zero_grad()  # here it joins
                state = replica.hook.state_dict()
                joined.set()
                return state
            replica.until(5)
            state = replica.hook.state_dict()
            waits.set()
            while manager.num_participants() < 2 and not joined.is_set():
                replica.optimizer.zero_grad()
                time.sleep(0.02)
            joined.wait(60)
            return state

    gave, got = together(2, live)
    assert any(r.any() for r in states.owed(gave).values() if r is not None)
    assert not any(r.any() for r in states.owed(got).values() if r is not None)
    assert got["rows"] == gave["rows"]
    assert states.column(got, "level") == states.column(gave, "level")
    ours, theirs = (states.column(x, "memory") for x in (got, gave))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for name in ("gauges", "steps", "total"):
        torch.testing.assert_close(got[name], gave[name], rtol=0, atol=0)


def test_a_step_that_does_not_commit_leaves_no_trace(address: str) -> None:
    """Something else in the script reports an error after backward."""
    chosen = {"policy": {"name": "accordion", "interval": 1}, "levels": {"low": 2, "high": 1}}

    def live(fail: bool) -> Any:
        with managed(address, "r") as manager:
            replica = Replica(manager, 0, **chosen)
            replica.until(6)
            before = replica.weights
            if fail:
                replica.backward()
                manager.report_error(RuntimeError("something else"))
                replica.optimizer.step()
                assert torch.equal(replica.weights, before)
            replica.until(10)
            state = replica.hook.state_dict()
            replica.hook.close()
            return replica.weights, state, replica.hook.rows

    (weights, state, rows), (expected, other, others) = live(True), live(False)
    assert torch.equal(weights, expected)
    assert states.column(state, "level") == states.column(other, "level")
    torch.testing.assert_close(states.owed(state), states.owed(other), rtol=0, atol=0)
    for key in ("memory", "shape"):
        ours, theirs = (states.column(x, key) for x in (state, other))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for name in ("gauges", "steps", "total"):
        torch.testing.assert_close(state[name], other[name], rtol=0, atol=0)
    assert [r["statistics"] for r in rows] == [r["statistics"] for r in others]
    assert [r["replicas"]["uncommitted"] for r in rows] == [0, 1, 0]


def locally(address: str, steps: int, options: dict[str, Any]) -> list[Any]:
    """Two replicas with local steps, on the batches of ``own_loop``."""
    barrier = threading.Barrier(2)
    models = [own_network() for _ in range(2)]  # here: threads share one generator

    def live(i: int) -> Any:
        with managed(address, f"r{i}", min_replica_size=2) as manager:
            model = models[i]
            optimizer = own_loop.optimizer(model, "sgd")
            barrier.wait(60)
            local = regimes.local_steps(model, optimizer, manager=manager, **options)
            for x, y in own_loop.batches(i, steps):
                own_loop.take(model, optimizer, x, y)
                local.step()
            local.close()
            return own_loop.flat(model), local.rows

    return together(2, live)


def own_network() -> nn.Module:
    with GENERATOR:  # all threads share it
        torch.manual_seed(3)
        layers = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
        return nn.Sequential(*layers).double()


@pytest.mark.parametrize("compressor", [{}, {"compressor": "powersgd", "level": 1}])
def test_diloco_over_a_quorum_is_that_of_a_process_group(
    address: str, compressor: dict[str, Any]
) -> None:
    options = {"policy": 4, "outer": DILOCO, "every": 5, **compressor}
    expected = group.run(own_loop.trained, 2, 12, "sgd", options)
    for weights, rows in locally(address, 12, options):
        torch.testing.assert_close(weights, expected[0][0], rtol=1e-12, atol=1e-13)
        assert [row["sync"]["rounds"] for row in rows] == [1, 1, 1]
        assert [row["floats"] for row in rows] == [row["floats"] for row in expected[0][3]]


def test_diloco_over_a_quorum_is_torchfts(address: str) -> None:
    from torchft.local_sgd import DiLoCo

    barrier = threading.Barrier(2)

    def theirs(i: int) -> Tensor:
        model = own_network()
        optimizer = own_loop.optimizer(model, "sgd")
        outer = torch.optim.SGD(model.parameters(), **DILOCO)
        state = {"state_dict": model.state_dict, "load_state_dict": model.load_state_dict}
        options = {"init_sync": False, "min_replica_size": 2, **state}
        with managed(address, f"t{i}", **options) as manager:
            barrier.wait(60)
            with DiLoCo(manager, [model], optimizer, outer, sync_every=4):
                for x, y in own_loop.batches(i, 12):
                    own_loop.take(model, optimizer, x, y)
        return own_loop.flat(model)

    expected = together(2, theirs)
    with lighthouse() as another:
        found = locally(another, 12, {"policy": 4, "outer": DILOCO, "every": 4})
    for weights, _ in found:
        torch.testing.assert_close(weights, expected[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"compressor": "topk", "level": 20.0},
        {"compressor": "powersgd", "level": 1},
        {"compressor": "quantised-all-reduce", "level": 4},
    ],
)
def test_a_replica_joins_local_steps_without_a_movement(
    address: str, sent: dict[str, Any], tmp_path: Path
) -> None:
    """The others' mean is of those that have moved; afterwards all are the same."""
    attached, barrier = threading.Event(), threading.Barrier(2)
    seen: list[list[int]] = []

    def live(i: int) -> Any:
        if i == 2:
            attached.wait(60)
        with managed(address, f"r{i}") as manager:
            model = own_network()
            optimizer = own_loop.optimizer(model, "sgd")
            if i < 2:
                barrier.wait(60)
            options = {"policy": 4, "outer": DILOCO, "every": 8, "record": tmp_path / "record"}
            local = regimes.local_steps(model, optimizer, manager=manager, **options, **sent)
            if i == 2:
                seen.append(list(local.world.quorum.contributors))
                assert not any(r.any() for r in local.sync.reducer.residuals() if r is not None)
            batch = own_loop.batches(i, 1000)
            while local.total < 80:
                attached.set()
                own_loop.take(model, optimizer, *next(batch))
                local.step()
                time.sleep(0.02)
            local.close()
            return own_loop.flat(model), local.rows

    ends = together(3, live)
    for weights, rows in ends:
        assert torch.equal(weights, ends[0][0])
        assert [row["unit"] for row in rows] == [row["unit"] for row in ends[0][1]]
    assert seen == [[0, 1]]
    columns = [row["replicas"] for row in regimes.load(tmp_path / "record").rows]
    assert sum(c["joined"] for c in columns) == 1
    assert columns[0]["least"] == 2
    assert columns[-1]["most"] == 3


def test_when_all_have_died_one_begins_again(address: str, tmp_path: Path) -> None:
    """No state is left: training starts again, and the rows of before are set aside."""
    folder, barrier = tmp_path / "record", threading.Barrier(2)

    def live(i: int) -> None:
        with managed(address, f"r{i}") as manager:
            barrier.wait(60)
            replica = Replica(manager, i, record=folder)
            replica.until(10)
            if replica.hook.recorder is not None:
                replica.hook.recorder.close_files()  # as a kill, which writes no end

    together(2, live)
    before = (folder / "epochs.jsonl").read_text()
    assert len(before.splitlines()) == 2
    with managed(address, "r2") as manager:
        replica = Replica(manager, 2, record=folder)
        with pytest.warns(UserWarning, match="training starts again, and these rows are set aside"):
            replica.until(13)
        replica.hook.close()
    assert before in (folder / "superseded.jsonl").read_text().replace(
        '{"file":"epochs.jsonl",', "{"
    )
    rows = regimes.load(folder).rows
    assert {row["replicas"]["most"] for row in rows} == {1}
    assert [event["workers"] for event in events(folder) if event["event"] == "resume"] == [1]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_replica_with_other_options_ends_and_the_others_go_on(address: str) -> None:
    attached = threading.Event()
    said: list[str] = []

    def live(i: int) -> Any:
        if i == 2:
            attached.wait(60)
        with managed(address, f"r{i}") as manager:
            seed = 1 if i == 2 else 0
            replica = Replica(manager, i, seed=seed)
            if i == 2:
                with pytest.raises(ConfigError) as error:
                    replica.until(STEPS)
                said.append(str(error.value))
                return None
            while manager.current_step() < STEPS:
                replica.until(manager.current_step() + 1)
                attached.set()
                time.sleep(0.05 * (not said))
            return replica.weights

    first, second, _ = together(3, live)
    assert torch.equal(first, second)
    assert "seed = 1" in said[0]
    assert "this replica" in said[0]


@pytest.mark.parametrize("kind", ["asynchronous", "spare"])
def test_a_replica_that_would_send_nothing_ends_and_the_other_goes_on(
    address: str, kind: str
) -> None:
    """Only the quorum says that it is one: the manager's public names do not."""
    from torchft.manager import WorldSizeMode

    options = {
        "asynchronous": {"use_async_quorum": True},
        "spare": {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES},
    }
    barrier = threading.Barrier(2)

    def live(i: int) -> Any:
        with managed(address, f"r{i}", **options[kind]) as manager:
            replica = Replica(manager, i)
            barrier.wait(60)
            try:
                replica.until(5)
            except ConfigError as error:
                return str(error)
            replica.hook.close()
            return replica.weights, replica.hook.rows

    ended, went_on = sorted(together(2, live), key=lambda end: isinstance(end, tuple))
    assert "use_async_quorum=False" in ended
    assert "\n" not in ended
    assert went_on[1][0]["replicas"]["most"] == 1
    assert any(
        torch.allclose(went_on[0], averaged(network(), [[i]] * 5), rtol=1e-12, atol=1e-13)
        for i in range(2)
    )


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "epochs": ({}, {"every": "epoch"}, "add every=STEPS"),
    "no manager": ({}, {"manager": 3}, "a Manager of torchft"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_work_is_refused_in_a_sentence(address: str, case: str) -> None:
    with_manager, options, sentence = WRONG[case]
    with managed(address, "r", **with_manager) as manager, pytest.raises(ConfigError) as error:
        Replica(options.pop("manager", manager), 0, **options)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_group_other_than_of_gloo_is_refused(address: str) -> None:
    from torchft.process_group import ProcessGroupDummy

    with (
        managed(address, "r", pg=ProcessGroupDummy(0, 1)) as manager,
        pytest.raises(ConfigError, match=r"its process group is torchft-dummy: .* go over gloo"),
    ):
        Replica(manager, 0)


def test_local_steps_refuse_a_delay(address: str) -> None:
    model = own_network()
    optimizer = own_loop.optimizer(model, "sgd")
    outer = {**DILOCO, "delay": 2}
    with managed(address, "r") as manager, pytest.raises(ConfigError, match="leave it out"):
        regimes.local_steps(model, optimizer, outer=outer, policy=8, manager=manager)


def test_a_backward_pass_before_the_quorum_says_what_is_missing(address: str) -> None:
    with managed(address, "r") as manager:
        replica = Replica(manager, 0)
        with pytest.raises(ConfigError, match="zero_grad"):
            loss_of(replica.model, 0, 0).backward()


def test_gradients_are_added_up_without_an_exchange(address: str) -> None:
    with managed(address, "r") as manager:
        replica = Replica(manager, 0)
        replica.optimizer.zero_grad()
        with replica.hook.no_sync():
            loss_of(replica.model, 0, 0).backward()
        loss_of(replica.model, 1, 0).backward()
        replica.optimizer.step()
        model = network()
        (loss_of(model, 0, 0) + loss_of(model, 1, 0)).backward()
        expected = flat(p - RATE * p.grad for p in model.parameters() if p.grad is not None)
        torch.testing.assert_close(replica.weights, expected, rtol=1e-12, atol=1e-13)
