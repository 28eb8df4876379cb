"""A model and data that a program passes to ``regimes.simulate``, as a task."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import UninitializedParameter

from regimes.collectives.world import World
from regimes.config import RunConfig
from regimes.data import task
from regimes.data.samples import IGNORED, Samples
from regimes.data.task import Shuffled
from regimes.errors import ConfigError, DataError, require
from regimes.models.loss import Batch
from regimes.models.loss import Loss as TaskLoss
from regimes.precision import full_precision
from regimes.seeding import derive, seed_generators

EVALUATED = 256  # samples of an evaluation batch
Loss = Callable[[Any, Tensor], Tensor]  # of the model's output and the targets: a scalar
Metric = Callable[[Any, Tensor], Tensor | float]  # likewise, one number


def logits(output: Any) -> Tensor:
    """A model's output, or the ``logits`` of an output object."""
    values = getattr(output, "logits", output)
    return full_precision(values) if isinstance(values, Tensor) else values


def usual_loss(output: Any, target: Tensor) -> Float[Tensor, ""]:
    """Mean cross-entropy of classes ``[b]`` or tokens ``[b, time]``, or the mean squared error of
    real targets."""
    values = logits(output)
    if target.is_floating_point():
        if target.numel() != values.numel():
            raise ValueError(
                f"real targets {list(target.shape)} and outputs {list(values.shape)} have other "
                "sizes (classes are integers)"
            )
        return F.mse_loss(values, target.view_as(values))
    return F.cross_entropy(values.flatten(0, -2), target.flatten())


def accuracy(output: Any, target: Tensor) -> Float[Tensor, ""]:
    """The share of samples whose class has the largest output."""
    return (logits(output).argmax(-1) == target).double().mean()


def is_cross_entropy(loss: Loss | None) -> bool:
    """Is it the cross-entropy of classes, as torch computes it?"""
    return loss is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)


def name_of(function: Callable[..., Any] | None) -> str | None:
    """The name by which a record knows a loss or a metric: of a function, or of a module with its
    settings."""
    if function is None:
        return None
    if isinstance(function, nn.Module):
        return repr(function)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _tried(what: str, function: Callable[..., Any], *given: Any) -> Any:
    """What a function of the user's returns; ConfigError if it raises."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return function(*given)
    except Exception as error:  # the user's code may raise anything
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{what}: {why}") from None


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
        self.given = {"loss": name_of(loss), "metric": name_of(metric)}
        self.criterion = loss or usual_loss
        self.loss: TaskLoss = self._loss
        (_, target), _ = (s.take(torch.arange(1)) for s in (self.train, self.test))
        whole = not target.is_floating_point()  # classes or tokens
        self.classified = whole and (loss is None or is_cross_entropy(loss))
        usual = metric is None and self.classified and target.ndim == 1
        self.measured = accuracy if usual else metric
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
        return {
            "digest": self.digest,
            "train": self.size,
            "test": self.test.count,
            **{name: given for name, given in self.given.items() if given is not None},
        }

    def build(self, config: RunConfig) -> nn.Module:
        """A copy of the module, or what the function returns under the run's seed."""
        if isinstance(self.model, nn.Module):
            model = copy.deepcopy(self.model)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive(config.seed, "init"))
                model = self.model()
        require(isinstance(model, nn.Module), "model", type(model), "an nn.Module")
        for name, parameter in model.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise ConfigError(f"{name} has no shape yet: call the model once before")
            if parameter.is_meta:
                raise ConfigError(f"{name} is on the meta device: make the model on the CPU")
        probe = copy.deepcopy(model).to("cpu", getattr(torch, config.dtype)).eval()
        for samples in (self.train, self.test):
            self._check(probe, samples, getattr(torch, config.dtype))
        return model

    def _check(self, probe: nn.Module, samples: Samples, dtype: torch.dtype) -> None:
        """Raise ConfigError unless the model takes two samples, and their loss and metric are one
        number each."""
        x, y = samples.take(torch.arange(min(2, samples.count)))
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in (x, y))
        shapes = f"inputs {list(x.shape)} and targets {list(y.shape)} of {samples.name}"
        output = _tried(f"the model does not take {shapes}", probe, x)
        values = logits(output)
        if isinstance(values, Tensor) and values.ndim:
            self.outputs = values.shape[-1]
            other = values.numel() == y.numel() and values.shape != y.shape
            if (
                samples is self.train
                and other
                and self.given["loss"] is not None
                and y.is_floating_point()
            ):
                warnings.warn(
                    f"outputs {list(values.shape)} and targets {list(y.shape)} of {samples.name} "
                    "differ in shape: a loss of your own may broadcast them",
                    stacklevel=2,
                )
        # torch's own cross-entropy of images has the classes in the second dimension
        last = self.given["loss"] is None or (isinstance(values, Tensor) and values.ndim == 2)
        if self.classified and last and self.outputs > 1:
            samples.check_classes(self.outputs, getattr(self.criterion, "ignore_index", IGNORED))
        loss = _tried(
            f"the loss does not take the model's output, {shapes}", self.criterion, output, y
        )
        if not isinstance(loss, Tensor) or loss.ndim:
            kind = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            none = ": the model gets the inputs alone, without labels" if loss is None else ""
            raise ConfigError(f"the loss of a batch is {kind}: expected one number, a mean{none}")
        if self.measured is not None:
            value = _tried(f"the metric does not take {shapes}", self.measured, output, y)
            if not isinstance(value, int | float | np.number) and not (
                isinstance(value, Tensor) and value.numel() == 1
            ):
                kind = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ConfigError(f"the metric of a batch is {kind}: expected one number")

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
        """Mean loss and metric over the test samples. Batch means are weighted by their samples;
        a metric of the user's is of all samples at once where outputs are tensors."""
        model.eval()
        sums: dict[int, Tensor] = {}
        kept: list[Batch] = []
        own = self.measured is not None and self.measured is not accuracy
        if own:  # each process computes all
            world = task.ALONE
        parts = torch.arange(self.test.count).split(EVALUATED)
        for number, index in zip(
            task.own_batches(world), parts[world.rank :: world.processes], strict=False
        ):
            x, y = self.test.take(index)
            x, y = (t.to(device, dtype if t.is_floating_point() else t.dtype) for t in (x, y))
            output = model(x)
            loss = self.criterion(output, y).double()
            if own and isinstance(output, Tensor):
                kept.append((output, y))
                value: Any = 0.0
            else:
                value = loss if self.measured is None else self.measured(output, y)
            both = torch.stack([loss, torch.as_tensor(value, device=device).double().view(())])
            sums[number] = torch.cat([both * len(index), both.new_tensor([len(index)])])
        total_loss, total_metric, count = task.total(world, sums)
        if kept and self.measured is not None:
            outputs, targets = (torch.cat(parts) for parts in zip(*kept, strict=True))
            return total_loss / count, float(self.measured(outputs, targets))
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
