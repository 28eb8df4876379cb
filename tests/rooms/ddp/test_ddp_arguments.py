"""What `regimes.attach` and a hook's state refuse, on a group of one process: one sentence each."""

from __future__ import annotations

import copy
import io
import json
import math
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import outcome
import pytest
import states
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.config import RunConfig, override_fields
from regimes.base.errors import ConfigError, RecordError
from regimes.cli.html_report import render_page
from regimes.compression import REGISTRY
from regimes.cost.cases import make_cases
from regimes.cost.methods import parse_method
from regimes.hook.fsdp import arguments
from regimes.integrations.shared import HookSettings
from regimes.job import choices
from regimes.job.probe import pick_probe
from regimes.job.run_warnings import run_warnings
from regimes.records import read_lines, unknown_fields

pytestmark = pytest.mark.usefixtures("one_process")

NO_FOLDERS: tuple[Any, ...] = ("", 5)


def wrapped(width: int = 6) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(5, width), nn.Linear(width, 3)))


def test_another_policy_decides_from_the_next_unit_on() -> None:
    saved = regimes.attach(wrapped(), policy="accordion").state_dict()
    model = wrapped()
    hook = regimes.attach(model, policy={"name": "static", "level": "high"})
    hook.load_state_dict(saved)
    assert {*hook.levels.values()} == {"low", "dense"}  # biases are sent whole
    model(torch.ones(2, 5)).sum().backward()
    hook.epoch_end(lr=0.1)
    assert {*hook.levels.values()} == {"high", "dense"}
    hook.close()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        *[
            ({"timeout": value}, f"timeout = {value!r}: expected a positive number of seconds")
            for value in (-1, 0, float("nan"), float("inf"), 1e300, "600", True, None)
        ],
        *[
            ({"seed": value}, f"seed = {value!r}: expected a whole number of at most 63 bits")
            for value in ("x", 0.5, True, None, 10**30)
        ],
        *[
            ({"levels": value}, "levels = .*: expected a table of levels by name")
            for value in (["low", "high"], "low", 4, {1: 2})
        ],
        ({"levels": {"low": "4", "high": 1}}, "level of PowerSGD = '4': expected a rank"),
        *[
            ({"scaler": value}, "scaler = .*: expected a GradScaler of torch")
            for value in (1.0, "dynamic", {"get_scale": 1})
        ],
        *[
            ({"record": value}, "record = .*: expected a folder")
            for value in ("", 5, *map(regimes.RecordOptions, NO_FOLDERS))
        ],
        ({"policy": 7}, "policy = 7: expected"),
        ({"policy": "regimes:PowerSGD"}, "is no policy: it has no"),
        ({"compressor": "regimes:Static"}, "is no compressor: it has no"),
    ],
)
def test_attach_refuses_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    model = wrapped()
    with pytest.raises(ConfigError, match=sentence.replace("+", r"\+")):
        regimes.attach(model, **given)
    regimes.attach(model, policy="accordion")  # nothing was registered


def test_what_is_not_named_is_the_measured_method_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"no compressor or policy .*Reduce\(bits=8\) says so"):
        bare = regimes.attach(wrapped())
    named = regimes.attach(wrapped(), compressor=regimes.QuantisedAllReduce(bits=8))
    assert bare.chosen.shared_facts() == named.chosen.shared_facts()
    name, level = choices.UNNAMED.values()
    clock = parse_method(f"{name}:{level}").clock
    assert clock is not None
    assert clock.low > 0.95  # in the table of measured clocks
    dense = regimes.attach(
        wrapped(), start_compressing_after=1, compressor=regimes.PowerSGD(rank="dense")
    )
    assert dense.chosen.shared_facts()["compressor"]["name"] == "powersgd"


@pytest.mark.parametrize("steps", [-1, -3, math.nan, math.inf, -math.inf, 1.5, True, "4"])
def test_the_first_steps_without_compression_are_a_whole_number(steps: Any) -> None:
    with pytest.raises(ConfigError, match="start_compressing_after = "):
        regimes.attach(
            wrapped(), start_compressing_after=steps, compressor=regimes.PowerSGD(rank=8)
        )
    with pytest.raises(ConfigError, match="start_compressing_after"):
        override_fields(RunConfig(), {"start_compressing_after": steps})


@pytest.mark.parametrize("frozen", [False, True])
def test_sparse_gradients_are_refused_where_there_are_some(frozen: bool) -> None:
    """A frozen table of embeddings has no gradient at all."""
    table = nn.Embedding(7, 5, sparse=True)
    table.requires_grad_(not frozen)
    model = nn.Sequential(table, nn.Linear(5, 3))
    wrapper = DistributedDataParallel(model)
    if not frozen:
        with pytest.raises(ConfigError, match="module '0' makes sparse gradients"):
            regimes.attach(wrapper, policy="accordion")
        return
    hook = regimes.attach(wrapper, policy="accordion")
    wrapper(torch.arange(4)).sum().backward()
    assert list(hook.epoch_end(lr=0.1)) == ["1.weight"]


def test_a_model_that_trains_nothing_is_one_sentence() -> None:
    model = wrapped()
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter to train: DDP has nothing to reduce"):
        regimes.attach(model, policy="accordion")


def trained(**given: Any) -> regimes.Hook:
    model = wrapped()
    hook = regimes.attach(model, **({"policy": "accordion"} | given))
    model(torch.ones(4, 5)).square().sum().backward()
    hook.epoch_end(lr=np.float32(0.1))
    return hook


def test_numbers_of_numpy_are_numbers() -> None:
    levels = {"low": np.int64(4), "high": np.int32(1)}
    hook = trained(levels=levels, timeout=np.float32(60), policy="static")
    assert {type(value) for value in hook.chosen.levels.values()} == {int}
    percent = trained(compressor="topk", levels={"low": np.float64(50), "high": np.float32(1)})
    assert percent.chosen.levels == {"low": 50.0, "high": 1.0}


def test_a_state_of_other_shapes_or_levels_is_refused() -> None:
    levels = {"low": 2, "high": 1}  # of a matrix of 6 x 5 both send less than all
    saved = trained(levels=levels).state_dict()
    altered = copy.deepcopy(saved)
    name = next(name for name, owed in states.owed(altered).items() if owed is not None)
    layer = altered["parts"][0]["layers"][name]
    layer["residual"] = layer["residual"].flatten()[:-1]
    hook = trained(levels=levels)
    with pytest.raises(ConfigError, match=f"damaged .*the residual of layer '{name}' has shape"):
        hook.load_state_dict(altered)
    hook.load_state_dict(saved)
    other = trained(levels={"low": 3, "high": 1})
    with pytest.raises(ConfigError, match="its level low is 2, this hook's is 3"):
        other.load_state_dict(saved)


def test_a_state_of_before_a_field_of_its_compressor_was_there_is_taken() -> None:
    saved = trained(compressor="topk", levels={"low": 50, "high": 10}).state_dict()
    before = {**copy.deepcopy(saved), "compressor": "TopK(error_feedback=True)"}
    assert before["compressor"] != saved["compressor"]
    hook = trained(compressor="topk", levels={"low": 50, "high": 10})
    hook.load_state_dict(before)
    assert repr(hook.state_dict()) == repr(saved)


@pytest.mark.parametrize(
    "key",
    ["steps", "total", "parts", "traffic", "rows", "layers", "gauges", "lr", "pace"],
)
def test_a_damaged_state_is_one_sentence_and_changes_nothing(key: str) -> None:
    model = wrapped()
    hook = regimes.attach(model, compressor=regimes.PowerSGD(rank={"low": 2, "high": 1}))
    model(torch.ones(2, 5)).sum().backward()
    hook.epoch_end(lr=0.1)
    for value in ("x", 7, [1], torch.ones(2), {"a": 1}):
        before = hook.state_dict()
        damaged = {**copy.deepcopy(before), key: value}
        if key == "traffic":
            damaged = {**copy.deepcopy(before), "parts": [{**before["parts"][0], key: value}]}
        if not outcome.one_sentence("states", lambda state=damaged: hook.load_state_dict(state)):
            assert repr(hook.state_dict()) == repr(before), value
        model(torch.ones(2, 5)).sum().backward()
        hook.epoch_end(lr=0.1)


@pytest.mark.parametrize("folder", ["\0", Path("runs\0/mine")])
def test_no_folder_has_a_nul_in_its_name(folder: str | Path) -> None:
    with pytest.raises(ConfigError, match=r"record = .*: expected a folder: no path has a NUL"):
        regimes.RecordOptions(folder)


# -- what may be logged, loaded and attached again -------------------------------------------


def test_what_is_no_number_is_not_logged(tmp_path: Path) -> None:
    hook = regimes.attach(wrapped(), policy="accordion", record=tmp_path / "run")
    complex_one = torch.ones(1, dtype=torch.complex64)
    for value in (torch.ones(1, device="meta"), torch.ones(2), complex_one, 10**400):
        with pytest.raises(ConfigError, match=r"log: loss = .*: expected a number"):
            hook.log(loss=value)
    hook.log(loss=10**300)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update(lr=-5.0), "lr is -5.0"),
        (lambda s: s["pace"].update(first=-1.0), "pace.first is -1.0"),
        (lambda s: s["rows"][1].update(lr=-5.0), "rows.1.lr is -5.0"),
        (lambda s: s["rows"][0].update(next_lr=float("nan")), "rows.0.next_lr is nan"),
        (
            lambda s: s["rows"].append(s["rows"][1]),
            "rows out of order: expected unit 2, found unit 1",
        ),
        (lambda s: s["rows"].pop(0), "rows out of order: expected unit 0, found unit 1"),
        (lambda s: s["logged"].update(waiting=[{"epoch": 0}]), "logged.waiting.0.seconds is miss"),
        (lambda s: s.update(seconds={"compute": "x"}), "seconds.compute is 'x'"),
    ],
)
def test_a_state_that_no_job_had_is_refused(change: Any, words: str) -> None:
    model = wrapped()
    hook = regimes.attach(model, policy="accordion")
    for _ in range(2):
        model(torch.ones(4, 5)).square().sum().backward()
        hook.epoch_end(lr=0.1)
    state = hook.state_dict()
    damaged = copy.deepcopy(state)
    change(damaged)
    with pytest.raises(ConfigError, match=f"is damaged .*{words}"):
        hook.load_state_dict(damaged)
    hook.load_state_dict(state)


def test_a_deep_copy_of_a_hooked_model_is_attached_again() -> None:
    """DDP's copy lists the hook and does not call it."""
    model = wrapped()
    levels = {"low": 2, "high": 1}
    regimes.attach(model, policy="static", compressor=regimes.PowerSGD(rank=levels))
    with pytest.raises(ConfigError, match="has a communication hook already"):
        regimes.attach(model, policy="accordion")
    other = copy.deepcopy(model)
    hook = regimes.attach(other, policy="static", compressor=regimes.PowerSGD(rank=levels))
    with pytest.raises(ConfigError, match="has a communication hook already"):
        regimes.attach(other, policy="accordion")
    other(torch.ones(4, 5)).square().sum().backward()
    dense = sum(p.numel() for p in other.parameters())
    assert 0 < hook.traffic.floats < dense
    weight = other.module[0].weight.grad  # of rank 2 at most, and 1 for equal rows of the batch
    assert weight is not None
    assert torch.linalg.matrix_rank(weight) == 1


def test_the_python_reducer_is_refused_in_a_sentence() -> None:
    import torch._dynamo

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = wrapped()
    with pytest.raises(ConfigError, match='optimize_ddp is "python_reducer", which reduces'):
        regimes.attach(model, policy="accordion")


# -- a record of what is known ---------------------------------------------------------------


def job(make: Any, folder: Path, units: int = 4, **options: Any) -> Any:
    """A record of units of two steps, under a cosine of the rate."""
    model = wrapped()
    optimizer = make(model)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, units)
    hook = regimes.attach(
        model,
        optimizer,
        policy="static",
        every=2,
        record=folder,
        compressor=regimes.PowerSGD(rank={"low": 2, "high": 1}),
        **options,
    )
    for _ in range(units):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 5)).square().mean().backward()
            optimizer.step()
        cosine.step()
    hook.close()
    return regimes.load(folder)


def cosine_rates(lr: float, units: int = 4) -> list[float]:
    return [lr * (1 + math.cos(math.pi * unit / units)) / 2 for unit in range(units)]


def test_the_optimizer_is_recorded_as_it_is(tmp_path: Path) -> None:
    record = job(
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.05, betas=(0.8, 0.9)),
        tmp_path / "run",
    )
    optimizer = record.config["optimizer"]
    assert optimizer["name"] == "AdamW"
    assert optimizer["options"]["weight_decay"] == 0.05
    assert optimizer["options"]["betas"] == [0.8, 0.9]
    assert not {"lr", "initial_lr", "params", "foreach"} & optimizer["options"].keys()
    assert (optimizer["lr"], optimizer["schedule"]) == (None, None)
    assert optimizer.keys() == {"name", "options", "lr", "schedule"}
    assert record.epochs["lr"].tolist() == pytest.approx(cosine_rates(0.1))
    known = {
        *("name", "seed", "epochs", "unit_steps", "workers", "batch_size", "data", "model"),
        *("optimizer", "compressor", "levels", "policy", "signal", "start_compressing_after"),
        "dtype",
    }
    assert json.loads((tmp_path / "run/run.json").read_text())["config"].keys() == known


def groups_of(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices at the first rate with decay, vectors at another without."""
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim > 1) == big] for big in (True, False)
    )
    return torch.optim.SGD(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}],
        lr=0.1,
        momentum=0.9,
    )


def test_groups_are_recorded_with_what_differs(tmp_path: Path) -> None:
    """The rate of a unit is the first group's; each group's is beside it."""
    record = job(groups_of, tmp_path / "run")
    optimizer = record.config["optimizer"]
    assert optimizer["options"]["momentum"] == 0.9
    assert "weight_decay" not in optimizer["options"]
    assert optimizer["groups"] == [
        {"parameters": 5 * 6 + 6 * 3, "weight_decay": 0.1},
        {"parameters": 6 + 3, "weight_decay": 0},
    ]
    assert record.epochs["lr"].tolist() == pytest.approx(cosine_rates(0.1))
    assert record.epochs["lr_1"].tolist() == pytest.approx(cosine_rates(0.02))
    assert [row["group_lr"][0] for row in record.rows] == record.epochs["lr"].tolist()
    assert [row["next_lr"] for row in record.rows[:-1]] == record.epochs["lr"].tolist()[1:]
    html = render_page(tmp_path / "run", "10Gbit/s,50us")
    assert "{ parameters = 48, weight_decay = 0.1 }" in html
    plain = job(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), tmp_path / "one")
    assert "group_lr" not in plain.rows[0]
    assert "lr_1" not in plain.epochs


class Odd(torch.optim.SGD):
    """An optimiser with a hyper-parameter that is no plain value, and one that is infinite."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.defaults |= {"schedule": object(), "ceiling": math.inf, "scale": torch.tensor(2.0)}
        self.param_groups[0].update(self.defaults)


def test_a_hyper_parameter_that_is_no_plain_value_is_null(tmp_path: Path) -> None:
    options = job(lambda m: Odd(m.parameters()), tmp_path / "run").config["optimizer"]["options"]
    assert (options["schedule"], options["ceiling"], options["scale"]) == (None, None, 2.0)


def test_without_an_optimizer_none_is_named(tmp_path: Path) -> None:
    model = wrapped()
    hook = regimes.attach(model, policy="static", record=tmp_path / "run")
    model(torch.ones(4, 5)).square().sum().backward()
    hook.epoch_end(lr=0.1)
    hook.close()
    record = regimes.load(tmp_path / "run")
    assert record.config["optimizer"]["name"] is None
    assert unknown_fields(record.header)[2:4] == ["optimizer.name", "optimizer.options"]


# -- a record never ends a job ---------------------------------------------------------------


@dataclass(frozen=True)
class Spoils:
    """A policy whose reason is nothing that JSON knows."""

    needs: tuple[str, ...] = ()
    names: tuple[str, ...] = ("low",)

    def decide(self, history: Any, layers: Any) -> list[Any]:
        return [regimes.Decision("low", {"rule": object()})] * len(layers)


def test_a_row_that_cannot_be_written_does_not_end_the_job(tmp_path: Path) -> None:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = regimes.attach(model, optimizer, policy=Spoils(), every=1, record=tmp_path / "run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            model(torch.ones(4, 5)).square().sum().backward()
        hook.close()
    assert len(hook.rows) == 4
    (said,) = (str(w.message) for w in caught if "row" in str(w.message))
    assert "training goes on, rows are kept in memory" in said


class Listens:
    """A reporter that keeps the rows it begins with."""

    begun: ClassVar[list[list[int]]] = []

    def __init__(self, out: Path) -> None:
        self.out = out

    def start(self, header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.begun.append([row["epoch"] for row in rows])

    def step(self, epoch: int, done: int, steps: int) -> None: ...
    def epoch(self, row: dict[str, Any], seconds: dict[str, float]) -> None: ...
    def stop(self, message: str) -> None: ...


def test_after_a_rollback_reporters_begin_with_the_rows_that_are_kept(tmp_path: Path) -> None:
    """Four units are recorded; the state is that of two, and of a third whose only step is over."""
    Listens.begun.clear()
    about = regimes.RecordOptions(tmp_path / "run", reporters=("test_ddp_arguments:Listens",))
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"policy": "static", "optimizer": optimizer, "every": 1, "record": about}
    hook = regimes.attach(model, **options)
    for step in range(5):
        model(torch.ones(4, 5)).square().sum().backward()
        if step == 2:
            state = hook.state_dict()
    hook.recorder.close_files()  # as a kill does
    assert len(read_lines(tmp_path / "run/epochs.jsonl")) == 4
    model = DistributedDataParallel(model.module)
    hook = regimes.attach(model, **options)
    hook.load_state_dict(state)
    model(torch.ones(4, 5)).square().sum().backward()
    assert Listens.begun == [[], [0, 1, 2]]
    hook.close()


def test_a_job_that_ended_before_its_first_unit_is_started_again(tmp_path: Path) -> None:
    model = wrapped()
    hook = regimes.attach(model, policy="static", record=tmp_path / "run")
    model(torch.ones(4, 5)).square().sum().backward()
    assert (tmp_path / "run/run.json").exists()
    hook.recorder.close_files()  # as a kill does
    record = job(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), tmp_path / "run")
    assert record.finished
    with pytest.raises(RecordError, match="already holds a run: load the state of its hook"):
        job(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), tmp_path / "run")


def test_a_job_killed_before_its_first_checkpoint_is_started_again(tmp_path: Path) -> None:
    """Its rows are trained again: they are set aside, not lost."""
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"policy": "static", "record": tmp_path / "run", "every": 1, "optimizer": optimizer}
    hook = regimes.attach(model, **options)
    for _ in range(3):
        model(torch.ones(4, 5)).square().sum().backward()
    hook.recorder.close_files()  # as a kill does
    before = read_lines(tmp_path / "run/epochs.jsonl")
    assert len(before) == 2
    model = DistributedDataParallel(model.module)
    hook = regimes.attach(model, **options)
    with pytest.warns(UserWarning, match="2 units of a job that did not end, and no state"):
        model(torch.ones(4, 5)).square().sum().backward()
    hook.close()
    lines = read_lines(tmp_path / "run/superseded.jsonl")
    aside = [line for line in lines if line.pop("file") == "epochs.jsonl"]
    assert aside == before
    assert len(regimes.load(tmp_path / "run").rows) == 1


@pytest.mark.parametrize("within", [False, True], ids=["at a unit's end", "within a unit"])
def test_a_kill_right_after_saving_keeps_the_time_of_the_unit(within: bool, tmp_path: Path) -> None:
    """The row of a unit is written with the next unit's first step; its time is in the state."""
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"policy": "static", "optimizer": optimizer, "record": tmp_path / "run"}
    hook = regimes.attach(model, every="epoch" if not within else 4, **options)
    for step in range(6):
        model(torch.ones(4, 5)).square().sum().backward()
        if step == 3:
            time.sleep(0.05)  # the first two units' time is not that of the third
        if step % 2 and not within:
            hook.epoch_end()
    state = io.BytesIO()
    torch.save(hook.full_state_dict(), state)
    hook.recorder.close_files()
    state.seek(0)
    model = DistributedDataParallel(model.module)
    hook = regimes.attach(model, every="epoch" if not within else 4, **options)
    hook.load_full_state_dict(torch.load(state, weights_only=True))
    before = dict(hook.steps.clock.seconds)
    for _ in range(2):
        model(torch.ones(4, 5)).square().sum().backward()
    if not within:
        hook.epoch_end()
    hook.close()
    clocks = [row.keys() - {"epoch"} for row in read_lines(tmp_path / "run/seconds.jsonl")]
    assert clocks == [{"compute", "compress", "communicate"}] * (2 if within else 4)
    record = regimes.load(tmp_path / "run")
    assert (record.epochs["seconds_compress"] > 0).all()
    if within:  # two steps before the kill, two after it
        assert record.epochs["seconds_compress"][1] > before["compress"] > 0
    assert make_cases([record])


def test_a_training_that_has_diverged_says_so(tmp_path: Path) -> None:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compressor = regimes.PowerSGD(rank={"low": 2, "high": 1})
    hook = regimes.attach(
        model, optimizer, policy="static", every=2, record=tmp_path / "run", compressor=compressor
    )

    def train() -> None:
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 5)).square().mean() * (math.nan if step >= 2 else 1.0)
            loss.backward()
            optimizer.step()
            hook.log(metric=0.5)
        hook.close()

    with pytest.warns(
        UserWarning, match=r"no step of unit 1 .* has the training diverged"
    ) as caught:
        train()
    assert len([w for w in caught if "diverged" in str(w.message)]) == 1
    record = regimes.load(tmp_path / "run")
    assert record.rows[0]["logged"] == {"metric": 0.5}
    (said, *_) = run_warnings(record.header, record.rows)
    assert said.startswith("no step of 2 of 3 units has finite gradients")


USUAL = {"cast": "bf16"}  # levels of compressors without a number of their own


@pytest.mark.parametrize("name", REGISTRY)
def test_a_constant_level_has_a_short_spelling(name: str) -> None:
    """The same choice as a static policy of one level; for any compressor."""
    level = REGISTRY.make({"name": name}).usual.get("high", USUAL.get(name))
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = regimes.attach(model, optimizer, every=2, compressor={"name": name, "level": level})
    assert hook.chosen.levels == {"constant": level}
    assert set(hook.levels.values()) == {"constant", "dense"}
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().sum().backward()
        optimizer.step()
    hook.close()
    assert [row["layers"]["level"][0] for row in hook.rows] == ["constant"] * 2


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"level": 4, "policy": "accordion"}, "level = 4: it is one level .* leave the policy out"),
        ({"level": 4, "policy": "static"}, "level = 4: it is one level .* leave the policy out"),
        ({"level": 4, "levels": {"low": 4}}, "level = 4: it is one level .* leave one of them out"),
        *[
            ({"level": value}, "level of PowerSGD = .*: expected a rank")
            for value in (0, -1, 0.5, "4", True)
        ],
        *[
            ({"level": value}, "level of PowerSGD = .*: expected a number or a word")
            for value in ([4], {4})
        ],
        ({"level": 3, "compressor": "quantised-all-reduce"}, "= 3: expected 4 or 8"),
        (
            {"policy": {"name": "static", "level": 4}},
            r"policy.level = 4: .* leave the policy out, attach\(..., .*PowerSGD\(rank=4\)\)",
        ),
        *[
            ({"policy": name}, r'attach\(..., .*"levels": {"low": 4, "mid": ..., "high": 1}}\)')
            for name in ("l-greco", "error-ladder", "gravac")
        ],
        (
            {"policy": "error-ladder", "compressor": "quantised-all-reduce"},
            r'"levels": {"low": 8, "mid": ..., "high": 4}',
        ),
        ({"policy": {"name": "static", "level": "none"}}, r'"levels": {"none": ...}'),
    ],
)
def test_levels_that_do_not_fit_are_one_sentence(given: dict[str, Any], sentence: str) -> None:
    model = wrapped()
    with pytest.raises(ConfigError, match=sentence) as raised:
        regimes.attach(model, **given)
    assert "\n" not in str(raised.value)
    regimes.attach(model, compressor=regimes.PowerSGD(rank=4))  # nothing was registered


@pytest.mark.parametrize(
    ("scatter", "gather", "sentence"),
    [
        ({"levels": [8, 4]}, None, r"scatter\.levels = \[8, 4\]: expected a table of levels"),
        ({"levels": "low"}, None, r"scatter\.levels = 'low': expected a table of levels"),
        ({4: 8}, None, r"scatter\.4: Known: block, "),
        ({"level": 4, 8: 1, "blok": 2}, None, r"scatter\.8: Known: "),
        ({"name": ["quantised"], "level": 4}, None, r"scatter\.name = \['quantised'\]: "),
        ({"level": 4}, {8: 64}, r"gather\.8: Known: block, level"),
    ],
)
def test_tables_of_what_fsdp2_exchanges_are_refused_in_a_sentence(
    scatter: Any, gather: Any, sentence: str
) -> None:
    def choose() -> object:
        if gather is None:
            return arguments.choose_scatter(scatter, "accordion")
        return arguments.within_replicas(scatter, gather)

    with pytest.raises(ConfigError, match=f"^{sentence}"):
        choose()


def test_levels_within_replicas_may_be_numbers_of_numpy() -> None:
    theirs, ours = ({"level": eight} for eight in (np.int64(8), 8))
    found, expected = (arguments.within_replicas(table, table) for table in (theirs, ours))
    assert json.loads(json.dumps(found.table())) == expected.table()


def test_one_check_has_one_spelling() -> None:
    with pytest.raises(ConfigError, match=r"^check_every: instruments has 'cosine'"):
        pick_probe(None, {"cosine": {"stride": 10, "least": 0.9}}, 500)
    assert pick_probe(None, {"error"}, 500)[1] == {"error": {}, "cosine": {"stride": 500}}


def test_the_levels_that_are_proposed_are_taken() -> None:
    for name in ("l-greco", "error-ladder", "gravac"):
        regimes.attach(
            wrapped(),
            policy=name,
            compressor=regimes.PowerSGD(rank={"low": 4, "mid": 2, "high": 1}),
        )


class Hollow(nn.Module):
    """A layer without any number beside one that has some."""

    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 4)
        self.odd = odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        parts = [p.sum() for p in self.odd.parameters()]
        return y + torch.stack(parts).sum() if parts else y


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("odd", ["none out", "none in"])
def test_layers_without_numbers_change_nothing(name: str, odd: str) -> None:
    level = REGISTRY.make({"name": name}).usual.get("high", USUAL.get(name))
    kinds = {
        "none out": lambda: nn.ParameterList([torch.zeros(0, 3), torch.zeros(0)]),
        "none in": lambda: nn.ParameterList([torch.zeros(2, 0)]),
        "none": nn.Identity,
    }
    updates = []
    for kind in (odd, "none"):
        model = DistributedDataParallel(Hollow(kinds[kind]()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook = regimes.attach(model, optimizer, every=2, compressor={"name": name, "level": level})
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            optimizer.step()
        hook.load_state_dict(hook.state_dict())
        updates.append(model.module.body.weight.grad)
    assert torch.equal(*updates)


def test_a_pass_that_leaves_layers_out_is_explained_at_once() -> None:
    """As a block that is skipped, in a model of several buckets."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(300, 300), nn.Linear(300, 300)

        def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
            out: torch.Tensor = self.second(x if skip else self.first(x))
            return out

    model = DistributedDataParallel(Skips(), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    regimes.attach(model, optimizer, every=2, compressor=regimes.PowerSGD(rank=1))
    x = torch.ones(2, 300)
    for _ in range(2):
        optimizer.zero_grad()
        model(x, skip=False).sum().backward()
        optimizer.step()
    with pytest.raises(ConfigError, match=r"'first.*' had no gradient .*find_unused_parameters"):
        model(x, skip=True).sum().backward()


def test_epochs_of_a_trainer_whose_steps_are_not_known(tmp_path: Path) -> None:
    """As of Lightning's manual optimisation: two optimisers, two passes for each batch."""
    model, clock = wrapped(), SimpleNamespace(epoch=0)
    first, second = model.module
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-4) for part in (first, second)]
    bits = HookSettings("epoch", None, {"scatter": {"level": 4}})
    with pytest.raises(ConfigError, match=r"scatter: .* the trainer has not sharded the model"):
        bits.attach(model, optimizers, epoch_steps=3, total=2, batch_size=None)
    settings = HookSettings("epoch", tmp_path / "run", {"level": 1})
    hook = settings.attach(model, optimizers, epoch_steps=3, total=2, batch_size=None, clock=clock)
    for epoch in range(2):
        clock.epoch = epoch
        for _ in range(3):
            for optimizer in optimizers:
                model(torch.ones(4, 5)).square().sum().backward()
                optimizer.step()
                model.zero_grad()
    hook.close()
    record = regimes.load(tmp_path / "run")
    assert record.finished
    assert [row["steps"] for row in record.rows] == [6, 6]
    assert [row["group_lr"] for row in record.rows] == [[1e-4, 1e-4]] * 2
    assert record.header["config"]["optimizer"]["name"] == "SGD and SGD"


@pytest.mark.parametrize("every", [100, "epoch"])
def test_only_units_that_wait_for_a_call_are_missed(
    every: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted steps end a unit by themselves, however many they are. As Python ends, no unit of
    statistics that are sent can end: then the sentence is of ``close``."""
    monkeypatch.setattr("regimes.hook.ddp.hook.MANY_STEPS", 3)
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hook = regimes.attach(
        model,
        optimizer,
        policy="accordion",
        every=every,
        record=regimes.RecordOptions(instruments={"error"}),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            model(torch.ones(4, 5)).square().sum().backward()
            optimizer.step()
    missed = [str(w.message) for w in caught if "as they began" in str(w.message)]
    hook._end_job(together=False)
    said = capsys.readouterr().err
    assert "sampler" not in said
    if every == "epoch":
        assert missed == [missed[0]]
        assert "regimes: 5 steps, and epoch_end() was not called: all levels are as" in said
    else:
        assert not missed
        assert "regimes: 5 steps, and a unit has 100: all levels are as they began" in said
        assert "call close() at the end" in said
