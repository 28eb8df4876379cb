"""Optimisers against torch.optim in a plain loop, and what runs with them must keep."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import resumed_alike, weights
from torch import nn
from torch.nn import functional as F

import regimes
from regimes.base.config import OptimizerConfig, RunConfig, override
from regimes.base.errors import ConfigError, TrainingError
from regimes.data import load_task, models
from regimes.instruments.gradient_norm import Movement
from regimes.training import optimizers
from regimes.training.build import prepare_run
from regimes.training.learning_rate import LearningRate

torch.set_num_threads(1)
ADAMW = (
    "optimizer.name=adamw",
    "optimizer.lr=0.003",
    "optimizer.warmup_from=none",
    "optimizer.weight_decay=0.1",
    "optimizer.schedule=cosine",
    "optimizer.per=step",
)
MUON = ("optimizer.name=muon", *ADAMW[1:])
CUSTOM = (
    "optimizer.name=torch.optim:NAdam",
    "optimizer.options={decoupled_weight_decay=true}",
    *ADAMW[1:],
)


def config(*settings: str) -> RunConfig:
    short = [
        "epochs=3",
        "data.train_size=120",
        "data.test_size=100",
        "policy.interval=1",
        "dtype=float64",
    ]
    return override(regimes.get_preset("smoke"), [*short, *settings])


def adamw(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    groups = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, weight_decay=0.1)]


def muon(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """VGG-7 has one linear layer, its head: nothing is left for Muon, see the test of groups."""
    return adamw(parameters)


def nadam(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    groups = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [torch.optim.NAdam(groups, weight_decay=0.1, decoupled_weight_decay=True)]


@pytest.mark.parametrize(
    ("settings", "make"),
    [(ADAMW, adamw), (MUON, muon), (CUSTOM, nadam)],
    ids=["adamw", "muon", "custom"],
)
def test_one_worker_without_compression_is_a_plain_loop(
    settings: tuple[str, ...],
    make: Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]],
    tmp_path: Path,
) -> None:
    c = config("workers=1", "policy=static", "policy.level=dense", *settings)
    regimes.run(c, tmp_path / "run")
    task = load_task(c)
    batches = task.batches(c, torch.device("cpu"), torch.float64)
    model = task.build(c).to(torch.float64)
    rate = LearningRate(c.optimizer, len(batches), 3 * len(batches))
    parts, at = make(list(model.parameters())), 0
    for epoch in range(3):
        for x, y in batches.epoch(epoch, [0]):
            model.train()
            model.zero_grad()
            F.cross_entropy(model(x[0]), y[0]).backward()
            for part in parts:
                for group in part.param_groups:
                    group["lr"] = rate(at)
                part.step()
            at += 1
    ours = weights(tmp_path / "run")
    for name, parameter in model.named_parameters():
        assert torch.equal(ours[name], parameter.detach()), name


class TwoLayers(nn.Module):
    """A hidden matrix, a head, an embedding, a convolution and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.convolution = nn.Conv1d(6, 6, 3)
        self.hidden = nn.Linear(6, 5)
        self.head = nn.Linear(5, 7)


def test_muon_takes_hidden_matrices_only() -> None:
    model = TwoLayers()
    found = optimizers.build_optimizers(OptimizerConfig(name="muon", weight_decay=0.1), model, 7)
    muon, adamw = found.parts
    assert [p is model.hidden.weight for p in muon.param_groups[0]["params"]] == [True]
    assert isinstance(adamw, torch.optim.AdamW)
    every = {id(p) for part in found.parts for g in part.param_groups for p in g["params"]}
    assert every == {id(p) for p in model.parameters()}
    decays = dict(
        zip(
            (n for n, _ in model.named_parameters()),
            found.decoupled_decay(list(model.parameters())),
            strict=True,
        )
    )
    assert decays == {n: 0.0 if p.ndim < 2 else 0.1 for n, p in model.named_parameters()}


class HeadFirst(nn.Module):
    """The head is made before a hidden layer that has as many outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 7)
        self.hidden = nn.Linear(6, 7)


class Headless(nn.Module):
    """Its logits are products with the embedding; a hidden layer has as many outputs."""

    head = None

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.hidden = nn.Linear(6, 7)


def perceptron() -> nn.Module:
    """Equal sizes everywhere, and no ``head``: the last layer is it."""
    return nn.Sequential(nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 7))


TEXT = {"classes": 256, "width": 64, "depth": 2}
IMAGES = {"channels": 1, "image_size": 32}
SPLIT: dict[str, tuple[Callable[[], nn.Module], int, str]] = {  # model, classes, Muon's
    "an MLP of 4 x 64 and 256 classes": (
        lambda: models.build_model("gpt", sequence=8, heads=2, **TEXT),
        256,
        r"blocks\.\d\.(qkv|out|up|down)\.weight",
    ),
    "the same, tied": (
        lambda: models.build_model("gpt", sequence=8, heads=2, tied=True, **TEXT),
        256,
        r"blocks\.\d\.(qkv|out|up|down)\.weight",
    ),
    "a transformer": (
        lambda: models.build_model("transformer", **TEXT | {"width": 32, "classes": 32}),
        32,
        r"blocks\.layers\.\d\.(self_attn\.(in_proj_weight|out_proj\.weight)|linear\d\.weight)",
    ),
    "an LSTM as wide as its words": (
        lambda: models.build_model("lstm", classes=12, width=12, depth=2),
        12,
        r"lstm\.weight_(ih|hh)_l\d",
    ),
    "a VGG-19's classifier": (
        lambda: models.build_model("vgg19bn-cifar10", classes=8, width=1, **IMAGES),
        8,
        r"head\.[14]\.weight",
    ),
    "squeeze and excitation": (
        lambda: models.build_model("se-resnet18-cifar10", classes=16, width=16, **IMAGES),
        16,
        r".*\.(squeeze|excite)\.weight",
    ),
    "a head that is made first": (HeadFirst, 7, r"hidden\.weight"),
    "no head": (Headless, 7, r"hidden\.weight"),
    "no word of a head": (perceptron, 7, r"[02]\.weight"),
    "more outputs than classes": (perceptron, 5, r"[024]\.weight"),
}


@pytest.mark.parametrize(("make", "classes", "muons"), SPLIT.values(), ids=SPLIT)
def test_muon_takes_matrices_by_what_they_are_and_steps_as_torchs_own(
    make: Callable[[], nn.Module], classes: int, muons: str
) -> None:
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    config = OptimizerConfig(name="muon", lr=0.02, weight_decay=0.1, momentum=0.95)
    built = optimizers.build_optimizers(config, ours, classes)
    named = dict(theirs.named_parameters())
    hidden = [p for name, p in named.items() if re.fullmatch(muons, name)]
    rest = [p for name, p in named.items() if not re.fullmatch(muons, name)]
    groups = [[p for p in rest if p.ndim > 1], [p for p in rest if p.ndim < 2]]
    parts = [
        torch.optim.Muon(
            hidden, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        *[
            torch.optim.AdamW(group, lr=0.02, weight_decay=decay)
            for group, decay in zip(groups, (0.1, 0.0), strict=True)
            if group
        ],
    ]
    for _ in range(3):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        built.step()
        for part in parts:
            part.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("settings", [ADAMW, MUON], ids=["adamw", "muon"])
def test_resumed_equals_uninterrupted(settings: tuple[str, ...], tmp_path: Path) -> None:
    c = config(*settings, "dtype=float32")
    resumed_alike(c, tmp_path, 2)


def test_of_workers_states_the_momenta_are_averaged_that_all_have() -> None:
    first, second = (
        {"state": {name: {"momentum": value * torch.ones(2)} for name in names}, "groups": [0, 1]}
        for value, names in ((1.0, ["a", "b"]), (3.0, ["b"]))
    )
    mean = optimizers.mean_state([first, second])
    assert {k: v["momentum"].tolist() for k, v in mean["state"].items()} == {
        "a": [1.0, 1.0],
        "b": [2.0, 2.0],
    }


# -- the optimiser's step as a signal --------------------------------------------------------


def test_movement_is_what_the_weights_did(tmp_path: Path) -> None:
    """SGD without momentum and decay moves by rate times update: movement/lr is the mean update's
    norm, which is that of the summed update over the steps."""
    plain = (
        "optimizer.momentum=0.0",
        "optimizer.weight_decay=0.0",
        "optimizer.warmup_from=none",
        "optimizer.decay_epochs=[]",
        "signal=movement/lr",
        "optimizer.lr=0.05",
        'instruments.norms.readings=["update","movement"]',
    )
    record = regimes.run(config(*plain), tmp_path / "run")
    for row in record.rows:
        found = row["statistics"]
        for update, moved, rate in zip(
            found["norm:update"], found["norm:movement"], found["norm:movement/lr"], strict=True
        ):
            assert moved == pytest.approx(0.05 * update, rel=1e-9)
            assert rate == pytest.approx(update / row["steps"], rel=1e-9)


def test_movement_leaves_decoupled_decay_out() -> None:
    """With gradients of zero AdamW only decays: there is no movement of its own."""
    model = TwoLayers().double()
    built = optimizers.build_optimizers(OptimizerConfig(name="adamw", weight_decay=0.5), model, 7)
    decays = built.decoupled_decay(list(model.parameters()))
    gauge = Movement(lambda: (built.lr, decays), list(model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    for rate in (0.1, 0.2, 0.05):
        built.lr = rate
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        gauge.step()
        built.step()
    assert not torch.equal(before[0], model.embedding.weight)
    assert gauge.read()["movement"] == pytest.approx([0.0] * len(before), abs=1e-14)


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("optimizer.name=adamv",), "unknown optimizer 'adamv': did you mean 'adamw'"),
        (("optimizer.name=no.such:Thing",), "cannot import the optimizer"),
        (("optimizer.name=adamw", "optimizer.options={speed=3}"), "cannot be built: .*speed"),
        (("optimizer.name=torch.nn:Linear",), "cannot be built|is no torch.optim.Optimizer"),
        (
            ("optimizer.warmup_steps=10",),
            "optimizer.warmup_steps: .* set optimizer.per",
        ),
    ],
)
def test_bad_input_is_one_sentence(settings: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        prepare_run(config(*settings))


def test_a_step_that_no_weight_can_take_is_one_sentence() -> None:
    model = nn.Linear(3, 2)
    optimizer = optimizers.build_optimizers(OptimizerConfig(), model, 2)
    optimizer.lr = 1e300
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(TrainingError, match=r"rate 1e\+300 overflows: lower optimizer\.lr"):
        optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_a_fused_step_is_the_same_step(name: str) -> None:
    """Three steps of one kernel, as without ``deterministic`` on a GPU, to the last bits."""
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
        built = optimizers.build_optimizers(
            OptimizerConfig(name=name, lr=0.1), model, 3, fused=fused
        )
        kinds = [part.param_groups[0].get("fused") for part in built.parts]
        assert kinds[-1] is fused
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
            built.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
