"""A batch in parts (micro-batches, evaluation batches, batches of a probe) has the loss of one
batch, or is refused in a sentence (oracle: one batch)."""

from __future__ import annotations

import functools
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group as processes
from torch import Tensor, nn
from torch.nn import functional as F

import regimes
from regimes.base.errors import ConfigError
from regimes.data import objects
from regimes.instruments.hessian import HessianProduct, critical_sharpness, eigenvalues
from regimes.instruments.hessian.probe import batch_size, cross_entropy

NEAR = 1e-10
FIRST = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)  # the weight of class 0 alone
WEIGHTS = torch.tensor([1.0, 10.0, 0.1], dtype=torch.float64)
CHOICES: dict[str, Any] = {"workers": 2, "epochs": 1, "policy": {"name": "static", "level": "low"}}


def points(count: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator)
    return x, torch.randint(3, (count,), generator=generator)


def real(count: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, _ = points(count, seed)
    return x, x[:, :3].relu() * 2


def ignored(count: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rarely, and once for a whole evaluation batch of 4."""
    x, y = points(count, seed)
    y[3::7] = -100
    if seed:
        y[4:8] = -100
    return x, y


def mostly_one(count: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """All targets are of class 1 but every third, so that some micro-batches lack class 0."""
    x, y = points(count, seed)
    y[:] = 1
    y[::3] = 0
    return x, y


def rare(count: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two of three targets are ignored."""
    x, y = mostly_one(count, seed)
    return x, y.masked_fill(y == 1, -100)


def tokens(count: int = 32, seed: int = 0) -> list[dict[str, Tensor]]:
    """PaddedBatch: every second sample has 3 tokens, others up to 12."""
    generator, samples = torch.Generator().manual_seed(seed), []
    for i in range(count):
        length = int(torch.randint(3, 13, (1,), generator=generator)) if i % 2 else 3
        ids = torch.randint(7, (12,), generator=generator)
        mask = (torch.arange(12) < length).long()
        samples.append({"input_ids": ids * mask, "attention_mask": mask})
    return samples


def linear(zero: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    if zero:
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
    return model


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embed(ids).tanh()) * 1.0  # no view, of which FSDP2 warns


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel()


def own_mean(output: Tensor, y: Tensor) -> Tensor:
    return (torch.logsumexp(output, 1) - output.gather(1, y[:, None])[:, 0]).mean()


def own_weighted(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, weight=WEIGHTS)


def masked(output: Tensor, y: Tensor) -> Tensor:
    return ((output - y).square() * (y > 0)).sum() / (y > 0).sum()


def mean_of_kept(output: Tensor, y: Tensor) -> Tensor:
    """As torch's cross-entropy, but its gradient of no kept target is NaN."""
    kept = (y != -100).to(output)
    terms = torch.logsumexp(output, 1) - output.gather(1, y[:, None].clamp_min(0))[:, 0]
    return (terms * kept).sum() / kept.sum()


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(y)))


def own_tokens(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


MULTI = nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)
SMOOTH = nn.CrossEntropyLoss(WEIGHTS, ignore_index=-100, label_smoothing=0.2)
BOUND = functools.partial(F.cross_entropy, ignore_index=1, weight=WEIGHTS)
# name: samples, loss, what is said of it, model, whether its parts give a batch
Case = tuple[Callable[..., Any], Any, Any, Callable[[], nn.Module], bool]
LOSSES: dict[str, Case] = {
    "classes": (points, None, None, linear, True),
    "padded tokens": (tokens, None, None, language_model, True),
    "padded tokens, own": (tokens, own_tokens, None, language_model, True),
    "ignored labels": (ignored, nn.CrossEntropyLoss(), None, linear, True),
    "ignored class": (points, nn.CrossEntropyLoss(ignore_index=2), None, linear, True),
    "class weights": (points, nn.CrossEntropyLoss(WEIGHTS), None, linear, True),
    "classes without weight": (mostly_one, nn.CrossEntropyLoss(FIRST), None, linear, True),
    "rare labels": (rare, None, None, linear, True),
    "rare labels, own": (rare, mean_of_kept, None, linear, True),
    "smoothed, weights, ignored": (ignored, SMOOTH, None, linear, True),
    "bound arguments": (points, BOUND, None, linear, True),
    "a sum": (points, nn.CrossEntropyLoss(reduction="sum"), None, linear, True),
    "squares": (real, None, None, linear, True),
    "squares, a sum": (real, nn.MSELoss(reduction="sum"), None, linear, True),
    "absolute values": (real, F.smooth_l1_loss, None, linear, True),
    "several classes": (real, lambda o, y: MULTI(o, (y > 1).to(o)), None, linear, True),
    "own mean": (points, own_mean, None, linear, True),
    "own mean, said": (points, own_mean, "samples", linear, True),
    "own sum": (points, lambda o, y: own_mean(o, y) * len(y), None, linear, True),
    "own weights": (points, own_weighted, None, linear, False),
    "own weights, zeros": (points, own_weighted, None, functools.partial(linear, True), False),
    "own weights, said": (points, own_weighted, lambda y: WEIGHTS[y].sum(), linear, True),
    "a mask": (real, masked, None, linear, False),
    "a mask, said": (real, masked, lambda y: (y > 0).sum(), linear, True),
    "contrastive": (points, contrastive, None, linear, False),
}


def numbers(name: str, out: Path, **more: Any) -> list[list[float]]:
    """Train and test losses; the tests' evaluation batch is of 256."""
    samples, loss, said, model, _ = LOSSES[name]
    options = {**CHOICES, "batch_size": 8, "optimizer": {"lr": 0.05}, **more}
    options["set"] = {"dtype": "float64", **more.get("set", {})}
    record = regimes.simulate(
        model,
        samples(),
        samples(30, 1),
        out=out,
        loss=loss,
        loss_weight=said,
        **options,
    )
    rows = record.rows
    return [[float(row[key]) for row in rows] for key in ("train_loss", "test_loss")]  # type: ignore


def near(found: list[list[float]], expected: list[list[float]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=NEAR, abs=NEAR)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[list[float]]]:
    @functools.cache
    def of(name: str) -> list[list[float]]:
        return numbers(name, tmp_path_factory.mktemp("whole") / "run")

    return of


MICRO: dict[str, Any] = {
    "batch_size": 3,
    "set": {
        "batch_levels": {"low": 3, "high": 9},
        "batch_policy": {"name": "static", "level": "high"},
        "optimizer.scale_with_batch": False,
    },
}


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_and_evaluation_batches(
    name: str, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "EVALUATED", 4)
    near(numbers(name, tmp_path / "evaluated"), whole(name))  # a loss of another kind at once
    monkeypatch.undo()
    if not LOSSES[name][-1]:
        with pytest.raises(
            ConfigError, match=r"batch_levels.high = 9: .*no mean or sum .*loss_weight"
        ):
            numbers(name, tmp_path / "micro", **MICRO)
        assert not (tmp_path / "micro").exists()
        return
    one = {**MICRO, "batch_size": 9, "set": {}}
    near(numbers(name, tmp_path / "micro", **MICRO), numbers(name, tmp_path / "one", **one))


# -- probes ----------------------------------------------------------------------------------------


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict, as Hugging Face's BatchEncoding."""


@dataclass
class Samples:
    x: Tensor
    y: Tensor


KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pair": lambda x, y: (x, y),
    "named": lambda x, y: namedtuple("Named", "x y")(x, y),
    "encoding": lambda x, y: Encoding(x=x, y=y),
    "object": Samples,
    "paths first": lambda x, y: {"path": [f"{i}.png" for i in range(len(x))], "x": x, "y": y},
    "a number first": lambda x, y: {"temperature": torch.tensor(1.0), "x": x, "y": y},
    "positions first": lambda x, y: {"position": torch.arange(7), "x": x, "y": y},
    "a word first": lambda x, y: ("train", x, y),
}


def pair_of(batch: Any) -> tuple[Tensor, Tensor]:
    if hasattr(batch, "x"):
        return batch.x, batch.y
    return (batch["x"], batch["y"]) if hasattr(batch, "keys") else batch[-2:]


def probe_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = pair_of(batch)
    return F.cross_entropy(model(x), y)


def weighted_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = pair_of(batch)
    return F.cross_entropy(model(x), y, weight=WEIGHTS)


def next_token_loss(model: nn.Module, batch: Any) -> Tensor:
    """As a Hugging Face model with ``labels`` computes it."""
    logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def measures(
    loss: Any, model: nn.Module, batches: list[Any], weight: Any = None, mean: Any = None
) -> list[float]:
    """What a gradient, a product and the loss along a line say of a probe."""
    hessian = HessianProduct(model, loss, batches, mode="eval", weight=weight, mean=mean)
    vector = torch.linspace(-1, 1, hessian.dimension, dtype=torch.float64)
    products = [hessian.loss_value, *hessian.gradient.tolist(), *hessian(vector).tolist()]
    sharpness = critical_sharpness(model, loss, batches, mode="eval", weight=weight, mean=mean)
    return [*products, sharpness.rate]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_a_probe_of_any_kind(kind: str) -> None:
    """Of 9 samples and of 2, against one of 11."""
    x, y = points(11)
    model, make = linear().double(), KINDS[kind]
    one = measures(probe_loss, model, [(x.double(), y)])
    parts = [make(x[part].double(), y[part]) for part in (slice(0, 9), slice(9, 11))]
    assert measures(probe_loss, model, parts) == pytest.approx(one, rel=NEAR, abs=NEAR)
    with pytest.raises(ConfigError, match=r"no mean over samples .*weight\(batch\)"):
        measures(weighted_loss, model, parts)
    weight = lambda batch: WEIGHTS[pair_of(batch)[1]].sum()  # noqa: E731
    one = measures(weighted_loss, model, [(x.double(), y)])
    assert measures(weighted_loss, model, parts, weight) == pytest.approx(one, rel=NEAR, abs=NEAR)


@pytest.mark.parametrize("ragged", [True, False])
def test_a_probe_of_padded_tokens(ragged: bool) -> None:
    """Where each batch has one length, no batch shows whether samples or tokens count."""
    model, ids = language_model().double(), torch.randint(7, (8, 9))
    lengths = torch.tensor([3, 9, 4, 4, 7, 6, 5, 2] if ragged else [4] * 4 + [8] * 4)
    labels = ids.masked_fill(torch.arange(9) >= lengths[:, None], -100)
    one = measures(next_token_loss, model, [{"input_ids": ids, "labels": labels}])
    for cut in (9, 8):  # the second batch as long as the first, or shorter
        parts = [
            Encoding(input_ids=ids[:4], labels=labels[:4]),
            Encoding(input_ids=ids[4:, :cut], labels=labels[4:, :cut]),
        ]
        if cut == 8:
            same = {"input_ids": ids[4:, :8], "labels": labels[4:, :8]}
            if ragged:
                continue  # its longest sample has 7 tokens
            assert same["labels"].shape == (4, 8)
            with pytest.raises(ConfigError, match="no batch shows which it is"):
                measures(next_token_loss, model, parts)
            continue
        assert measures(next_token_loss, model, parts) == pytest.approx(one, rel=NEAR, abs=NEAR)


class ClassesSecond(LanguageModel):
    """As torch's cross-entropy of tokens wants its inputs."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).mT


def test_tokens_of_batches_of_unequal_length_count_alike() -> None:
    """Of 2 x 10 tokens and 2 x 2, against one batch that is padded."""
    torch.manual_seed(0)
    model, ids = ClassesSecond().double(), torch.randint(7, (4, 10))
    labels = ids.roll(1, 1)
    labels[2:, 2:] = -100
    one = measures(cross_entropy, model, [(ids, labels)])
    parts = [(ids[:2], labels[:2]), (ids[2:, :2], labels[2:, :2])]
    assert measures(cross_entropy, model, parts) == pytest.approx(one, rel=NEAR, abs=NEAR)


def test_a_batch_whose_samples_cannot_be_counted_is_refused() -> None:
    x, y = points(9)
    with pytest.raises(ConfigError, match="tensors of length 7 and 9: how many samples"):
        measures(probe_loss, linear().double(), [{"position": torch.arange(7), "x": x.double()}])
    assert batch_size(Encoding(x=x, y=y)) == 9


LENGTHS = torch.tensor([3, 9, 4, 4, 7, 6, 5, 2])


def padded(lengths: Tensor = LENGTHS) -> dict[str, Tensor]:
    ids = torch.arange(72).view(8, 9) ** 2 % 7
    labels = ids.masked_fill(torch.arange(9) >= lengths[:, None], -100)
    return {"input_ids": ids, "labels": labels}


def mean(flat: Tensor) -> Tensor:
    """Over two processes."""
    total = flat.clone()
    dist.all_reduce(total)
    return total / 2


def probe_share(rank: int) -> list[list[float] | str]:
    """Of half a probe: with a weight that is found, one that is said, and one that cannot be."""
    found: list[list[float] | str] = []
    model = language_model().double()
    alike = torch.tensor([4] * 4 + [8] * 4)  # within the batch of a process
    count = lambda batch: (batch["labels"][:, 1:] != -100).sum()  # noqa: E731
    for lengths, weight in ((LENGTHS, None), (LENGTHS, count), (alike, count), (alike, None)):
        batch = {name: part[4 * rank :][:4] for name, part in padded(lengths).items()}
        hessian = HessianProduct(
            model, next_token_loss, [batch], mode="eval", mean=mean, weight=weight
        )
        try:
            found.append([hessian.loss_value, *hessian.gradient.tolist()])
        except ConfigError as error:
            found.append(str(error))
    return found


def test_processes_with_unequal_tokens_measure_one_probe() -> None:
    model = language_model().double()
    expected = []
    for lengths in (LENGTHS, LENGTHS, torch.tensor([4] * 4 + [8] * 4)):
        hessian = HessianProduct(model, next_token_loss, [padded(lengths)], mode="eval")
        expected.append([hessian.loss_value, *hessian.gradient.tolist()])
    for *measured, refused in processes.run(probe_share, 2):
        for mine, theirs in zip(measured, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=NEAR, abs=NEAR)
        assert "no batch shows which it is: say by what a batch counts" in refused


def ignoring(rank: int) -> list[float]:
    """Process 1 has a batch without a target, the other one a batch more."""
    x, y = points(8)
    batches = [(x.double(), torch.full_like(y, -100)), (x.double(), y)]
    return measures(cross_entropy, linear().double(), batches[: 2 - rank], mean=mean)


def test_a_batch_without_targets_adds_nothing_to_a_probe() -> None:
    x, y = points(8)
    full, empty = (x.double(), y), (x.double(), torch.full_like(y, -100))
    model = linear().double()
    one = measures(cross_entropy, model, [full])
    for batches in ([full, empty], [empty, full], [empty, full, empty]):
        assert measures(cross_entropy, model, batches) == one
    kept = HessianProduct(model, cross_entropy, [empty, full], mode="eval", memory=0)
    assert eigenvalues(kept).largest.isfinite().all()
    for found in processes.run(ignoring, 2):
        assert found == pytest.approx(one, rel=NEAR, abs=NEAR)
