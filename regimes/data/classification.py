"""Classification of images: the task of all presets but the language models'."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regimes.base.config import RunConfig
from regimes.base.errors import ConfigError
from regimes.base.precision import full_precision
from regimes.base.reduction import Batch, Loss, SampleMean, declare_reduction
from regimes.collectives.world import Evaluators, World
from regimes.data import images, task
from regimes.data.deficits import make_deficit
from regimes.data.images import ImageBatches, Split


@declare_reduction(SampleMean())
def classification_loss(model: nn.Module, x: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """Compute the mean cross-entropy of a batch, its targets mixed with a share of all classes
    alike."""
    return F.cross_entropy(full_precision(model(x)), y, label_smoothing=smoothing)


def _check_outputs(model: nn.Module, name: str, x: Tensor, classes: int) -> None:
    """Raise ConfigError unless a model gives one number per class; the model does not change."""
    training = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = model.eval()(x)
    except Exception as error:  # a user's code may raise anything
        why = str(error).partition("\n")[0] or type(error).__name__
        size = "x".join(map(str, x.shape[1:]))
        raise ConfigError(f"the model {name!r} does not take images of {size}: {why}") from None
    finally:
        model.train(training)
    if not isinstance(output, Tensor) or output.shape != (1, classes):
        shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(
            f"the model {name!r} gives {shape} for one image: expected [1, {classes}], a number "
            "for each class"
        )


FIRST = 1000  # images that a network may start from


class ImageTask:
    """Classifies images; the metric is the accuracy."""

    metric = "accuracy"
    splits = True

    def __init__(self, config: RunConfig, data: images.Images | None = None) -> None:
        """``data`` in place of the images that the configuration names."""
        self.images = data or images.load_images(config.data)
        self.digest, self.size = self.images.digest, len(self.images.train_y)
        self.channels_last = config.channels_last
        self.loss: Loss = classification_loss
        if config.label_smoothing:
            smoothed = partial(classification_loss, smoothing=config.label_smoothing)
            self.loss = declare_reduction(SampleMean())(smoothed)

    @property
    def classes(self) -> int:
        return len(self.images.classes)

    def header(self) -> dict[str, Any]:
        sizes = {"train": self.size, "test": len(self.images.test_y)}
        if self.images.validation is not None:
            sizes["validation"] = len(self.images.validation[1])
        return {"digest": self.digest, **sizes, "classes": list(self.images.classes)}

    def build(self, config: RunConfig) -> nn.Module:
        _, channels, size, _ = self.images.train_x.shape
        shape = {"classes": self.classes, "channels": channels, "image_size": size}
        model = task.build_network(config.model, config.seed, **shape)
        _check_outputs(model, config.model.name, self.images.train_x[:1].float(), self.classes)
        start_from: Callable[[Tensor], None] | None = getattr(model, "start_from", None)
        if start_from is not None:
            normalise = images.Normaliser(self.images, "cpu", torch.float32)
            start_from(normalise(self.images.train_x[:FIRST]))
        return model

    def batches(self, config: RunConfig, device: torch.device, dtype: torch.dtype) -> ImageBatches:
        return ImageBatches(
            self.images,
            config.data,
            seed=config.seed,
            workers=config.workers,
            batch_size=config.batch_size,
            device=device,
            dtype=dtype,
            channels_last=config.channels_last,
            deficit=make_deficit(config.deficit),
        )

    def extra_metrics(self, loss: float) -> dict[str, float]:
        return {}

    @torch.no_grad()
    def _evaluate(
        self,
        split: Split,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        evaluators: Evaluators = task.ALONE,
    ) -> tuple[float, float]:
        model.eval()
        self.images, sums = self.images.with_test_on(device), {}
        share = slice(evaluators.rank, None, evaluators.processes)
        batches = images.evaluation_batches(
            self.images, 500, device, dtype, split, share, self.channels_last
        )
        for number, (x, y) in zip(task.own_batches(evaluators), batches, strict=False):
            logits = full_precision(model(x))
            loss = F.cross_entropy(logits, y, reduction="sum").double()
            correct = (logits.argmax(1) == y).sum()
            sums[number] = torch.stack([loss, correct, torch.full_like(loss, len(y))])
        total_loss, total_correct, count = task.sum_over_processes(evaluators, sums)
        return total_loss / count, total_correct / count

    evaluate = partialmethod(_evaluate, "test")
    validate = partialmethod(_evaluate, "validation")

    def probe(self, batches: ImageBatches, world: World, size: int, batch: int) -> list[Batch]:
        """Return the first images, in batches."""
        own = task.probe_share(world, size, batch, self.size, "the training set")
        x, y = (t[own].to(batches.device) for t in (self.images.train_x, self.images.train_y))
        return task.split_batches(batches.normalise(x), y, batch)

    def samples(
        self, batches: ImageBatches, seed: int, epoch: int, count: int, batch: int
    ) -> list[Batch]:
        return task.training_batches(batches, seed, epoch, count, batch)
