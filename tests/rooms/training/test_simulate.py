"""`regimes.simulate` (oracles: the trainer's own presets bit for bit, a loop of a few lines)."""

from __future__ import annotations

import copy
import math
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ddp_scripts import group as processes
from jaxtyping import config
from PIL import Image
from runs import Reporter
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import regimes
from regimes.base.config import DataConfig
from regimes.base.errors import ConfigError, DataError, RecordError, RegimesError, TrainingError
from regimes.base.seeding import preserve_streams
from regimes.data import images, models
from regimes.data.images import Normaliser
from regimes.data.objects import ObjectTask, usual_loss
from regimes.data.samples import Samples
from regimes.instruments import hessian as curvature

QUICK: dict[str, Any] = {"workers": 2, "batch_size": 8, "epochs": 2, "optimizer": {"lr": 0.05}}
STATIC = {"name": "static", "level": "low"}


def points(count: int = 80, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points of three classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return x, x[:, :3].argmax(1)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def simulated(out: Path, model: Any = network, **changes: Any) -> regimes.Record:
    data = changes.pop("data", points())
    options = {**QUICK, "policy": STATIC, **changes}
    return regimes.simulate(model, data, points(20, 1), out=out, **options)


@dataclass(frozen=True)
class Named:
    """A policy whose fields are named as those of "windows" are, and mean something else."""

    layers: tuple[str, ...] = ("0.weight",)
    windows: int = 3
    needs = ()
    names = ("low",)

    def decide(self, history: Any, layers: Any) -> list[regimes.Decision]:
        return [regimes.Decision("low") for _ in layers]


# -- oracles ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:policy. accordion chose")
def test_a_preset_given_as_objects_has_the_same_bits(tmp_path: Path) -> None:
    config = regimes.override(
        regimes.get_preset("smoke"),
        [
            "epochs=2",
            "optimizer.decay_epochs=[]",
            "union_pass=false",
            "data.augment=false",
            "data.train_size=200",
            "data.test_size=100",
            "policy={name='accordion', interval=1}",
        ],
    )
    expected = regimes.run(config, tmp_path / "preset")
    digits = images.load_images(config.data)
    normalise = Normaliser(digits, "cpu", torch.float32)
    train = normalise(digits.train_x), digits.train_y
    test = normalise(digits.test_x), digits.test_y
    _, channels, size, _ = digits.train_x.shape
    shape = {"classes": 10, "channels": channels, "image_size": size}
    record = regimes.simulate(
        lambda: models.build_model(**vars(config.model), **shape),
        train,
        TensorDataset(*test),
        out=tmp_path / "objects",
        workers=config.workers,
        batch_size=config.batch_size,
        epochs=2,
        compressor=regimes.PowerSGD(),
        levels=config.levels,
        policy=regimes.Accordion(interval=1),
        optimizer=config.optimizer,
        set={
            "signal": config.signal,
            "data.drop_last": config.data.drop_last,
            "union_pass": False,
        },
    )
    assert record.header["metric"] == "accuracy"
    for ours, theirs in zip(record.rows, expected.rows, strict=True):
        for name in ("metric", "train_loss", "layers", "statistics", "collectives", "lr"):
            assert ours[name] == theirs[name], name


def test_dense_steps_are_those_of_a_loop(tmp_path: Path) -> None:
    """Without compression a step takes the mean of the workers' gradients."""
    (x, y), model, rate = points(16), network().double(), 0.1
    ours = copy.deepcopy(model)
    record = regimes.simulate(
        model,
        (x, y),
        (x, y),
        out=tmp_path / "run",
        workers=2,
        batch_size=8,
        epochs=5,
        policy={"name": "static", "level": "dense"},
        optimizer={"lr": rate, "momentum": 0, "weight_decay": 0},
        set={"dtype": "float64"},
    )
    for row in record.rows:
        loss = F.cross_entropy(ours(x.double()), y)
        gradients = torch.autograd.grad(loss, [*ours.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(ours.parameters(), gradients, strict=True):
                parameter -= rate * gradient
        after = F.cross_entropy(ours(x.double()), y).item()
        assert row["train_loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert row["test_loss"] == pytest.approx(after, rel=1e-12)


def group_run(rank: int, out: str) -> list[Any]:
    record = simulated(Path(out), workers=4, set={"timeout": 60.0}, data=Noisy())
    return [(row["train_loss"], row["metric"]) for row in record.rows]


def test_processes_have_the_numbers_of_one(tmp_path: Path) -> None:
    alone = simulated(tmp_path / "one", workers=4, data=Noisy())
    expected = [(row["train_loss"], row["metric"]) for row in alone.rows]
    found = processes.run(group_run, 2, str(tmp_path / "two"), timeout=None)
    for rows in found:
        assert [row[0] for row in rows] == pytest.approx([row[0] for row in expected], rel=1e-5)


# -- models and data of several kinds ----------------------------------------------------------


class Noisy(Dataset[Any]):
    """Samples that are augmented at random."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x, y = points()
        return x[i] + 0.1 * torch.randn(6), int(y[i])


@dataclass
class Output:
    """As of a Hugging Face model."""

    logits: Tensor


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor) -> Output:
        return Output(self.out(self.embed(input_ids)))


class Tokens(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return {"input_ids": [(i + j) % 11 for j in range(9)]}


def test_a_causal_language_model_learns_the_next_token(tmp_path: Path) -> None:
    record = regimes.simulate(
        Causal,
        Tokens(),
        Tokens(),
        out=tmp_path,
        workers=2,
        batch_size=8,
        epochs=12,
        policy=STATIC,
        optimizer={"name": "adamw", "lr": 0.05},
    )
    assert record.header["metric"] == "loss"
    assert record.epochs["metric"].iloc[-1] < 0.2 < record.epochs["metric"].iloc[0]
    assert record.config["model"]["name"] == "Causal"


def test_a_regression_with_a_loss_and_a_metric_of_its_own(tmp_path: Path) -> None:
    x, _ = points(64)
    y = x[:, :1] * 2

    def worst(output: Tensor, target: Tensor) -> float:
        return float((output - target).abs().max())

    record = regimes.simulate(
        nn.Linear(6, 1),
        (x, y),
        (x, y),
        out=tmp_path,
        loss=F.l1_loss,
        metric=worst,
        **{**QUICK, "epochs": 8, "policy": STATIC},
    )
    assert record.header["metric"] == "worst"
    assert record.epochs["test_loss"].iloc[-1] < 0.5 * record.epochs["test_loss"].iloc[0]
    assert (record.epochs["metric"] > record.epochs["test_loss"]).all()


def test_draws_of_a_data_set_depend_on_the_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = simulated(tmp_path / "a", data=Noisy())
    torch.manual_seed(2)
    second, third = simulated(tmp_path / "b", data=Noisy()), simulated(tmp_path / "c")
    assert first.rows == second.rows
    assert first.rows != third.rows


@pytest.mark.filterwarnings("ignore:policy. .*Named chose")
def test_the_users_model_is_left_alone(tmp_path: Path) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    simulated(tmp_path, model, policy=Named())
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


# -- the record --------------------------------------------------------------------------------


class Stop(Exception):
    pass


class Stopper:
    """A data set that fails while the second epoch is trained."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __len__(self) -> int:
        return 80

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.limit -= 1
        if self.limit < 0:
            raise Stop
        x, y = points()
        return x[i], y[i]


def test_a_stopped_run_goes_on_and_an_ended_one_is_returned(tmp_path: Path) -> None:
    whole = simulated(tmp_path / "whole", data=Stopper(1e9))
    with pytest.raises(Stop):
        simulated(tmp_path / "again", data=Stopper(80 + 120))
    again = simulated(tmp_path / "again", data=Stopper(1e9))
    assert again.rows == whole.rows
    assert simulated(tmp_path / "again", data=Stopper(1e9)).rows == whole.rows


def test_another_loss_or_metric_is_another_run(tmp_path: Path) -> None:
    def squares(output: Tensor, target: Tensor) -> Tensor:
        return (output - F.one_hot(target, 3)).square().mean()

    simulated(tmp_path / "run")
    with pytest.raises(RecordError, match=r"with the loss by default, not .*squares"):
        simulated(tmp_path / "run", loss=squares)
    simulated(tmp_path / "own", loss=squares)
    with pytest.raises(RecordError, match=r"with the metric by default, not .*squares"):
        simulated(tmp_path / "own", loss=squares, metric=squares)


OTHERS = (
    lambda: nn.Sequential(nn.Linear(6, 12), nn.Sigmoid(), nn.Linear(12, 3)),
    lambda: nn.Sequential(nn.Linear(6, 12), nn.Softplus(2.0), nn.Linear(12, 3)),
    lambda: seeded_network(1),
    lambda: nn.Sequential(seeded_network(0), nn.BatchNorm1d(3, affine=False)),
)


def seeded_network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return network()


@pytest.mark.parametrize("stopped", [False, True])
def test_another_model_is_another_run(stopped: bool, tmp_path: Path) -> None:
    """Of the same shapes, whose checkpoint would fit; and a finished record is not returned."""
    out, torch_state = tmp_path / "run", torch.get_rng_state()
    counting = Stopper(1e9)
    simulated(tmp_path / "counted", seeded_network(0), data=counting)
    data: Any = Stopper(1e9 - counting.limit - 40) if stopped else points()
    with pytest.raises(Stop) if stopped else nullcontext():
        simulated(out, seeded_network(0), data=data)
    data = Stopper(1e9) if stopped else points()
    before = (out / "epochs.jsonl").read_bytes()
    for other in OTHERS:
        with pytest.raises(RecordError, match=r"trained with (another model|other first weights)"):
            simulated(out, other(), data=data)
        assert (out / "epochs.jsonl").read_bytes() == before
    assert len(simulated(out, seeded_network(0), data=data).rows) == 2
    torch.set_rng_state(torch_state)


def test_a_first_row_that_was_torn_is_no_epoch(tmp_path: Path) -> None:
    """So another run may take the folder."""
    simulated(tmp_path, loss=F.cross_entropy)
    rows = (tmp_path / "epochs.jsonl").read_bytes()
    (tmp_path / "epochs.jsonl").write_bytes(rows[: rows.index(b"\n")])
    shutil.rmtree(tmp_path / "checkpoints")
    assert len(simulated(tmp_path, loss=None).rows) == 2


def test_a_run_that_its_first_loss_stopped_is_begun_again(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="see whether the loss or the first weights have NaN"):
        simulated(tmp_path, loss=lambda output, target: output.mean() * math.nan)
    assert len(simulated(tmp_path).rows) == 2


def test_a_metric_is_of_all_test_samples_at_once(tmp_path: Path) -> None:
    x = torch.randn(257, 6, generator=torch.Generator().manual_seed(3))
    test, seen = (x, x[:, :1]), list[int]()

    def explained(output: Tensor, target: Tensor) -> Tensor:
        seen.append(len(target))
        return 1 - (output - target).square().sum() / (target - target.mean()).square().sum()

    record = regimes.simulate(
        nn.Linear(6, 1), test, test, out=tmp_path, metric=explained, policy=STATIC, **QUICK
    )
    assert math.isfinite(record.rows[-1]["metric"] or math.nan)
    assert set(seen) == {2, 257}  # 2: before training, whether it takes the model's outputs


def test_classes_that_a_loss_ignores_or_has_in_the_second_dimension(tmp_path: Path) -> None:
    x, y = points()
    y = torch.where(torch.arange(80) % 5 == 0, 255, y)
    loss = nn.CrossEntropyLoss(ignore_index=255)
    record = simulated(tmp_path / "ignored", data=(x, y), loss=loss)
    assert record.header["metric"] == "accuracy"
    images, classes = torch.randn(24, 1, 2, 2), torch.randint(0, 3, (24, 2, 2))
    regimes.simulate(
        nn.Conv2d(1, 3, 1),
        (images, classes),
        (images, classes),
        out=tmp_path / "images",
        loss=nn.CrossEntropyLoss(),
        policy=STATIC,
        **QUICK,
    )


class Shaped(nn.Module):
    """Outputs of a shape, without that of the samples."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.layer = shape, nn.Linear(6, math.prod(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).view(len(x), *self.shape)


REAL = "real targets .* have other shapes"
AXIS_1 = r"classes on axis 1 for targets \[2, \d.*: pass loss=torch.nn.functional.cross_entropy"
EITHER = "or on the last axis: pass loss=.* if they are on axis 1, or loss=lambda"


@pytest.mark.parametrize(
    ("outputs", "targets", "whole", "says"),
    [
        ((2, 3), (3, 2), False, REAL),
        ((2, 2), (4,), False, REAL),
        ((4,), (2, 2), False, REAL),
        ((3, 5), (5,), True, AXIS_1),
        ((3, 4, 2), (4, 2), True, AXIS_1),
        ((5, 5), (5,), True, EITHER),
        ((4, 4, 4), (4, 4), True, EITHER),
        ((3,), (3,), True, "have no class for each of the targets"),
    ],
)
def test_axes_that_would_be_paired_crosswise_are_refused(
    outputs: tuple[int, ...], targets: tuple[int, ...], whole: bool, says: str, tmp_path: Path
) -> None:
    x, _ = points()
    y = torch.randint(2, (len(x), *targets)) if whole else torch.randn(len(x), *targets)
    with pytest.raises(ConfigError, match=says):
        regimes.simulate(Shaped(*outputs), (x, y), (x, y), out=tmp_path, policy=STATIC, **QUICK)


@pytest.mark.parametrize(
    ("outputs", "targets", "whole"),
    [
        ((1,), (), False),
        ((), (1,), False),
        ((3,), (3, 1), False),
        ((2, 3), (2, 3), False),
        ((3,), (), True),
        ((3,), (1,), True),
        ((5, 3), (5,), True),
        ((4, 5, 3), (4, 5), True),
    ],
)
def test_axes_of_one_number_do_not_matter(
    outputs: tuple[int, ...], targets: tuple[int, ...], whole: bool
) -> None:
    """Oracle: torch's losses of the flattened numbers."""
    torch.manual_seed(0)
    output = torch.randn(7, *outputs)
    target = torch.randint(2, (7, *targets)) if whole else torch.randn(7, *targets)
    if whole:
        expected = nn.functional.cross_entropy(output.reshape(-1, outputs[-1]), target.flatten())
    else:
        expected = (output.flatten() - target.flatten()).square().mean()
    torch.testing.assert_close(usual_loss(output, target), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_target(side: str) -> None:
    ids = torch.tensor([3, 1, 2, 0, 0])
    mask = torch.tensor([1, 1, 1, 0, 0])
    if side == "left":
        with pytest.raises(DataError, match="pad at the end"):
            Samples([{"input_ids": ids.flip(0), "attention_mask": mask.flip(0)}], "data").digest()
        return
    x, y = Samples([{"input_ids": ids, "attention_mask": mask}], "data").take(torch.arange(1))
    assert (x.tolist(), y.tolist()) == ([[3, 1, 2, 0]], [[1, 2, -100, -100]])


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"input_ids": torch.ones(1, 5)}, r"input_ids .* has the shape \[1, 5\]: expected \[5\]"),
        ({"input_ids": 3}, r"input_ids .* has the shape \[\]: expected \[1\]"),
        ({"labels": 3}, r"labels .* has the shape \[\]: expected \[5\]"),
        ({"labels": torch.ones(4)}, r"labels .* has the shape \[4\]: expected \[5\]"),
        ({"attention_mask": [1] * 6}, r"attention_mask .* has the shape \[6\]: expected \[5\]"),
        ({"input_ids": None}, "input_ids of a sample of data holds a None"),
    ],
)
def test_a_sample_is_one_text_with_a_label_for_each_token(item: dict[str, Any], says: str) -> None:
    """A batch of one text, as tokenizers make it, would lose the text: its last row is dropped."""
    whole = {"input_ids": torch.arange(5), "labels": None, "attention_mask": None}
    x, y = Samples([whole], "data").take(torch.arange(1))
    assert (x.tolist(), y.tolist()) == ([[0, 1, 2, 3]], [[1, 2, 3, 4]])
    with pytest.raises(DataError, match=says):
        Samples([whole | item], "data").take(torch.arange(1))


def test_shapes_that_would_be_broadcast_are_warned_of(tmp_path: Path) -> None:
    x, _ = points()
    data = x, x[:, 0]
    with pytest.warns(UserWarning, match=r"outputs \[2, 1\] and targets \[2\] of train_data"):
        regimes.simulate(
            nn.Linear(6, 1),
            data,
            data,
            out=tmp_path,
            loss=lambda output, target: (output - target).abs().mean(),
            policy=STATIC,
            **QUICK,
        )


class Frozen(nn.Module):
    """Keeps its normalisation in evaluation by itself, as detection models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = normalised()

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.inside[1].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def in_eval(model: nn.Module) -> nn.Module:
    model[1].eval()
    return model


@pytest.mark.parametrize("shape", ["one worker", "workers", "union", "local steps"])
@pytest.mark.parametrize("kind", ["statistics", "dropout", "own train"])
def test_a_module_in_evaluation_stays_so(kind: str, shape: str, tmp_path: Path) -> None:
    """Oracle: at a rate of 0 the model in evaluation has the losses from its start throughout."""
    torch.manual_seed(0)
    made: dict[str, Callable[[], nn.Module]] = {
        "statistics": lambda: in_eval(normalised()),
        "dropout": lambda: in_eval(
            nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.9), nn.Linear(12, 3))
        ),
        "own train": Frozen,
    }
    model = made[kind]()
    x, y = points()
    settings: dict[str, dict[str, Any]] = {
        "one worker": {"workers": 1},
        "workers": {"set": {"union_pass": False}},
        "union": {"set": {"union_pass": True}},
        "local steps": {"set": {"sync_policy": {"name": "static", "level": "2"}}},
    }
    expected = F.cross_entropy(copy.deepcopy(model).eval()(x), y).item()
    record = regimes.simulate(
        model,
        (x, y),
        (x, y),
        out=tmp_path,
        policy=STATIC,
        **{**QUICK, "optimizer": {"lr": 1e-30, "weight_decay": 0.0}, **settings[shape]},
    )
    for row in record.rows:
        assert row["test_loss"] == pytest.approx(expected, rel=1e-5)
        assert row["train_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_model_that_is_in_evaluation_as_a_whole_trains(tmp_path: Path) -> None:
    """As a script's ``model.train()`` would let it, from the first epoch on."""

    def left() -> nn.Module:
        return normalised().eval()

    one, other = (
        simulated(tmp_path / name, make, name="one")
        for name, make in (("all", normalised), ("left", left))
    )
    assert [row["train_loss"] for row in one.rows] == [row["train_loss"] for row in other.rows]


def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    record = simulated(tmp_path)
    arrays = tuple(part.numpy() for part in points())
    assert simulated(tmp_path, data=arrays).rows == record.rows
    with pytest.raises(RecordError):
        simulated(tmp_path, batch_size=4)
    with pytest.raises(RecordError, match="other data"):
        simulated(tmp_path, data=points(80, 5))


def test_a_run_that_is_refused_starts_and_stops_no_reporter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The commonest mistake in a notebook: change ``epochs``, and run the cell again."""
    told: list[str] = []

    class Line(Reporter):
        def start(self, *_: Any) -> None:
            told.append("start")

        def stop(self, message: str) -> None:
            told.append("stop")

    simulated(tmp_path, reporters=[Line()])
    with pytest.raises(RecordError):
        simulated(tmp_path, reporters=[Line()], epochs=3)
    assert told == ["start", "stop"]
    assert not caplog.records


def test_records_are_compared_and_drawn(tmp_path: Path) -> None:
    runs = [
        simulated(
            tmp_path / f"{level}-{seed}",
            seed=seed,
            name=level,
            policy={"name": "static", "level": level},
        )
        for level in ("low", "dense")
        for seed in (0, 1, 2)
    ]
    assert regimes.compare(runs)["n"].tolist() == [3]
    with pytest.raises(RecordError, match="only low: name runs of another schedule"):
        regimes.compare(runs[:3])
    figure = regimes.plot(runs)
    assert figure.axes[0].get_ylabel() == "test accuracy (%)\nhigher is better"
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert regimes.plot(tmp_path, "bytes", against="floats").axes
    with pytest.raises(RecordError, match="has no column 'los', did you mean"):
        regimes.plot(runs, "los")
    with pytest.raises(RecordError, match="against"):
        regimes.plot(runs, against="bytes")  # type: ignore[arg-type]


def test_a_command_says_how_it_goes_on(tmp_path: Path) -> None:
    record = simulated(tmp_path / "run")
    config = replace(regimes.RunConfig(), data=DataConfig(name="own"))
    assert record.config["data"]["name"] == "own"
    with pytest.raises(ConfigError, match="call regimes"):
        regimes.run(config, tmp_path / "other")


# -- what is refused ---------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "policy": ({"policy": "acordion"}, "did you mean 'accordion'"),
    "compressor": ({"compressor": "powersdg"}, "did you mean 'powersgd'"),
    "kind": ({"compressor": 3}, "a name, a table with a name, or a Compressor"),
    "levels": ({"levels": {"low": 0.5}}, "level"),
    "rate": ({"optimizer": "adamw"}, "its learning rate is missing"),
    "field": ({"set": {"unit_step": 3}}, "unit_steps"),
    "model": ({"model": 3}, "an nn.Module, or a function that makes one"),
    "made": ({"model": lambda: 3}, "an nn.Module"),
    "arguments": ({"model": nn.Linear}, "Linear needs in_features, out_features, and is called"),
    "shape": ({"model": nn.Linear(5, 3)}, r"does not take inputs \[2, 6\] and targets \[2\]"),
    "word": ({"loss": "mse"}, "loss = 'mse': expected a function"),
    "no loss": ({"loss": lambda *_: None}, "the model gets the inputs alone, without labels"),
    "list": ({"loss": lambda output, target: output.mean()[None]}, r"the loss of a batch is \[1\]"),
    "metric": ({"metric": lambda output, target: output}, "expected one number"),
    "bad metric": ({"metric": lambda output, target: output.logits}, "the metric does not take"),
    "lazy": ({"model": nn.LazyLinear(3)}, "call the model once before"),
    "meta": ({"model": nn.Linear(6, 3, device="meta")}, "make the model on the CPU"),
    "classes": ({"model": nn.Linear(6, 2)}, "train_data has a target of 0 to 2: the model's outp"),
    "real": ({"data": (points()[0], torch.ones(80))}, "classes are integers"),
    "mapping": ({"data": {"x": torch.ones(3)}}, "train_data is a dict"),
    "torch": ({"optimizer": torch.optim.SGD(network().parameters(), 0.1)}, "write optimizer="),
    "unknown": ({"optimizer": {"learning_rate": 0.1}}, "missing .learning_rate: no such field."),
    "loss": ({"loss": lambda output, target: output.sum(1)}, "expected one number, a mean"),
    "no parameter": ({"model": nn.Identity()}, "no parameter"),
    "data": ({"data": 3}, "expected a data set with a length"),
    "loader": ({"data": iter([])}, "a DataLoader has its data set in .dataset"),
    "tensors": ({"data": (torch.ones(3, 6), torch.ones(2))}, "as many targets as inputs"),
    "empty": ({"data": []}, "at least one sample"),
    "sample": ({"data": [1, 2, 3]}, "a sample of train_data is a int"),
    "no dimension": ({"data": (torch.tensor(1.0), torch.tensor(0))}, "as many targets as inputs"),
    "texts": ({"data": (np.array([["a"]]), np.array([0]))}, "train_data holds a ndarray"),
    "backwards": ({"data": (np.ones((9, 6))[::-1], np.ones(9))}, "At least one stride"),
    "image": ({"data": [(Image.new("L", (6, 1)), 0)] * 9}, "a sample of train_data holds a Image"),
    "no target": ({"data": [(torch.ones(6), None)] * 9}, "a sample of train_data holds a None"),
    "few": ({"data": points(1)}, "too few"),
    "workers": ({"workers": 0}, "workers"),
    "epochs": ({"epochs": 0}, "epochs"),
    "width": ({"set": {"model.width": 3}}, "model: expected none with data"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_sentence(name: str, tmp_path: Path) -> None:
    changes, said = WRONG[name]
    with pytest.raises((ConfigError, DataError), match=said) as caught:
        simulated(tmp_path / "run", **changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


# -- samples that differ, or do not count -------------------------------------------------------


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(()),
    "numpy": np.random.rand,
    "python": random.random,
}


def drawing(draw: Callable[[], Any]) -> Dataset[Any]:
    """Samples that are drawn at random; classes in order."""

    class Alike(Noisy):
        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return torch.tensor([draw() for _ in range(6)], dtype=torch.float32), i * 3 // 80

    return Alike()


def global_streams() -> list[Any]:
    """The next number of each, but Python's, from which run-time type checkers draw."""
    with preserve_streams():
        return [float(DRAWS[name]()) for name in ("torch", "numpy")]


@pytest.mark.parametrize("source", DRAWS)
def test_workers_draw_their_own_random_numbers(source: str) -> None:
    """A data set that augments the same sample differently for each worker: by the seed, the epoch,
    the step and the worker alone."""
    before = global_streams()
    samples = drawing(DRAWS[source])
    config = replace(regimes.RunConfig(), workers=2, batch_size=4)
    task = ObjectTask(network, samples, samples)
    batches = task.batches(config, torch.device("cpu"), torch.float32)
    x, _ = next(batches.epoch(0, [0, 1]))
    assert not torch.equal(x[0], x[1])
    assert torch.equal(next(batches.epoch(0, [1]))[0][0], x[1])
    assert ObjectTask(network, samples, samples).digest == task.digest
    assert global_streams() == before


@pytest.mark.parametrize("source", DRAWS)
def test_a_probe_is_drawn_by_the_seed_from_all_over_a_data_set(source: str) -> None:
    """Classes in order; the same batches again, and on two processes, which leave no trace."""
    model, where = network(), (torch.device("cpu"), torch.float32)
    before = global_streams()
    task = ObjectTask(network, drawing(DRAWS[source]), drawing(DRAWS[source]))
    config = replace(regimes.RunConfig(), workers=2, batch_size=4)
    batches = task.batches(config, *where)

    def probe(rank: int, processes: int) -> list[Tensor]:
        world = SimpleNamespace(rank=rank, processes=processes)
        return [part for pair in task.probe(batches, world, 16, 4) for part in pair]  # type: ignore

    found = probe(0, 1)
    both = [*probe(0, 2), *probe(1, 2)]
    assert all(map(torch.equal, found, probe(0, 1)))
    assert all(map(torch.equal, found, both))
    assert torch.cat(found[1::2]).unique().tolist() == [0, 1, 2]
    assert not torch.equal(found[0], found[2])
    assert task.evaluate(model, *where) == task.evaluate(model, *where)
    assert global_streams() == before


def test_a_digest_is_of_samples_all_over_a_data_set() -> None:
    x, y = points(600)
    changed = x.clone()
    changed[598] += 1
    digests = {Samples(list(zip(part, y, strict=True)), "d").digest() for part in (x, changed)}
    assert len(digests) == 2
    y[598] = 7
    with pytest.raises(DataError, match="has a target of 0 to 7"):
        Samples(list(zip(x, y, strict=True)), "train_data").check_classes(3)


def test_a_batch_without_targets_adds_nothing_to_an_evaluation(tmp_path: Path) -> None:
    """Of 20 test samples the first 12 are ignored; batches are of 4."""
    x, y = points(20, 1)
    y[:12] = -100
    given = {"out": tmp_path, "policy": STATIC, **QUICK}
    with patch("regimes.data.objects.EVALUATED", 4):
        record = regimes.simulate(network, points(), (x, y), **given)
    only = regimes.simulate(network, points(), (x[12:], y[12:]), **given | {"out": tmp_path / "b"})
    for ours, theirs in zip(record.rows, only.rows, strict=True):
        for name in ("test_loss", "metric"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6), name  # type: ignore[literal-required]


def test_a_worker_without_targets_is_named(tmp_path: Path) -> None:
    x, y = points()
    y[33] = -100
    with pytest.raises(TrainingError, match=r"no target of worker \d counts in epoch 0, step \d+:"):
        simulated(tmp_path / "one", data=(x, y), batch_size=1)
    with pytest.raises(DataError, match="train_data has no target that counts: all are ignored"):
        simulated(tmp_path / "all", data=(x, torch.full_like(y, -100)))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3))


ONE_SAMPLE: dict[str, tuple[dict[str, Any], str]] = {
    "the last": ({"batch_size": 8}, "a last batch"),
    "all": ({"batch_size": 1}, "a batch"),
    "union": ({"batch_size": 8, "set": {"union_pass": True}}, "a last batch"),
    "micro": (
        {
            "batch_size": 2,
            "set": {
                "batch_levels": {"low": 2, "high": 8},
                "batch_policy": {"name": "static", "level": "high"},
                "data.drop_last": False,
            },
        },
        "a last micro-batch",
    ),
}


@pytest.mark.parametrize("name", ONE_SAMPLE)
def test_a_batch_of_one_that_cannot_be_normalised_is_said_before(name: str, tmp_path: Path) -> None:
    changes, what = ONE_SAMPLE[name]
    count = {"micro": 16 + 6}.get(name, 17)
    given = {"workers": 2, **changes}
    with pytest.raises(ConfigError, match=f"has {what} of one sample: set data.drop_last = true"):
        simulated(tmp_path / "run", normalised, data=points(count), **given)
    assert not (tmp_path / "run").exists()
    kept = {**given.get("set", {}), "data.drop_last": True}
    if name != "all":
        simulated(tmp_path / "run", normalised, data=points(count), **given | {"set": kept})


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.w.dtype) @ self.w).abs()


HESSIAN = curvature.HessianProduct(nn.Linear(6, 3), curvature.cross_entropy, [points()])
CALLS: dict[str, Any] = {
    "set": lambda out: simulated(out, set=["epochs=1"]),
    "levels": lambda out: simulated(out, levels=[1, 2]),
    "workers": lambda out: simulated(out, workers="2"),
    "epochs": lambda out: simulated(out, epochs=1.5),
    "seed": lambda out: simulated(out, seed=None),
    "name": lambda out: simulated(out, name=3),
    "reporters": lambda out: simulated(out, reporters=3),
    "policy": lambda out: simulated(out, policy={"level": "low"}),
    "compressor": lambda out: simulated(out, compressor={}),
    "out": lambda out: simulated(None),
    "out ": lambda out: simulated(""),
    "out  ": lambda out: simulated("a\0b"),
    "out   ": lambda out: simulated("x" * 300),
    "out    ": lambda out: regimes.run(regimes.RunConfig(), ""),
    "out     ": lambda out: regimes.branch(out, at=1, out=""),
    "config": lambda out: regimes.run({"epochs": 1}, out),
    "at": lambda out: regimes.branch(out, at="1", out=out),
    "record": lambda out: regimes.branch(None, at=1, out=out),
    "length": lambda out: regimes.branch(out, at=1, out=out, length=[2]),
    "folder": lambda out: regimes.load(None),
    "folder ": lambda out: regimes.load(3),
    "records": lambda out: regimes.plot(3),
    "column": lambda out: regimes.plot(out, column=3),
    "where": lambda out: regimes.plot(out, where=[3]),
    "name ": lambda out: regimes.get_preset(3),
    "largest": lambda out: curvature.eigenvalues(HESSIAN, largest=1.5),
    "start": lambda out: curvature.eigenvalues(HESSIAN, start=3),
    "hessian": lambda out: curvature.eigenvalues(3),
    "products": lambda out: curvature.trace(HESSIAN, products="3"),
    "no gradient": lambda out: simulated(out, loss=lambda a, b: F.cross_entropy(a, b).detach()),
    "type": lambda out: simulated(out, loss=lambda a, b: a.sum().long()),
    "type ": lambda out: simulated(out, loss=lambda a, b: F.cross_entropy(a, b) + 0j),
    "complex": lambda out: simulated(out, Complex()),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_of_a_wrong_type_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.update("jaxtyping_disable", True)  # as users call it
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RegimesError, match=name.strip()) as caught:
        CALLS[name](tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.iterdir()]
