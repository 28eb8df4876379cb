"""When `simulate` computes all workers in one pass (oracle: a pass for each, in float64), and that
it does not where this would give other numbers."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pretended
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import regimes
from regimes.training.build import prepare_run
from regimes.training.simulate import own_training

STATIC = {"name": "static", "level": "low"}
COUNT = 80


def points(kind: str = "classes", count: int = COUNT) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 6, generator=generator)
    classes = x[:, :3].argmax(1)
    tokens = torch.randint(1, 5, (count, 6), generator=generator)
    padded = tokens.masked_fill(torch.arange(6) >= 2 + torch.arange(count)[:, None] % 5, 0)
    return {
        "classes": (x, classes),
        "real": (x, x[:, :3].tanh()),
        "yes or no": (x, (x[:, :3] > 0).float()),
        "one ignored": (x, classes.index_fill(0, torch.tensor([count // 2]), -100)),
        "one lost": (x, x[:, :3].index_fill(0, torch.tensor([count // 2]), 7.0)),
        "tokens": (tokens, tokens.roll(-1, 1)),
        "padded": (padded, classes),
        "images": (
            x[:, :, None, None].expand(-1, -1, 4, 4) * torch.arange(16.0).view(4, 4),
            classes,
        ),
    }[kind]


class Made(nn.Module):
    """Two layers, and between them what a function makes of ``[b, 12]``.

    Attributes:
        kept: for what a function keeps from pass to pass.
    """

    def __init__(self, between: Callable[[Made, Tensor], Tensor], **kept: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)
        self.between, self.gate = between, nn.Parameter(torch.zeros(12))
        for name, value in kept.items():
            setattr(self, name, value)
        self.register_buffer("seen", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.between(self, self.first(x)).tanh() + 0 * self.gate)
        return made


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(6, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


class Words(nn.Module):
    """A model of tokens; by ``mixes`` the workers' texts are each other's context, too."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=not mixes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        made: Tensor = self.head(x + self.attend(x, x, x, need_weights=False)[0])
        return made


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(8, 8),
            nn.LSTM(8, 8, batch_first=True),
            nn.Linear(8, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.lstm(self.embed(x))[0])
        return made


class Cropped(nn.Module):
    """The mean over a text up to the longest one of the batch."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.embed, self.head, self.read = nn.Embedding(8, 8), nn.Linear(8, 3), read

    def forward(self, x: Tensor) -> Tensor:
        longest = self.read((x != 0).sum(1).max())
        made: Tensor = self.head(self.embed(x[:, :longest]).mean(1))
        return made


def by_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def weighted(output: Tensor, target: Tensor) -> Tensor:
    """A sum over samples by the number of samples, in the user's own words."""
    return (output - target).square().mean(1).sum() / len(target)


def in_parts(output: Any, target: Tensor) -> Tensor:
    whole, auxiliary = output
    return F.cross_entropy(whole, target) + 0.3 * F.cross_entropy(auxiliary, target)


class Forked(nn.Module):
    """A model of several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.a(hidden), self.b(hidden)


def statistics_kept() -> nn.Module:
    model = convolution().train()
    model[1].eval()
    return model


def twice(model: Made, x: Tensor) -> Tensor:
    made: Tensor = checkpoint(lambda y: (2 * y).tanh(), x, use_reentrant=False)
    return made


# Model, kind of data, arguments of `simulate`.
EXACT: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    "classes": (network, "classes", {}),
    "a ragged last batch": (network, "classes", {"batch_size": 9}),
    "one sample each": (network, "classes", {"batch_size": 1, "epochs": 1}),
    "images and BatchNorm": (convolution, "images", {"batch_size": 9}),
    "BatchNorm in evaluation": (statistics_kept, "images", {}),
    "real targets": (network, "real", {}),
    "a loss of torch": (network, "yes or no", {"loss": nn.BCEWithLogitsLoss()}),
    "a loss of one's own": (network, "real", {"loss": weighted}),
    "a loss that is said to be a mean": (
        network,
        "real",
        {"loss": weighted, "loss_weight": "samples"},
    ),
    "several outputs": (Forked, "classes", {"loss": in_parts, "loss_weight": "samples"}),
    "attention": (Words, "tokens", {"loss": by_tokens, "loss_weight": "samples"}),
    "an LSTM": (Recurrent, "tokens", {}),
    "LayerNorm": (lambda: Made(lambda m, x: F.layer_norm(x, [12])), "classes", {}),
    "recomputed": (lambda: Made(twice), "classes", {}),
    "without dropout": (lambda: nn.Sequential(network(), nn.Dropout(0)), "classes", {}),
    "AdamW and clipped by nothing": (
        network,
        "classes",
        {"optimizer": {"name": "adamw", "lr": 0.01}},
    ),
    "dense": (network, "classes", {"policy": {"name": "static", "level": "dense"}}),
    "Random-K": (network, "classes", {"compressor": "randomk"}),
}


def options(given: dict[str, Any]) -> dict[str, Any]:
    usual = {"workers": 3, "batch_size": 8, "epochs": 2, "optimizer": {"lr": 0.05}}
    fields = {"dtype": "float64", **given.get("set", {})}
    return {"policy": STATIC, **usual, **given, "set": fields}


def decided(model: Any, data: Any, **given: Any) -> bool:
    """What the header's ``union_pass`` of such a run would be."""
    config, task = own_training(model, data, data, **options(given))
    made = prepare_run(config, task)
    made.close()
    return made.gradients.union


@pytest.mark.parametrize("case", EXACT)
def test_what_is_exact_takes_one_pass_and_has_the_numbers_of_a_pass_for_each(
    case: str, tmp_path: Path
) -> None:
    make, kind, given = EXACT[case]
    data, test = points(kind), points(kind, 20)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make()

    def trained(folder: str, **fields: Any) -> regimes.Record:
        words = options(given)
        return regimes.simulate(
            model, data, test, out=tmp_path / folder, **{**words, "set": words["set"] | fields}
        )

    together, apart = trained("together"), trained("apart", union_pass=False)
    assert together.header["world"]["union_pass"]
    assert not apart.header["world"]["union_pass"]
    for one, other in zip(together.rows, apart.rows, strict=True):
        for name in ("train_loss", "test_loss", "metric", "floats"):
            assert one[name] == pytest.approx(other[name], rel=1e-12), name  # type: ignore[literal-required]


# -- what it is not exact for ------------------------------------------------------------------


def replaced_buffer(model: Made, x: Tensor) -> Tensor:
    model.seen = 0.9 * model.seen + 0.1 * x.detach().mean(0)
    return x


def counts(model: Any, x: Tensor) -> Tensor:
    """A warm-up that has no effect in its first thousand passes."""
    model.passes += 1
    return x if model.passes < 1000 else 2 * x


def keeps_history(model: Any, x: Tensor) -> Tensor:
    model.history.append(len(x))
    return x


def keeps_numbers(model: Any, x: Tensor) -> Tensor:
    model.numbers += 1
    return x


def draws_from_its_own(model: Any, x: Tensor) -> Tensor:
    return x * torch.rand(12, generator=model.generator)


def drops_layers(_: Any, x: Tensor) -> Tensor:
    return x if random.random() < 0.9 else x.detach()


def adds_noise(_: Any, x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.random.randn(12)).to(x)  # noqa: NPY002


def clipped_backwards(_: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return x


def gated(model: Any, x: Tensor) -> Tensor:
    """The gate is 0 at first, and so is the effect of other samples."""
    return x + model.gate * x.mean(0)


def of_the_largest(_: Any, x: Tensor) -> Tensor:
    """Experts choose samples: each takes half of the batch."""
    chosen = x.mean(1).topk(max(1, len(x) // 2)).indices
    return x.index_add(0, chosen, x[chosen])


def limited(_: Any, x: Tensor) -> Tensor:
    """An expert with room for a hundred samples."""
    where = torch.nonzero(x[:, 0] > 0)[:100, 0]
    return x.index_add(0, where, x[where])


def in_a_branch(_: Any, x: Tensor) -> Tensor:
    return x if x.abs().max() < 1e6 else x / x.abs().max()


MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "batch statistics": lambda _, x: F.batch_norm(x, None, None, training=True),
    "centred": lambda _, x: x - x.mean(0),
    "attention over samples": lambda _, x: x + (x @ x.T).softmax(1) @ x,
    "a spread over the batch": lambda _, x: x + x.std(0, unbiased=False),
    "a gate of 0": gated,
    "experts that choose": of_the_largest,
    "an expert's room": limited,
    "a branch on values": in_a_branch,
    "a replaced buffer": replaced_buffer,
    "a clipped backward pass": clipped_backwards,
    "dropout": lambda _, x: F.dropout(x, 0.1),
    "Python's random numbers": drops_layers,
    "numpy's random numbers": adds_noise,
}
READING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda n: n.item(),
    "int": int,
    "numpy": lambda n: n.numpy()[()],
    "list": lambda n: n.tolist(),
    "slice": lambda n: n,
}


def hooked() -> nn.Module:
    model = network()
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return model


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    """What is above 5 has not been measured."""
    kept = (target < 5).to(output)
    return ((output - target).square() * kept).sum() / kept.sum()


class Warming:
    """A loss whose penalty grows with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) + 1e-30 * self.calls * output.square().mean()


def warming() -> Callable[[Tensor, Tensor], Tensor]:
    """The same in a variable of an outer function."""
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(output, target) + 1e-30 * calls * output.square().mean()

    return loss


def hardest(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output, target, reduction="none")
    return each.topk(max(1, len(each) // 2)).values.mean()


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    near = F.normalize(output, dim=1)
    return F.cross_entropy(near @ near.T, torch.arange(len(near)))


class Pairs(Dataset[Any]):
    """Samples one by one: whether a target is ignored is not known before all are seen."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = points()
        return x[i], y[i]


@dataclass(frozen=True)
class ReadsNoise:
    """A policy by a statistic of the workers' gradients."""

    needs = ("noise_scale",)
    names = ("low",)

    def decide(self, history: Any, layers: Any) -> list[regimes.Decision]:
        return [regimes.Decision("low") for _ in layers]


@dataclass(frozen=True)
class Watching:
    """An instrument that does not say whether it reads each worker's gradient."""

    every: int = 1

    def start(self, context: Any) -> Any:
        return SimpleNamespace(step=lambda *_: None)


APART: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    **{name: (functools.partial(Made, f), "classes", {}) for name, f in MIXING.items()},
    **{
        f"the longest text by {name}": (functools.partial(Cropped, read), "padded", {})
        for name, read in READING.items()
    },
    "a counter": (lambda: Made(counts, passes=0), "classes", {}),
    "a history": (lambda: Made(keeps_history, history=deque(maxlen=5)), "classes", {}),
    "numbers that are kept": (lambda: Made(keeps_numbers, numbers=np.zeros(2)), "classes", {}),
    "a generator": (
        lambda: Made(draws_from_its_own, generator=torch.Generator()),
        "classes",
        {},
    ),
    "texts as each other's context": (
        lambda: Words(mixes=True),
        "tokens",
        {"loss": by_tokens},
    ),
    "spectral norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 3))),
        "classes",
        {},
    ),
    "statistics of instances that are kept": (
        lambda: nn.Sequential(nn.InstanceNorm2d(6, track_running_stats=True), convolution()),
        "images",
        {},
    ),
    "hooks of parameters": (hooked, "classes", {}),
    "a target that is ignored": (network, "one ignored", {}),
    "a class that is ignored": (network, "classes", {"loss": nn.CrossEntropyLoss(ignore_index=1)}),
    "weights of classes": (
        network,
        "classes",
        {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double())},
    ),
    "a sum": (network, "classes", {"loss": nn.CrossEntropyLoss(reduction="sum")}),
    "a mask of one's own": (network, "one lost", {"loss": ignoring}),
    "weights of one's own": (
        network,
        "one lost",
        {"loss": ignoring, "loss_weight": lambda target: (target < 5).sum()},
    ),
    "the hardest samples": (network, "classes", {"loss": hardest}),
    "pairs of samples": (network, "classes", {"loss": contrastive}),
    "a loss that counts": (network, "classes", {"loss": Warming(), "loss_weight": "samples"}),
    "a loss with a variable": (network, "classes", {"loss": warming(), "loss_weight": "samples"}),
    "samples one by one": (network, Pairs(), {}),
    "a loss of one's own of samples one by one": (
        network,
        Pairs(),
        {"loss": lambda a, b: F.cross_entropy(a, b)},
    ),
    "one worker": (network, "classes", {"workers": 1}),
    "TopK": (network, "classes", {"compressor": "topk"}),
    "half precision": (network, "classes", {"set": {"dtype": "bfloat16"}}),
    "clipping": (network, "classes", {"optimizer": {"lr": 0.1, "clip": 1.0}}),
    "local steps": (network, "classes", {"set": {"sync_policy": {"name": "static", "level": "2"}}}),
    "the noise between workers": (network, "classes", {"set": {"instruments.noise": {}}}),
    "a policy that reads it": (
        network,
        "classes",
        {"policy": ReadsNoise()},
    ),
    "a worker's norm": (network, "classes", {"set": {"signal": "worker0"}}),
    "each worker's norm": (network, "classes", {"set": {"signal": "local-mean"}}),
    "an instrument that says nothing": (
        network,
        "classes",
        {"set": {f"instruments.{__name__}:Watching": {}}},
    ),
    "larger than a cache": (
        lambda: nn.Sequential(nn.Linear(6, 40_000), nn.ReLU(), nn.Linear(40_000, 3)),
        "classes",
        {},
    ),
}


@pytest.mark.parametrize("case", APART)
def test_what_may_differ_takes_a_pass_for_each(case: str) -> None:
    make, kind, given = APART[case]
    data = points(kind) if isinstance(kind, str) else kind
    assert not decided(make, data, **given)


def test_a_run_that_an_earlier_version_began_goes_on_with_a_pass_for_each(tmp_path: Path) -> None:
    """Those wrote ``union_pass = false`` for whatever was passed to `simulate`."""

    def trained(**fields: Any) -> regimes.Record:
        words = options({"set": fields, "seed": 1})
        return regimes.simulate(seeded, points(), points(), out=tmp_path, **words)

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return network()

    begun = trained(union_pass=False)
    assert trained().rows == begun.rows


def test_a_gpu_takes_one_pass_where_it_has_room() -> None:
    with pretended.gpu():
        assert decided(convolution, points("images"), set={"device": "cuda"})
        full = SimpleNamespace(total_memory=1000)
        with patch.object(torch.cuda, "get_device_properties", lambda _: full):
            assert not decided(convolution, points("images"), set={"device": "cuda"})
