"""A model and data that a program passes to ``regimes.simulate``, as a task."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import UninitializedParameter

from regimes.base import reduction
from regimes.base.config import RunConfig
from regimes.base.errors import ConfigError, DataError, require
from regimes.base.precision import full_precision, is_half
from regimes.base.reduction import (
    IGNORED,
    Batch,
    Coupled,
    OwnMean,
    Reduction,
    SampleMean,
    Sum,
    TargetMean,
)
from regimes.base.reduction import Loss as TaskLoss
from regimes.base.seeding import derive_seed
from regimes.collectives.world import Evaluators, World
from regimes.data import task
from regimes.data.models import check_real
from regimes.data.models.copies import attribute_tensors, copy_model, find_computed
from regimes.data.samples import Samples
from regimes.data.task import Shuffled

EVALUATED = 256  # samples of an evaluation batch
Loss = Callable[[Any, Tensor], Tensor]  # of the model's output and the targets: a scalar
Metric = Callable[[Any, Tensor], Tensor | float]  # likewise, one number
LossWeight = str | Callable[[Tensor], Any]  # "samples", "sum", or a batch's weight from its targets
TRIED = 16  # samples on which it is tried how a loss joins terms; half where each has many targets
TARGETS = 1 << 20  # numbers in outputs at once, where a loss is tried on all targets
MOST_TARGETS = 1 << 28  # in all; a loss with more is not tried on them
REMEDY = "say in loss_weight what a batch's loss is divided by, if it is a mean"


def _read_logits(output: Any) -> Tensor:
    """A model's output, or the ``logits`` of an output object."""
    values = getattr(output, "logits", output)
    return full_precision(values) if isinstance(values, Tensor) else values


def usual_loss(output: Any, target: Tensor) -> Float[Tensor, ""]:
    """Compute the mean cross-entropy of classes ``[b]`` or tokens ``[b, time]``, with the classes
    on the last axis of the output, or the mean squared error of real targets.

    Raises:
        ValueError: output and targets have axes in another order, so that it would pair crosswise.
    """
    values = _read_logits(output)
    if not isinstance(values, Tensor):
        raise ValueError(
            f"the output is a {type(values).__name__}: pass loss= that takes it apart, such as "
            "loss=lambda output, target: torch.nn.functional.cross_entropy(output[0], target)"
        )
    outputs, targets = list(values.shape), list(target.shape)
    if target.is_floating_point():
        if _without_ones(target.shape) != _without_ones(values.shape):
            raise ValueError(
                f"real targets {targets} and outputs {outputs} have other shapes (classes are "
                "integers); pass loss= to compare them in another way"
            )
        return F.mse_loss(values, target.view_as(values))
    on_last = _without_ones(values.shape[:-1]) == _without_ones(target.shape)
    on_second = values.ndim > 2 and [*values.shape[:1], *values.shape[2:]] == targets
    if on_second:
        other = (
            ", or loss=lambda output, target: torch.nn.functional.cross_entropy("
            "output.flatten(0, -2), target.flatten()) if they are on the last axis"
        )
        raise ValueError(
            f"outputs {outputs} have their classes on axis 1 for targets {targets}"
            f"{', or on the last axis' * on_last}: pass loss=torch.nn.functional.cross_entropy "
            f"if they are on axis 1{other * on_last}"
        )
    if not on_last:
        raise ValueError(
            f"outputs {outputs} have no class for each of the targets {targets}: expected targets "
            f"{outputs[:-1]}, with the classes on the last axis of the output"
        )
    return F.cross_entropy(values.flatten(0, -2), target.flatten())


def _without_ones(shape: Sequence[int]) -> list[int]:
    """The first axis, of samples, and the others that are not of length 1."""
    return [*shape[:1], *(length for length in shape[1:] if length != 1)]


def accuracy(output: Any, target: Tensor) -> Float[Tensor, ""]:
    """Compute the share of samples with the largest output at their class."""
    return (_read_logits(output).argmax(-1) == target).double().mean()


def _recorded_name(function: Callable[..., Any] | None) -> str | None:
    """The name by which a record knows a loss or a metric: of a function, or of a module with its
    settings."""
    if function is None:
        return None
    if isinstance(function, nn.Module):
        return repr(function)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _digest_model(model: nn.Module) -> dict[str, str]:
    """By what a record knows a model: SHA-256 of its ``repr`` (without addresses in memory), and of
    its parameters and buffers."""
    text = re.sub(r"0x[0-9a-fA-F]+", "0x", repr(model))
    weights = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.layout == torch.strided and not tensor.is_meta:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            weights.update(flat.view(torch.uint8).numpy().data)
    return {"model": hashlib.sha256(text.encode()).hexdigest(), "weights": weights.hexdigest()}


def _call_function(what: str, function: Callable[..., Any], *given: Any) -> Any:
    """What a function of the user's returns; ConfigError if it raises."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return function(*given)
    except Exception as error:  # the user's code may raise anything
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{what}: {why}") from None


class ObjectBatches(Shuffled):
    """Gives the training batches, in a new order each epoch."""

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
        """Yield inputs and targets ``[L, b, ...]``. Random numbers of a data set that augments its
        samples, by torch, numpy or Python's ``random``, depend on the seed, the epoch, the step and
        the worker alone."""
        order = self.order(epoch)
        for step in range(start, self.steps):
            index = self._union(order, step)
            parts = self.samples.take_each(
                [
                    (index[:, worker], derive_seed(self.seed, "samples", epoch, step, worker))
                    for worker in workers
                ]
            )
            x, y = (torch.stack(part) for part in zip(*parts, strict=True))
            yield self.moved(x), self.moved(y)

    def moved(self, numbers: Tensor) -> Tensor:
        """Move numbers to the device, floating-point ones in the run's dtype."""
        dtype = self.dtype if numbers.is_floating_point() else numbers.dtype
        return numbers.to(self.device, dtype)


class _Repeated(nn.Module):
    """In place of a model: the outputs of a few samples, for the numbers of any samples."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, numbers: Tensor) -> Tensor:
        return self.outputs[numbers.long() % len(self.outputs)]


class ObjectLoss:
    """Makes a loss of the model and a batch from one of the model's output and the targets.

    Attributes:
        reduction: how it joins the terms of a batch.
    """

    def __init__(self, criterion: Loss) -> None:
        self.criterion = criterion
        self.reduction: Reduction = SampleMean()

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.criterion(model(x), y)


def own_task(
    model: Any, train: Any, test: Any, loss: Any, metric: Any, loss_weight: Any
) -> ObjectTask:
    """Make the task of what a user has passed.

    Raises:
        ConfigError: a loss, metric or weight that is none.
        DataError: data that are none.
    """
    for what, given in (("loss", loss), ("metric", metric)):
        expected = "a function of the model's output and the targets"
        require(given is None or callable(given), what, given, expected)
    known = loss_weight in (None, "samples", "sum") or callable(loss_weight)
    expected = '"samples", "sum" or a function of the targets'
    require(known, "loss_weight", loss_weight, expected)
    return ObjectTask(model, train, test, loss, metric, loss_weight)


class ObjectTask:
    """Trains a user's model on a user's data, with a user's loss and metric.

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
        loss_weight: LossWeight | None = None,
    ) -> None:
        self.model = model
        self.train, self.test = Samples(train, "train_data"), Samples(test, "test_data")
        self.size, self.outputs = self.train.count, 1
        self.recorded_names = {"loss": _recorded_name(loss), "metric": _recorded_name(metric)}
        self.functions = [f for f in (model, loss, metric) if f and not isinstance(f, nn.Module)]
        self.functions += [type(f) for f in (loss, metric) if isinstance(f, nn.Module)]
        self.first: dict[str, str] = {}  # digests of the model's text and of its first weights
        self.criterion, self.loss_weight = loss or usual_loss, loss_weight
        self._own_loss, self._reduction_is_stated = ObjectLoss(self.criterion), False
        self.loss: TaskLoss = self._own_loss
        (_, target), _ = (s.take(torch.arange(1)) for s in (self.train, self.test))
        whole = not target.is_floating_point()  # classes or tokens
        cross_entropy = loss is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)
        self.classified = whole and (loss is None or cross_entropy)
        usual = metric is None and self.classified and target.ndim == 1
        self.metric_function = accuracy if usual else metric
        plain = getattr(self.metric_function, "__name__", "metric")
        self.metric = "loss" if self.metric_function is None else plain.strip("<>")
        self.digest = hashlib.sha256(
            (self.train.digest() + self.test.digest()).encode()
        ).hexdigest()

    @property
    def classes(self) -> int:
        return self.outputs

    def header(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "train": self.size,
            "test": self.test.count,
            **{name: given for name, given in self.recorded_names.items() if given is not None},
            **self.first,
        }

    def build(self, config: RunConfig) -> nn.Module:
        """Copy the module, or call the function under the run's seed."""
        if isinstance(self.model, nn.Module):
            model = copy_model(self.model)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive_seed(config.seed, "init"))
                model = self.model()
        require(isinstance(model, nn.Module), "model", type(model), "an nn.Module")
        for name, parameter in model.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise ConfigError(f"{name} has no shape yet: call the model once before")
            if parameter.is_meta:
                raise ConfigError(f"{name} is on the meta device: make the model on the CPU")
        check_real(model)
        self.first = _digest_model(model)
        dtype = getattr(torch, config.dtype)
        self._check_computed(model, dtype)
        probe = copy_model(model).to("cpu", dtype).eval()
        for samples in (self.train, self.test):
            self._check(probe, samples, dtype)
        self._own_loss.reduction = self._reduction(probe)
        self._check_evaluation(probe)
        return model

    def _reduction(self, probe: nn.Module) -> Reduction:
        """How the loss joins the terms of a batch: known of torch's, else as the user says or, if
        nothing is said, as trying it shows.

        Raises:
            ConfigError: it does not do what the user says.
        """
        _, y = self.train.take(torch.arange(1))
        whole = not y.is_floating_point()
        usual = TargetMean() if whole else SampleMean()
        by_torch = TargetMean(by_torch=True) if whole else usual
        known = by_torch if self.criterion is usual_loss else reduction.of_torch(self.criterion, y)
        weight = self.loss_weight
        self._reduction_is_stated = weight is not None or known is not None
        if weight is None and known is not None:
            if isinstance(known, TargetMean) and known.classes is None:
                ignores = any(samples.has(known.ignored) for samples in (self.train, self.test))
                return known if ignores else SampleMean()
            return known
        candidates: list[Reduction] = [usual, SampleMean(), Sum()]
        if weight is not None:
            own = {"samples": SampleMean(), "sum": Sum()}
            candidates = [OwnMean(weight) if callable(weight) else own[weight]]
        count = TRIED if y.ndim == 1 else TRIED // 2
        found = self._tried_on_parts(probe, self.train.varied(count), candidates)
        if weight is not None and isinstance(found, Coupled):
            said = weight if isinstance(weight, str) else _recorded_name(weight)
            raise ConfigError(f"loss_weight = {said!r} does not hold: {found.why}")
        return found

    def is_sample_mean(self, model: nn.Module) -> bool:
        """Answer whether the loss of any training samples is the mean of their losses. Torch and
        the user are believed; any other loss is tried on all targets, where these are tensors,
        because a few samples need not have the ones that it leaves out."""
        if self._reduction_is_stated or not isinstance(self._own_loss.reduction, SampleMean):
            return isinstance(self._own_loss.reduction, SampleMean)
        if self.train.tensors is None:
            return False
        usual, y = [SampleMean()], self.train.tensors[1]
        y = y.double() if y.is_floating_point() else y
        x, _ = self.train.take(torch.arange(min(TRIED, self.size)))
        probe = copy_model(model).to("cpu", torch.float64).eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                outputs = _Repeated(probe(x.double() if x.is_floating_point() else x))
            numbers = self.size * outputs.outputs[0].numel()
            parts = torch.arange(self.size).split(max(1, self.size * TARGETS // numbers))
            return numbers <= MOST_TARGETS and all(
                isinstance(
                    reduction.measure_reduction(self.loss, outputs, part.double(), y[part], usual),
                    SampleMean,
                )
                for part in parts
            )
        except Exception:  # the user's code may raise anything
            return False

    def _tried_on_parts(
        self, probe: nn.Module, samples: Batch, candidates: Sequence[Reduction]
    ) -> Reduction:
        dtype = next((p.dtype for p in probe.parameters()), torch.float32)
        if is_half(dtype):
            probe, dtype = copy_model(probe).float(), torch.float32
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in samples)
        try:
            return reduction.measure_reduction(self.loss, probe, x, y, candidates)
        except Exception as error:  # the user's code may raise anything
            why = str(error).partition("\n")[0] or type(error).__name__
            return Coupled(f"the loss does not take the parts of {len(y)} samples: {why}")

    def _check_evaluation(self, probe: nn.Module) -> None:
        """Raise ConfigError or DataError unless the test loss can be computed, and both sets have a
        target that counts."""
        joins = self._own_loss.reduction
        if isinstance(joins, Coupled):
            if self.test.count > EVALUATED:
                x, _ = self.test.take(torch.arange(1))
                dtype = next((p.dtype for p in probe.parameters()), torch.float32)
                output = _call_function(
                    "the model", probe, x.to(dtype) if x.is_floating_point() else x
                )
                if not isinstance(output, Tensor):
                    raise ConfigError(
                        f"test_data has {self.test.count} samples: expected at most {EVALUATED}, "
                        "one evaluation batch, where the model's output is not a tensor and "
                        f"{joins.why}; {REMEDY}"
                    )
            return
        for samples in (self.train, self.test):
            parts = torch.arange(samples.count).split(EVALUATED)
            if not any(float(joins.weight(samples.take(part)[1])) for part in parts):
                raise DataError(f"{samples.name} has no target that counts: all are ignored")

    def _check_computed(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Raise ConfigError unless a pass computes anew what modules keep of earlier ones: a copy
        has no history of it, through which gradients would go."""
        source = self.model if isinstance(self.model, nn.Module) else model
        if not (names := [*find_computed(source)]):
            return
        trial = copy_model(model).to("cpu", dtype)
        kept = {name: attribute_tensors(trial, name) for name in names}
        x, _ = self.train.take(torch.arange(min(2, self.train.count)))
        x = x.to(dtype) if x.is_floating_point() else x
        for evaluated in (False, True):  # as the user has it, and as a test has it
            if evaluated:
                trial.eval()
            _call_function(f"the model does not take inputs {list(x.shape)}", trial, x)
        for name, before in kept.items():
            now = attribute_tensors(trial, name)
            if any(old is new for old in before for new in now):
                raise ConfigError(
                    f"model: the attribute {name!r} keeps a tensor that an earlier pass has "
                    "computed, and a pass does not compute it anew: compute it in forward(), or "
                    "set it to None before"
                )

    def _check(self, probe: nn.Module, samples: Samples, dtype: torch.dtype) -> None:
        """Raise ConfigError unless the model takes two samples, and their loss and metric are one
        number each."""
        x, y = samples.take(torch.arange(min(2, samples.count)))
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in (x, y))
        shapes = f"inputs {list(x.shape)} and targets {list(y.shape)} of {samples.name}"
        output = _call_function(f"the model does not take {shapes}", probe, x)
        values = _read_logits(output)
        if isinstance(values, Tensor) and values.ndim:
            self.outputs = values.shape[-1]
            other = values.numel() == y.numel() and values.shape != y.shape
            if (
                samples is self.train
                and other
                and self.recorded_names["loss"] is not None
                and y.is_floating_point()
            ):
                warnings.warn(
                    f"outputs {list(values.shape)} and targets {list(y.shape)} of {samples.name} "
                    "differ in shape: a loss of your own may broadcast them",
                    stacklevel=2,
                )
        # torch's own cross-entropy of images has the classes in the second dimension
        last = self.recorded_names["loss"] is None or (
            isinstance(values, Tensor) and values.ndim == 2
        )
        if self.classified and last and self.outputs > 1:
            samples.check_classes(self.outputs, getattr(self.criterion, "ignore_index", IGNORED))
        loss = _call_function(
            f"the loss does not take the model's output, {shapes}", self.criterion, output, y
        )
        if not isinstance(loss, Tensor) or loss.ndim:
            kind = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            none = ": the model gets the inputs alone, without labels" if loss is None else ""
            raise ConfigError(f"the loss of a batch is {kind}: expected one number, a mean{none}")
        if not loss.is_floating_point():
            raise ConfigError(
                f"the loss of a batch is of type {loss.dtype}: expected a real number"
            )
        if samples is self.train and any(p.requires_grad for p in probe.parameters()):
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                attached = self.criterion(probe(x), y).requires_grad
            if not attached:
                raise ConfigError(
                    "the loss of a batch has no gradient: it is detached from the model's output, "
                    "or does not depend on a parameter"
                )
        if self.metric_function is not None:
            value = _call_function(
                f"the metric does not take {shapes}", self.metric_function, output, y
            )
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
        evaluators: Evaluators = task.ALONE,
    ) -> tuple[float, float]:
        """Return the loss of all test samples as of one batch, and the metric. A metric of a user
        is of all samples at once where outputs are tensors, else a mean of batches by their
        samples; a loss that batches do not give is of all at once."""
        model.eval()
        sums: dict[int, Tensor] = {}
        kept: list[Batch] = []
        joins = self._own_loss.reduction
        own = self.metric_function is not None and self.metric_function is not accuracy
        coupled = isinstance(joins, Coupled)
        if coupled:
            joins = SampleMean()
        if own or coupled:  # each process computes all
            evaluators = task.ALONE
        parts = torch.arange(self.test.count).split(EVALUATED)
        for number, index in zip(
            task.own_batches(evaluators),
            parts[evaluators.rank :: evaluators.processes],
            strict=False,
        ):
            x, y = self.test.take(index, derive_seed("evaluation", number))
            x, y = (t.to(device, dtype if t.is_floating_point() else t.dtype) for t in (x, y))
            output = model(x)
            if (own or coupled) and isinstance(output, Tensor):
                kept.append((output, y))
            loss, weight = self.criterion(output, y).double(), joins.weight(y)
            value, count = self._metric_sum(output, y)
            # a batch without a target adds nothing: its mean is NaN
            loss = torch.where(weight == 0, 0.0, loss * weight)
            sums[number] = torch.stack([loss, weight, value, count])
        total_loss, total_weight, total_metric, samples = task.sum_over_processes(evaluators, sums)
        mean = total_loss / joins.joined(total_weight)
        metric = total_metric / samples if samples else math.nan
        if kept:
            outputs, targets = (torch.cat(parts) for parts in zip(*kept, strict=True))
            if coupled:
                mean = float(self.criterion(outputs, targets))
            if own and self.metric_function is not None:
                metric = float(self.metric_function(outputs, targets))
        return mean, mean if self.metric_function is None else metric

    def _metric_sum(self, output: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        """A batch's metric times its samples, and these; of the accuracy those with a target."""
        count = torch.full((), len(y), dtype=torch.float64, device=y.device)
        joins = self._own_loss.reduction
        if self.metric_function is accuracy and isinstance(joins, TargetMean):
            kept = y != joins.ignored
            correct = (_read_logits(output).argmax(-1) == y) & kept
            return correct.sum().double(), kept.sum().double()
        if self.metric_function is None or (
            self.metric_function is not accuracy and isinstance(output, Tensor)
        ):
            return torch.zeros_like(count), count
        value = torch.as_tensor(self.metric_function(output, y), device=y.device)
        return value.double().view(()) * count, count

    def validate(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        evaluators: Evaluators = task.ALONE,
    ) -> tuple[float, float]:
        raise DataError("no samples are held out for validation: pass them as test_data")

    def probe(self, batches: ObjectBatches, world: World, size: int, batch: int) -> list[Batch]:
        """Return samples at equal distances; what each batch draws at random depends on the seed
        alone."""
        own = task.probe_share(world, size, batch, self.size, "the training set")
        parts = (torch.arange(size) * self.size // size)[own].split(batch)
        first = own.start // batch
        seeds = (derive_seed(batches.seed, "probe", first + i) for i in range(len(parts)))
        taken = self.train.take_each([*zip(parts, seeds, strict=True)])
        return [(batches.moved(x), batches.moved(y)) for x, y in taken]

    def samples(
        self, batches: ObjectBatches, seed: int, epoch: int, count: int, batch: int
    ) -> list[Batch]:
        return task.training_batches(batches, seed, epoch, count, batch)
