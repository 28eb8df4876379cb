"""A model and data that a program passes to ``regimes.simulate``, as a task."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from regimes.collectives.world import World
from regimes.config import RunConfig
from regimes.data import task
from regimes.data.task import Shuffled
from regimes.errors import ConfigError, DataError, require
from regimes.models.loss import Batch
from regimes.models.loss import Loss as TaskLoss
from regimes.precision import full_precision
from regimes.seeding import derive, seed_generators

EVALUATED = 256  # samples of an evaluation batch
DIGESTED = 256  # samples of a data set, of which the digest is made
Loss = Callable[[Any, Tensor], Tensor]  # of the model's output and the targets: a scalar
Metric = Callable[[Any, Tensor], Tensor | float]  # likewise, a mean over the batch


def logits(output: Any) -> Tensor:
    """A model's output, or the ``logits`` of an output object."""
    values = getattr(output, "logits", output)
    return full_precision(values) if isinstance(values, Tensor) else values


def usual_loss(output: Any, target: Tensor) -> Float[Tensor, ""]:
    """Mean cross-entropy of classes ``[b]`` or tokens ``[b, time]``, or the mean squared error of
    real targets."""
    values = logits(output)
    if target.is_floating_point():
        return F.mse_loss(values, target.view_as(values))
    return F.cross_entropy(values.flatten(0, -2), target.flatten())


def accuracy(output: Any, target: Tensor) -> Float[Tensor, ""]:
    """The share of samples whose class has the largest output."""
    return (logits(output).argmax(-1) == target).double().mean()


class Samples:
    """A map-style data set, or two tensors.

    Attributes:
        tensors: inputs and targets of all samples, where they are tensors; else None.
    """

    def __init__(self, data: Any, name: str) -> None:
        self.name, self.tensors = name, None
        if isinstance(data, TensorDataset) and len(data.tensors) == 2:
            data = data.tensors
        if isinstance(data, tuple | list) and data and all(isinstance(x, Tensor) for x in data):
            good = len(data) == 2 and len(data[0]) == len(data[1]) > 0
            shapes = [tuple(part.shape) for part in data]
            require(good, name, shapes, "inputs and targets, as many targets as inputs")
            self.tensors = data[0].detach().cpu(), data[1].detach().cpu()
        elif not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            kind = type(data).__name__
            raise DataError(
                f"{name} is a {kind}: expected a data set with a length and numbered samples, or "
                "a tuple of two tensors (a DataLoader has its data set in .dataset)"
            )
        self.data = data
        self.count = len(self.tensors[0]) if self.tensors else len(data)
        require(self.count > 0, name, self.count, "at least one sample")

    def take(self, index: Int64[Tensor, " n"]) -> Batch:
        """Inputs ``[n, ...]`` and targets ``[n, ...]`` of some samples."""
        if self.tensors is not None:
            return self.tensors[0][index], self.tensors[1][index]
        items = [self._item(i) for i in index.tolist()]
        try:
            return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])
        except RuntimeError as error:
            raise DataError(f"the samples of {self.name} differ in shape: {error}") from None

    def _item(self, number: int) -> Batch:
        """One sample: a pair, or a mapping with the tokens of a causal language model."""
        item = self.data[number]
        if isinstance(item, Mapping) and "input_ids" in item:
            tokens = torch.as_tensor(item["input_ids"])
            return tokens[:-1], torch.as_tensor(item.get("labels", tokens))[1:]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"a sample of {self.name} is a {type(item).__name__}: expected (input, target), or "
                'a mapping with "input_ids"'
            )
        x, y = (torch.as_tensor(part) for part in item)
        return x, y

    def digest(self) -> str:
        """SHA-256 of the number of samples, and of `DIGESTED` of them at equal distances."""
        digest = hashlib.sha256(str(self.count).encode())
        index = torch.arange(0, self.count, max(1, self.count // DIGESTED))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # for a data set that augments its samples
            for part in self.take(index):
                digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class ObjectBatches(Shuffled):
    """The training batches, in a new order each epoch."""

    unit = "samples"

    def __init__(
        self, samples: Samples, config: RunConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.samples, self.seed, self.workers = samples, config.seed, config.workers
        self.drop_last, self.reshuffle = config.data.drop_last, config.data.reshuffle
        self.device, self.dtype, self.count = device, dtype, samples.count
        self._set(config.batch_size)

    def epoch(
        self, epoch: int, workers: Sequence[int], start: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets ``[L, b, ...]``. Random numbers of a data set that augments its
        samples depend on the seed, the epoch, the step and the worker alone."""
        order = self.order(epoch)
        for step in range(start, self.steps):
            index = self._union(order, step)
            parts = [self._drawn(index[:, worker], epoch, step, worker) for worker in workers]
            x, y = (torch.stack(part) for part in zip(*parts, strict=True))
            yield self.moved(x), self.moved(y)

    def _drawn(self, index: Tensor, epoch: int, step: int, worker: int) -> Batch:
        if self.samples.tensors is not None:
            return self.samples.take(index)
        with torch.random.fork_rng(devices=[]):
            seed_generators(derive(self.seed, "samples", epoch, step, worker), torch.device("cpu"))
            return self.samples.take(index)

    def moved(self, numbers: Tensor) -> Tensor:
        """Numbers on the device, floating-point ones in the run's dtype."""
        dtype = self.dtype if numbers.is_floating_point() else numbers.dtype
        return numbers.to(self.device, dtype)


class ObjectTask:
    """A user's model, data, loss and metric.

    Attributes:
        outputs: the last dimension of the model's output.
    """

    splits = True

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        train: Any,
        test: Any,
        loss: Loss | None = None,
        metric: Metric | None = None,
    ) -> None:
        self.model = model
        self.train, self.test = Samples(train, "train_data"), Samples(test, "test_data")
        self.size, self.outputs = self.train.count, 1
        self.criterion = loss or usual_loss
        self.loss: TaskLoss = self._loss
        _, target = self.test.take(torch.arange(1))
        classified = metric is None and loss is None and target.ndim == 1
        classified &= not target.is_floating_point()
        self.measured = accuracy if classified else metric
        plain = getattr(self.measured, "__name__", "metric")
        self.metric = "loss" if self.measured is None else plain.strip("<>")
        self.digest = hashlib.sha256(
            (self.train.digest() + self.test.digest()).encode()
        ).hexdigest()

    @property
    def classes(self) -> int:
        return self.outputs

    def _loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.criterion(model(x), y)

    def header(self) -> dict[str, Any]:
        return {"digest": self.digest, "train": self.size, "test": self.test.count}

    def build(self, config: RunConfig) -> nn.Module:
        """A copy of the module, or what the function returns under the run's seed."""
        if isinstance(self.model, nn.Module):
            model = copy.deepcopy(self.model)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive(config.seed, "init"))
                model = self.model()
        require(isinstance(model, nn.Module), "model", type(model), "an nn.Module")
        self._check(model, getattr(torch, config.dtype))
        return model

    def _check(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Raise ConfigError unless the model takes a sample and its loss is a scalar; the model
        does not change."""
        probe = copy.deepcopy(model).to("cpu", dtype).eval()
        x, y = self.test.take(torch.arange(min(2, self.test.count)))
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in (x, y))
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                output = probe(x)
                loss = self.criterion(output, y)
        except Exception as error:  # the user's code may raise anything
            why = str(error).partition("\n")[0] or type(error).__name__
            shapes = f"inputs {list(x.shape)} and targets {list(y.shape)}"
            raise ConfigError(f"model and loss do not take {shapes}: {why}") from None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"the loss of a batch is {kind}: expected one number, a mean")
        values = logits(output)
        if isinstance(values, Tensor) and values.ndim:
            self.outputs = values.shape[-1]

    def batches(self, config: RunConfig, device: torch.device, dtype: torch.dtype) -> ObjectBatches:
        return ObjectBatches(self.train, config, device, dtype)

    def extra_metrics(self, loss: float) -> dict[str, float]:
        return {}

    @torch.no_grad()
    def evaluate(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        world: World = task.ALONE,
    ) -> tuple[float, float]:
        """Mean loss and metric over the test samples, batch means weighted by their samples."""
        model.eval()
        sums = {}
        parts = torch.arange(self.test.count).split(EVALUATED)
        for number, index in zip(
            task.own_batches(world), parts[world.rank :: world.processes], strict=False
        ):
            x, y = self.test.take(index)
            x, y = (t.to(device, dtype if t.is_floating_point() else t.dtype) for t in (x, y))
            output = model(x)
            loss = self.criterion(output, y).double()
            value = loss if self.measured is None else self.measured(output, y)
            both = torch.stack([loss, torch.as_tensor(value, device=device).double()])
            sums[number] = torch.cat([both.view(2) * len(index), both.new_tensor([len(index)])])
        total_loss, total_metric, count = task.total(world, sums)
        return total_loss / count, total_metric / count

    def validate(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        world: World = task.ALONE,
    ) -> tuple[float, float]:
        raise DataError("no samples are held out for validation: pass them as test_data")

    def probe(self, batches: ObjectBatches, world: World, size: int, batch: int) -> list[Batch]:
        """The first samples."""
        own = task.probe_share(world, size, batch, self.size, "the training set")
        x, y = self.train.take(torch.arange(own.start, own.stop))
        return task.pairs(batches.moved(x), batches.moved(y), batch)

    def samples(
        self, batches: ObjectBatches, seed: int, epoch: int, count: int, batch: int
    ) -> list[Batch]:
        return task.training_batches(batches, seed, epoch, count, batch)
