"""The configuration of a run: frozen dataclasses; the defaults describe a run that works."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from regimes.base.config.bounds import (
    Bounded,
    Count,
    Decay,
    Epochs,
    Factor,
    Momentum,
    Natural,
    NonNegative,
    Period,
    Positive,
    Rate,
    Share,
    Timeout,
)
from regimes.base.config.convert import fields_as_html, to_dict
from regimes.base.config.level import DENSE, AnyLevel
from regimes.base.errors import ConfigError, require

Signal = Literal["update", "global", "local-mean", "worker0", "movement", "movement/lr"]
RateSchedule = Literal["step", "constant", "cosine", "linear", "wsd", "cyclic"]
Role = Literal[
    "dense",
    "low",
    "mid",
    "high",
    "accordion",
    "adaqs",
    "adaqs-0.2",
    "signals",
    "low-in-critical",
    "high-in-critical",
    "dense-deleted",
    "low-early",
    "low-late",
    "low-first",
    "low-second",
    "low-last",
    "high-longer",
    "high-stretched",
    "small-batch",
    "large-batch",
    "small-in-critical",
    "large-in-critical",
    "accordion-batch",
    "smith",
    "large-batch-8x",
    "accordion-batch-8x",
]


@dataclass(frozen=True)
class DataConfig(Bounded):
    """Says which images or which text a run reads, how much of it, and in which order.

    Attributes:
        name: The data set: "digits", "cifar10", "cifar100", "folder" (images), "wikitext-2", "text"
            or "stdlib". ``data/README.md`` has all.
        path: The folder of images, or the text file or folder of texts. For the other data sets it
            is the folder that they are kept in.
        train_size: The number of training images, equally many of each class; of a text, the number
            of tokens. Unset: all that are neither test nor validation data.
        test_size: The number of test images or tokens. Unset: all.
        validation_size: The number of training images or tokens that are held out. They are used
            for neither training nor test. Unset: none.
        resize: The shorter side of each image of a "folder" is scaled to this many pixels, and the
            middle is cropped.
        test_share: The share of the images that are test images, if a "folder" has no train/ and
            test/. Unset: 0.2.
        split_seed: The seed that chooses these test images. Unset: 0.
        image_size: Images are average-pooled down to this many pixels. Unset: they stay as they
            are.
        augment: Crop at random with a padding of 4, and flip horizontally at random.
        drop_last: Leave out the last batch of an epoch if it is short.
        reshuffle: Use a new order in each epoch. False: one order for all epochs, like the authors'
            sampler.
        download: Allow the data set to be downloaded.
        sequence: The number of tokens in a window of a text.
        windows: How a text is read: in parallel streams, in windows that cover it once per epoch,
            or in windows at random positions. Unset: "streams" for WikiText-2, else "contiguous".
        tokenizer: The tokens of a text other than WikiText-2. Unset: "bytes".
        vocabulary: The number of words of WikiText-2 that are kept, or the number of tokens that
            "bpe" learns. Unset: all words, or 1,024 tokens.
    """

    bounds_prefix = "data."

    name: str = "digits"
    path: str | None = None
    train_size: Count | None = None
    test_size: Count | None = None
    validation_size: Count | None = None
    resize: int | None = None
    test_share: float | None = None
    split_seed: int | None = None
    image_size: int | None = None
    augment: bool = False
    drop_last: bool = False
    reshuffle: bool = True
    download: bool = False
    sequence: int = 35
    windows: Literal["streams", "contiguous", "sampled"] | None = None
    tokenizer: Literal["bytes", "bpe"] | None = None
    vocabulary: int | None = None


@dataclass(frozen=True)
class ModelConfig(Bounded):
    """Says which network a run trains (``models/``). A value that is unset is the network's own.

    Attributes:
        name: The network: a registered name such as "vgg7" or "gpt", or
            ``package.module:function``.
        width: The number of channels of the first layer, if the network lets you choose it.
        depth: The number of layers, if the network lets you choose it.
        dropout: The probability of dropout, if the network has dropout.
        heads: The number of attention heads. The width must be a multiple of it.
        tied: Use the embedding as the output matrix, too.
    """

    bounds_prefix = "model."

    name: str = "vgg7"
    width: int | None = None
    depth: int | None = None
    dropout: float | None = None
    heads: int | None = None
    tied: bool | None = None


@dataclass(frozen=True)
class OptimizerConfig(Bounded):
    """Says which optimiser turns updates into new weights (`training.optimizers`), and how its
    learning rate changes: a warm-up, then a schedule (`training.learning_rate`).

    Attributes:
        name: "sgd", "adamw", "muon", or a torch optimiser of yours, ``package.module:Class``.
        options: Further arguments of the optimiser's class, such as {betas = [0.9, 0.95]}.
        lr: The highest learning rate, which is reached after the warm-up.
        schedule: How the rate falls after the warm-up.
        per: How often the rate may change.
        warmup_from: The rate at the start. Unset: there is no warm-up, or with ``warmup_steps`` it
            starts from 0.
        warmup_epochs: The number of epochs in which the rate rises.
        warmup_hold: The number of epochs at ``warmup_from`` before the rate rises.
        warmup_steps: The number of steps in which the rate rises, in place of ``warmup_epochs``. It
            needs per = "step".
        decay_epochs: With the schedule "step": the epochs that are the first at a lower rate.
        decay_steps: The same in steps, in place of ``decay_epochs``. It needs per = "step".
        decay_factor: The number by which each decay divides the rate.
        decay_share: With the schedule "wsd": the last share of the run, in which the rate falls
            linearly.
        cycle_epochs: With the schedule "cyclic": the length of a cycle in epochs.
        cycle_steps: The same in steps, in place of ``cycle_epochs``. It needs per = "step".
        final: With the schedules "cosine", "linear", "wsd" and "cyclic": the share of ``lr`` that
            the rate falls to.
        momentum: The momentum of SGD and Muon.
        nesterov: Use Nesterov's momentum.
        weight_decay: The weight decay. AdamW and Muon decouple it from the gradient. Only SGD
            applies it to parameters of one dimension as well.
        scale_with_batch: Multiply the rate by the batch size divided by ``batch_size``, if a batch
            policy changes the batch size (Goyal et al., 2017).
        clip: The largest norm that a worker's gradient may have; a longer one is scaled down.
            Unset: gradients are not clipped.
    """

    bounds_prefix = "optimizer."

    name: str = "sgd"
    options: dict[str, Any] = field(default_factory=dict)
    lr: Rate = 0.4
    schedule: RateSchedule = "step"
    per: Literal["epoch", "step"] = "epoch"
    warmup_from: Decay | None = None
    warmup_epochs: Count = 5
    warmup_hold: Natural = 0
    warmup_steps: Natural | None = None
    decay_epochs: tuple[Count, ...] = ()
    decay_steps: tuple[Count, ...] = ()
    decay_factor: Factor = 10.0
    decay_share: Share = 0.2
    cycle_epochs: Count = 8
    cycle_steps: Count | None = None
    final: Share = 0.0
    momentum: Momentum = 0.9
    nesterov: bool = True
    weight_decay: Decay = 1e-4
    scale_with_batch: bool = True
    clip: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for steps in ("warmup_steps", "decay_steps", "cycle_steps"):
            if self.per == "epoch" and getattr(self, steps) not in (None, ()):
                raise ConfigError(
                    f"optimizer.{steps}: the rate changes once per epoch, so a number of steps has "
                    'no effect: set optimizer.per = "step"'
                )


@dataclass(frozen=True)
class OuterConfig(Bounded):
    """Says what a synchronisation after local steps does (`training.local_rounds`).

    The mean movement of the workers is the gradient of an outer SGD. With these defaults its step
    leads to the mean of the workers' parameters (local SGD). DiLoCo (Douillard et al., 2023) has
    lr = 0.7, momentum = 0.9 and nesterov = true. Streaming DiLoCo (Douillard et al., 2025)
    synchronises ``fragments`` parts of the network in turn, each once per period.

    Attributes:
        lr: The learning rate of the outer SGD.
        momentum: Its momentum.
        nesterov: Use Nesterov's momentum in the outer SGD.
        states: What a synchronisation does with the states of the workers' own optimisers.
        period_one: What a period of 1 averages: the gradients before the step, or the parameters
            after it.
        fragments: The number of groups of consecutive layers, of about equal size, that are
            synchronised one after the other.
        delay: The number of local steps between sending an update and applying it.
        mixing: The share of its own parameters that a worker keeps when an update is applied (alpha
            of Streaming DiLoCo).
    """

    bounds_prefix = "outer."

    lr: Rate = 1.0
    momentum: Momentum = 0.0
    nesterov: bool = False
    states: Literal["keep", "average", "reset"] = "keep"
    period_one: Literal["gradients", "parameters"] = "gradients"
    fragments: Count = 1
    delay: Natural = 0
    mixing: Momentum = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = not self.nesterov or self.momentum > 0
        require(fits, "outer.nesterov", self.nesterov, "false, or a momentum above 0")

    @property
    def plain(self) -> bool:
        """Answer whether a synchronisation is the mean of the workers' parameters."""
        return self.lr == 1 and self.momentum == 0 and not self.leaves_apart

    @property
    def leaves_apart(self) -> bool:
        """Answer whether workers differ right after a synchronisation."""
        return self.fragments > 1 or self.delay > 0 or self.mixing > 0

    @property
    def streams(self) -> bool:
        """Answer as ``leaves_apart`` does, which is the new name."""
        said = "OuterConfig.streams is leaves_apart now; streams goes with the next version"
        warnings.warn(said, FutureWarning, stacklevel=2)
        return self.leaves_apart


@dataclass(frozen=True)
class Budget(Bounded):
    """Ends a run after some traffic (paper, Figure 8).

    The run ends after the epoch in which it has sent as many floats as ``epochs`` epochs at
    ``level``.
    The run's own ``epochs`` remain an upper limit.

    Attributes:
        level: The level whose traffic is the budget.
        epochs: The number of epochs at this level.
    """

    bounds_prefix = "budget."

    level: str = "low"
    epochs: Count = 24


@dataclass(frozen=True)
class BranchConfig(Bounded):
    """Says which run this run continues, its trunk (`regimes.branch`).

    Attributes:
        of: The trunk's folder, relative to the folder of this run; in a grid's file, a schedule.
        at: The first unit that this run trains itself. It starts from the trunk's state before it.
        length: The number of units after which the trunk's configuration returns. Unset: never.
        skip: Leave these units out, as if the run had never had them.
    """

    bounds_prefix = "branch."

    of: str = ""
    at: Natural = 0
    length: Count | None = None
    skip: bool | None = None


@dataclass(frozen=True)
class RunConfig(Bounded):
    """Holds everything that decides the numbers of a run. The number of processes only divides the
    work.

    Attributes:
        name: The name of the schedule. Figures and tables group runs by it.
        role: The role of the schedule in figures that draw certain schedules, whatever its name is
            (``regimes figure NAME --needs GRID``). It changes nothing in the training.
        seed: The seed of all random streams.
        epochs: The number of epochs, unless a budget ends the run earlier.
        steps: The number of steps, in place of whole epochs. It counts steps at ``batch_size``.
        unit_steps: The number of steps in a unit: after each unit a run measures, decides and
            records. "Epoch" in records, policies and figures then means such a unit. Unset: a unit
            is an epoch.
        workers: The number of logical workers, W.
        batch_size: The number of samples that a worker reads in a step.
        data: The data; see the keys below.
        model: The network; see the keys below.
        optimizer: The optimiser and the learning rate; see the keys below.
        compressor: The compressor: a table with its name, or ``package.module:Class``, and its
            fields.
        levels: The level that each word of a policy stands for, such as {low = 4, high = 1} for
            ranks of PowerSGD. "dense" is always known and sends the gradient uncompressed. A level
            may have error feedback of its own: {level = 1, error_feedback = false}.
        policy: The policy that decides the level of each layer: a table with its name and fields.
        batch_levels: The batch size that each word of a batch policy stands for, such as
            {low = 16, high = 128}, in samples per worker and step. Each is a multiple of
            ``batch_size``, and gradients of so many batches are accumulated.
        batch_policy: The policy that decides the batch size of the whole model. Unset: it is
            ``batch_size`` throughout.
        sync_levels: The period that each word of a policy stands for, such as {low = 1, high = 32}:
            the number of steps that each worker takes alone between two synchronisations.
        sync_policy: The policy that decides the period of the whole model, from the next
            synchronisation on. A number is a period, too. Unset: the workers share each step.
        outer: What a synchronisation after local steps does; see the keys below.
        budget: The traffic after which the run ends; see the keys below.
        deficit: What impairs the training in chosen epochs, such as blurred images
            (``data/deficits.py``).
        branch: The run that this run continues; see the keys below and `regimes.branch`.
        label_smoothing: The share of each target of the training loss that is spread evenly over
            all classes, for images. Evaluation has none.
        start_compressing_after: The number of steps at the start that send the gradient
            uncompressed.
        signal: The norm that detectors read, per layer and unit. "update", "global", "local-mean"
            and "worker0" are norms of the gradient; "movement" and "movement/lr" are norms of the
            optimiser's step (``instruments/gradient_norm.py``).
        instruments: Further measurements, by name, with their fields: {fisher = {}}.
        tuned_on: The seeds that chose this configuration. A run with one of them is refused.
        drawn_per_seed: The fields that may differ between the seeds of one experiment, such as
            ["policy.layers"] of a control that follows another run.
        quirks: "authors" replaces fields so that the run follows the published code.
        union_pass: Compute the gradients of all workers of a process in one pass, if this is exact.
        dtype: The type of parameters and their gradients. Compressors, residuals and traffic have
            the same type, except that they are float32 if it is "bfloat16" or "float16".
        precision: How products are computed. "strict" is IEEE float32, or float64 with that dtype.
            On a GPU, "tf32" lets training steps round the factors of products to 10 bits.
            "bfloat16" runs forward and backward under autocast, and the rest strictly. Instruments
            are always strict; ``evaluate_precision`` says how the test set is evaluated.
        evaluate_every: The number of units between two evaluations on the test data and on the
            validation data. The last unit is always evaluated.
        evaluate_precision: The precision of evaluations: "strict", or "training", which is what
            ``precision`` says.
        deterministic: On a GPU, use only operations that give the same bits each time. False: torch
            may run its optimisers as one fused kernel, which is faster and gives other last bits.
        compile: Use ``torch.compile`` for forward and backward passes of training. Steps become
            faster after minutes of compiling, and the bits change.
        graphs: On a GPU, record each step as two CUDA graphs and replay them: one of forward and
            backward, one of the reduction. This number of graphs of the reduction is kept, one for
            each combination of levels, and the one that was used longest ago is dropped
            (``compression/graphs.py``). Unset: there are no graphs.
        channels_last: Use torch's memory layout of this name for activations. The layout of
            parameters does not change.
        device: The device: "auto", "cpu", "cuda" or "cuda:0".
        checkpoint_every: The number of units between two checkpoints.
        checkpoint_seconds: The least number of seconds between two checkpoints. Unset: none.
        checkpoint_keep: The checkpoints that are kept for later branches. "last" keeps the last
            two, and "all" keeps all. A list such as [6, 12] writes and keeps a checkpoint before
            each of these units, besides the last two. Unset: "last".
        timeout: The number of seconds that a process waits for the others.
        bucket_mb: The size of a bucket in megabytes: gradients that are exchanged at once while
            backward goes on.
        reporters: What else reports each unit: "tensorboard", "wandb", or
            ``package.module:Class`` (``records/reporting.py``).
    """

    name: str = "run"
    role: Role | None = None
    seed: int = 0
    epochs: Epochs = 24
    steps: Count | None = None
    unit_steps: Count | None = None
    workers: Count = 4
    batch_size: Count = 8
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    compressor: dict[str, Any] = field(default_factory=lambda: {"name": "powersgd"})
    levels: dict[str, AnyLevel] = field(default_factory=lambda: {"low": 4, "high": 1})
    policy: dict[str, Any] = field(default_factory=lambda: {"name": "static"})
    batch_levels: dict[str, int] = field(default_factory=dict)
    batch_policy: dict[str, Any] | None = None
    sync_levels: dict[str, Period] = field(default_factory=dict)
    sync_policy: dict[str, Any] | None = None
    outer: OuterConfig = field(default_factory=OuterConfig)
    budget: Budget | None = None
    deficit: dict[str, Any] | None = None
    branch: BranchConfig | None = None
    label_smoothing: Momentum = 0.0
    start_compressing_after: Natural = 0
    signal: Signal = "update"
    instruments: dict[str, dict[str, Any]] = field(default_factory=dict)
    tuned_on: tuple[int, ...] = ()
    drawn_per_seed: tuple[str, ...] = ()
    quirks: Literal["none", "authors"] = "none"
    union_pass: bool = True
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    precision: Literal["strict", "tf32", "bfloat16"] = "strict"
    evaluate_every: Count = 1
    evaluate_precision: Literal["strict", "training"] = "strict"
    deterministic: bool = True
    compile: bool = False
    graphs: Count | None = None
    channels_last: bool = False
    device: str = "auto"
    checkpoint_every: Count = 1
    checkpoint_seconds: NonNegative | None = None
    checkpoint_keep: Literal["last", "all"] | tuple[Natural, ...] | None = None
    timeout: Timeout = 600.0
    bucket_mb: Positive = 25.0
    reporters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ConfigError unless the fields fit together. What depends on plug-ins, data or
        device is checked by the run that makes them."""
        super().__post_init__()
        for name, size in self.batch_levels.items():
            if size < self.batch_size or size % self.batch_size:
                raise ConfigError(
                    f"batch_levels.{name} = {size}: expected a multiple of batch_size = "
                    f"{self.batch_size}, the micro-batch that is accumulated"
                )
        fits = self.precision == "strict" or self.dtype == "float32"
        require(fits, "precision", self.precision, f'"strict", as dtype = "{self.dtype}"')
        if DENSE in self.levels:
            raise ConfigError('levels.dense is always "dense": give the level another name')
        if budget := self.budget:
            known = [*self.levels, DENSE]
            good = budget.level in known
            require(good, "budget.level", budget.level, f"one of {', '.join(known)}")
            expected = (
                "1 with a budget: which unit is the last, and evaluated, is known only after it"
            )
            require(self.evaluate_every == 1, "evaluate_every", self.evaluate_every, expected)

    def _repr_html_(self) -> str:
        """In a notebook, the fields that differ from their defaults."""
        return fields_as_html(self, RunConfig())

    def digest(self) -> str:
        """Compute SHA-256 of the whole configuration."""
        return hashlib.sha256(json.dumps(to_dict(self), sort_keys=True).encode()).hexdigest()


def check_windows(where: str, windows: tuple[tuple[int, int], ...]) -> None:
    """Raise ConfigError unless each window is ``[first, stop)`` of epochs, and not empty."""
    for first, stop in windows:
        if not 0 <= first < stop:
            raise ConfigError(
                f"{where}: [{first}, {stop}] is no window; "
                "expected [first, stop) with 0 <= first < stop"
            )


def in_windows(windows: Iterable[Sequence[int]], epoch: int) -> bool:
    """Answer whether an epoch is in one of the windows ``[first, stop)``."""
    return any(first <= epoch < stop for first, stop in windows)
