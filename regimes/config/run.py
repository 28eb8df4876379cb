"""The configuration of a run: frozen dataclasses; the defaults describe a run that works."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from regimes.config.bounds import (
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
from regimes.config.convert import fields_as_html, to_dict
from regimes.config.level import AnyLevel
from regimes.errors import ConfigError

Signal = Literal["update", "global", "local-mean", "worker0", "movement", "movement/lr"]
Schedules = Literal["step", "constant", "cosine", "linear", "wsd", "cyclic"]
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
class DataConfig:
    """Which images or text, how much of it, and in what order (``regimes.data``)."""

    name: str = "digits"  # or "cifar10", "cifar100", "folder"; "wikitext-2", "text", "stdlib", ...
    path: str | None = None  # images of "folder", file or folder of "text"; root for the others
    train_size: Count | None = None  # images, as many per class; or tokens; None = all others
    test_size: Count | None = None
    validation_size: Count | None = None  # likewise, for neither training nor test; None = no split
    resize: int | None = None  # of "folder": the shorter side to so many pixels, the middle of it
    test_share: float | None = None  # of a folder without train/ and test/; None = 0.2
    split_seed: int | None = None  # which images these are; None = 0
    image_size: int | None = None  # pixels; average-pooled down to it; None = as they are
    augment: bool = False  # random crop with padding 4, random horizontal flip
    drop_last: bool = False  # leave out an epoch's last, short batch
    reshuffle: bool = True  # False: one order for all epochs (the authors' sampler)
    download: bool = False
    sequence: int = 35  # tokens of a window of a text
    windows: Literal["streams", "contiguous", "sampled"] | None = None  # how a text is read
    tokenizer: Literal["bytes", "bpe"] | None = None  # of a text but WikiText-2; None = "bytes"
    vocabulary: int | None = None  # of WikiText-2, in words, None = all; of "bpe", in byte pairs


@dataclass(frozen=True)
class ModelConfig:
    """Which network (see ``models/``)."""

    name: str = "vgg7"
    width: int | None = None  # channels of the first layer, where the family has a choice
    depth: int | None = None  # layers, likewise
    dropout: float | None = None  # likewise
    heads: int | None = None  # of attention, likewise; the width is a multiple of it
    tied: bool | None = None  # is the output matrix the embedding? likewise


@dataclass(frozen=True)
class OptimizerConfig:
    """What turns updates into new weights (`training.optimizers`), and its rate: a warm-up, then
    the schedule (`training.learning_rate`)."""

    name: str = "sgd"  # "sgd", "adamw", "muon" or ``package.module:Class``, a torch optimiser
    options: dict[str, Any] = field(default_factory=dict)  # of its class: {betas = [0.9, 0.95]}
    lr: Rate = 0.4  # the highest, after the warm-up
    schedule: Schedules = "step"  # "constant", "cosine", "linear", "wsd" or "cyclic" are others
    per: Literal["epoch", "step"] = "epoch"  # how often the rate may change
    warmup_from: Decay | None = None  # lr at the start; None = no warm-up, or from 0 in steps
    warmup_epochs: Count = 5
    warmup_hold: Natural = 0  # epochs at ``warmup_from`` before the rate rises
    warmup_steps: Natural | None = None  # in place of ``warmup_epochs``; needs per = "step"
    decay_epochs: tuple[Count, ...] = ()  # "step": first epoch that trains at the lower lr
    decay_steps: tuple[Count, ...] = ()  # in place of ``decay_epochs``; needs per = "step"
    decay_factor: Factor = 10.0
    decay_share: Share = 0.2  # "wsd": the last share of the run, in which the rate falls linearly
    cycle_epochs: Count = 8  # "cyclic": length of a cycle
    cycle_steps: Count | None = None  # in place of ``cycle_epochs``; needs per = "step"
    final: Share = 0.0  # "cosine", "linear", "wsd", "cyclic": the share of ``lr`` they fall to
    momentum: Momentum = 0.9  # of SGD and Muon
    nesterov: bool = True
    weight_decay: Decay = 1e-4  # decoupled with AdamW and Muon; of 1-D parameters with SGD only
    scale_with_batch: bool = True  # the rate times batch size / batch_size (Goyal et al., 2017)
    clip: Positive | None = None  # largest norm of each worker's gradient; None = as it is


@dataclass(frozen=True)
class OuterConfig:
    """The synchronisation after local steps (`training.rounds`).

    The workers' mean movement is the gradient of an outer SGD. With these defaults its step leads
    to the mean of the workers' parameters (local SGD). DiLoCo (Douillard et al., 2023) has
    lr = 0.7, momentum = 0.9, nesterov = true. With ``fragments`` parts of the network are
    synchronised in turn, each once per period (Streaming DiLoCo: Douillard et al., 2025); an update
    is applied ``delay`` local steps after it was sent, and a worker keeps a share ``mixing`` of its
    own parameters."""

    lr: Rate = 1.0
    momentum: Momentum = 0.0
    nesterov: bool = False
    states: Literal["keep", "average", "reset"] = "keep"  # of the workers' own optimisers
    period_one: Literal["gradients", "parameters"] = "gradients"  # what a period of 1 averages
    fragments: Count = 1  # groups of consecutive layers of about equal size
    delay: Natural = 0  # local steps
    mixing: Momentum = 0.0  # alpha of Streaming DiLoCo

    @property
    def plain(self) -> bool:
        """Is a synchronisation the mean of the workers' parameters?"""
        return self.lr == 1 and self.momentum == 0 and not self.streams

    @property
    def streams(self) -> bool:
        """Do workers differ right after a synchronisation?"""
        return self.fragments > 1 or self.delay > 0 or self.mixing > 0


@dataclass(frozen=True)
class Budget:
    """Floats after which a run ends, at the end of an epoch: as many as ``epochs`` epochs at
    ``level`` send (paper, Figure 8). The run's own ``epochs`` are an upper limit."""

    level: str = "low"
    epochs: Count = 24


@dataclass(frozen=True)
class BranchConfig:
    """The run continues another one, its trunk, under this configuration."""

    of: str = ""  # the trunk's folder, seen from that of the run; in a grid's file, a schedule
    at: Natural = 0  # the first unit of its own; it starts from the trunk's state before that
    length: Count | None = None  # units after which the trunk's configuration returns; None: never
    skip: bool | None = None  # true: these units are left out, as if the run had never had them


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the numbers of a run. The number of processes only divides the work.

    Attributes:
        name: of the schedule; figures and tables group runs by it.
        role: the schedule's part in figures that draw certain ones, whatever its name is
            (``regimes figure NAME --needs GRID``). It changes nothing of the training.
        seed: of all random streams.
        epochs: how many are trained, unless a budget ends the run before.
        steps: how many are trained, in place of whole epochs; steps count at ``batch_size``.
        unit_steps: after so many steps a run measures, decides and records; None: after an epoch.
            Then "epoch" in records, policies and figures is the number of such a unit.
        workers: logical workers W.
        compressor: a registered name, or ``package.module:Class``, and the fields of the class.
        levels: what the words of a policy mean for this compressor, e.g. ``{low = 4, high = 1}``
            for PowerSGD ranks. "dense" is always known and sends the gradient uncompressed. A level
            may have error feedback of its own, ``{level = 1, error_feedback = false}``.
        policy: what decides the levels, likewise.
        batch_levels: words for batch sizes, e.g. ``{low = 16, high = 128}``: samples per worker and
            step, each a multiple of ``batch_size``, which is accumulated that often.
        batch_policy: which of them is trained at, decided once for the whole model; without one
            it is ``batch_size`` throughout.
        sync_levels: words for periods, e.g. ``{low = 1, high = 32}``: steps that each worker takes
            alone between two synchronisations; the smaller one sends more.
        sync_policy: which of them, decided once for the whole model and from the next
            synchronisation on; a number is a period, too. Without one the workers share each step.
        outer: what a synchronisation does.
        budget: floats after which the run ends.
        deficit: what impairs the training in chosen epochs (``data/deficits.py``).
        branch: the run shares the first units of another, see ``regimes.branch``.
        signal: the norm that detectors read, per layer and unit: of the gradient ("update",
            "global", "local-mean", "worker0") or of the optimiser's step ("movement",
            "movement/lr"), see ``instruments/gradient_norm.py``.
        label_smoothing: the share of each target of a training loss that all classes have alike,
            for images. Evaluation has none.
        start_compressing_after: the first so many steps send the gradient uncompressed.
        instruments: further measurements, by name: ``{fisher = {}}``.
        dtype: of parameters and their gradients. Compressors, residuals and traffic have it, too,
            but float32 where it is "bfloat16" or "float16".
        precision: "strict" is float32 as it is written (IEEE; float64 with that dtype). On a GPU
            "tf32" lets training steps round factors of products to 10 bits. "bfloat16": forward and
            backward under autocast, the rest strict. Instruments are always strict, and evaluation
            is, too, unless ``evaluate_precision`` says otherwise.
        evaluate_every: the test set, and the samples held out for validation, are evaluated after
            so many units, and after the last one.
        evaluate_precision: "strict", or "training": as ``precision`` says.
        deterministic: on a GPU, only operations that give the same bits each time. Without it
            torch's optimisers run as one fused kernel there: other last bits, in less time.
        compile: ``torch.compile`` for the forward and backward passes of training: faster steps
            after minutes of compiling, and other bits.
        graphs: on a GPU, steps are CUDA graphs, recorded once and replayed by one call: of forward
            and backward, and of the reduction at so many vectors of levels; the least recently used
            is dropped (``training/graphs.py``). None: kernels are launched one by one.
        reporters: what else reports each unit: "tensorboard", "wandb", or ``package.module:Class``
            (``records/reporting.py``).
        checkpoint_keep: which checkpoints stay, for branches: the "last" two, "all" that are
            written, or those before the units of a list, which are written besides.
        tuned_on: seeds that chose this configuration; a run with one of them is refused.
        drawn_per_seed: fields that may differ between the seeds of one experiment, e.g.
            ``["policy.layers"]`` of a control that follows another run.
        quirks: "authors" replaces fields to reproduce the published code.
    """

    name: str = "run"
    role: Role | None = None
    seed: int = 0
    epochs: Epochs = 24
    steps: Count | None = None
    unit_steps: Count | None = None
    workers: Count = 4
    batch_size: Count = 8  # samples per worker and step
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
    instruments: dict[str, dict[str, Any]] = field(default_factory=dict)  # see ``instruments/``
    tuned_on: tuple[int, ...] = ()
    drawn_per_seed: tuple[str, ...] = ()
    quirks: Literal["none", "authors"] = "none"
    union_pass: bool = True  # one pass over all hosted workers' batches, where it is exact
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    precision: Literal["strict", "tf32", "bfloat16"] = "strict"
    evaluate_every: Count = 1  # units
    evaluate_precision: Literal["strict", "training"] = "strict"
    deterministic: bool = True  # on a GPU
    compile: bool = False
    graphs: Count | None = None  # on a GPU; a number of vectors of levels
    channels_last: bool = False  # of the activations; parameters stay as they are
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:0"
    checkpoint_every: Count = 1  # units
    checkpoint_seconds: NonNegative | None = None  # at least, between two checkpoints
    checkpoint_keep: Literal["last", "all"] | tuple[Natural, ...] | None = None  # None: "last"
    timeout: Timeout = 600.0  # seconds that a process waits for the others
    bucket_mb: Positive = 25.0  # gradients that are reduced at once, while backward goes on
    reporters: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        """In a notebook, the fields that differ from their defaults."""
        return fields_as_html(self, RunConfig())

    def digest(self) -> str:
        """SHA-256 of the whole configuration."""
        return hashlib.sha256(json.dumps(to_dict(self), sort_keys=True).encode()).hexdigest()


def check_windows(where: str, windows: tuple[tuple[int, int], ...]) -> None:
    """Raise ConfigError unless each window is ``[first, stop)`` of epochs, and not empty."""
    for first, stop in windows:
        if not 0 <= first < stop:
            raise ConfigError(
                f"{where}: [{first}, {stop}] is no window; "
                "expected [first, stop) with 0 <= first < stop"
            )


def in_windows(windows: Iterable[tuple[int, int]], epoch: int) -> bool:
    """Is an epoch in one of the windows ``[first, stop)``?"""
    return any(first <= epoch < stop for first, stop in windows)
