"""What works with what. No torch.

A part of a job (a compressor, a statistic that a policy reads, an option) *needs* capabilities. A
mode (processes, shards, a hook, local steps) *lacks* some, and offers all others. `check` compares
them before any work starts. What only shows later (a captured model, a call on a sharded hook) is
refused where it shows.

Plug-ins declare both by class attributes, or properties that depend on their fields::

    requires = frozenset({WHOLE_LAYERS})               # what the plug-in needs
    takes_away = {CAPTURED_STEPS: "why, what to do"}   # what no other part has beside it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from regimes.base.errors import ConfigError, suggest_nearest

# -- capabilities ----------------------------------------------------------------------------------

WHOLE_LAYERS = "whole_layers"
WORKER_GRADIENTS = "worker_gradients"
SEVERAL_WORKERS = "several_workers"
SHARED_UPDATES = "shared_updates"
STEP_UPDATES = "step_updates"
WORKER_MODELS = "worker_models"
ALIKE_WORKERS = "alike_workers"
CONSTANT_UNIT = "constant_unit"
GRADIENT_UNIT = "gradient_unit"
LEARNING_RATE = "learning_rate"
OPTIMIZER_STEPS = "optimizer_steps"
PROBE = "probe"
SAMPLES = "samples"
OWN_COLLECTIVES = "own_collectives"
FULL_PRECISION = "full_precision"
HALF_PARAMETERS = "half_parameters"
CAPTURED_STEPS = "captured_steps"
CAPTURED_EXCHANGES = "captured_exchanges"
UNITS_BY_CALL = "units_by_call"
NAMED_TASK = "named_task"
LABELS = "labels"
BATCH_SIZES = "batch_sizes"
NEW_START = "new_start"
OWN_LENGTH = "own_length"
MODULE_PARTS = "module_parts"
COMPRESSED_PARTS = "compressed_parts"

MEANING = {
    WHOLE_LAYERS: "a process holds all rows of each layer",
    WORKER_GRADIENTS: "each worker's own gradient is known, not their mean alone",
    SEVERAL_WORKERS: "there are two workers or more at all times",
    SHARED_UPDATES: "all workers apply one update in each step, and have the same weights",
    STEP_UPDATES: "each process sees the update of every step of a unit",
    WORKER_MODELS: "workers have weights of their own between synchronisations",
    ALIKE_WORKERS: "workers have the same weights right after a synchronisation",
    CONSTANT_UNIT: "a norm is of the same thing, gradients or movements, in all steps",
    GRADIENT_UNIT: "gradients are exchanged, which the learning rate turns into movements",
    LEARNING_RATE: "the learning rate of each step is known",
    OPTIMIZER_STEPS: "the optimiser's steps are seen, not gradients alone",
    PROBE: "there is a loss on samples of the training data",
    SAMPLES: "any samples of the training data can be read",
    OWN_COLLECTIVES: "values may be sent apart from the exchange of a step",
    FULL_PRECISION: "parameters are float32 or float64",
    HALF_PARAMETERS: "parameters may be bfloat16 or float16",
    CAPTURED_STEPS: "each step launches the same kernels",
    CAPTURED_EXCHANGES: "each exchange launches the same kernels",
    UNITS_BY_CALL: "a unit ends where the script says so, between two steps",
    NAMED_TASK: "data set and network are named in the configuration",
    LABELS: "each sample is of one class",
    BATCH_SIZES: "the batch size may change during training",
    NEW_START: "training starts anew, so that the state may have another form",
    OWN_LENGTH: "the length of training is its own",
    MODULE_PARTS: "a module's gradient comes in the parts of its owners",
    COMPRESSED_PARTS: "what a process sees of a gradient is what is compressed",
}

# -- parts and modes -------------------------------------------------------------------------------


class _Absent:
    """In place of a value that a sentence leaves out."""


ABSENT = _Absent()


@dataclass(frozen=True)
class Part:
    """Names something that a configuration or a call asks for.

    Attributes:
        field: its name there.
        needs: capabilities.
        value: as the sentence shows it; `ABSENT`: not at all.
        instead: what the sentence expects in its place.
        others: gives the needs of everything that could stand in its place, by name; those that
            work are then listed, and ``instead`` is used where none does.
    """

    field: str
    needs: Collection[str]
    value: Any = ABSENT
    instead: str = "none"
    others: Callable[[], Mapping[str, Collection[str]]] | None = None


@dataclass(frozen=True, eq=False)
class Mode:
    """Says what a way to run a job (local steps, nodes as workers, ...) cannot offer to its parts.

    Attributes:
        name: the end of the error "expected none ...", like "with a sync_policy".
        lacks: by capability that is missing: why, and what to do about it.
    """

    name: str
    lacks: Mapping[str, str]

    @property
    def offers(self) -> frozenset[str]:
        return frozenset(MEANING) - self.lacks.keys()


def declared_needs(plug_in: Any, usual: Collection[str] = ()) -> frozenset[str]:
    """Return what a plug-in, or its class, declares to need; ``usual`` where it declares nothing.

    Raises:
        ConfigError: a capability that does not exist.
    """
    declared = frozenset(getattr(plug_in, "requires", usual))
    _check_known(plug_in, "requires", declared)
    return declared


def mode_of(plug_in: Any, name: str) -> Mode:
    """Return what other parts lack beside a plug-in.

    Args:
        name: of the mode in sentences, "with graphs".

    Raises:
        ConfigError: a capability that does not exist.
    """
    lacks = dict(getattr(plug_in, "takes_away", {}))
    _check_known(plug_in, "takes_away", lacks)
    return Mode(name, lacks)


def _check_known(plug_in: Any, attribute: str, names: Iterable[str]) -> None:
    for name in names:
        if name not in MEANING:
            kind = plug_in if isinstance(plug_in, type) else type(plug_in)
            raise ConfigError(
                f"{kind.__name__}.{attribute}: {name!r}: {suggest_nearest(name, MEANING)}"
            )


def find_missing(needs: Collection[str], modes: Iterable[Mode]) -> tuple[Mode, str] | None:
    """Find the first mode that lacks one of these capabilities, and which; None if it works.

    >>> find_missing({WHOLE_LAYERS}, [LOCAL, SHARDED_MODEL])[1]
    'whole_layers'
    """
    return next(((mode, need) for mode in modes for need in mode.lacks if need in needs), None)


def check(parts: Iterable[Part], modes: Collection[Mode]) -> None:
    """Compare what parts need with what all of the modes offer.

    Raises:
        ConfigError: the first part that needs what a mode lacks.
    """
    for part in parts:
        if (found := find_missing(part.needs, modes)) is not None:
            mode, need = found
            value = "" if part.value is ABSENT else f" = {part.value!r}"
            others = {} if part.others is None else part.others()
            works = [x for x, own in others.items() if find_missing(own, modes) is None]
            expected = part.instead
            if works:  # name those that work, in place of what stands in general
                expected = " or ".join([", ".join(works[:-1]), works[-1]][len(works) < 2 :])
            raise ConfigError(
                f"{part.field}{value}: expected {expected} {mode.name}: {mode.lacks[need]}"
            )


# -- the modes -------------------------------------------------------------------------------------

_NO_DATA = "only gradients are seen here, not the training data: train with regimes.run"
_ONLY_TRAINER = "only the trainer knows the optimiser's steps"
_ONLY_DDP = "only what is exchanged in the buckets of DDP is captured"
_NO_PARTS = "it is for what FSDP2 exchanges: attach_shards(model, mesh, scatter=...)"

# of the trainer
PROCESSES = Mode("on several processes", {CAPTURED_STEPS: "collectives are not captured"})
SHARED_STEPS = Mode(
    "without a sync_policy",
    {
        WORKER_MODELS: "workers that share each step have one model: set sync_policy",
        MODULE_PARTS: _NO_PARTS,
    },
)
LOCAL = Mode(
    "with a sync_policy",
    {
        SHARED_UPDATES: "workers that step locally share no update, and have weights of their own",
        MODULE_PARTS: _NO_PARTS,
        HALF_PARAMETERS: "the small movements of local steps need float32 parameters",
        CAPTURED_STEPS: "local steps are not captured",
    },
)
MIXED_PERIODS = Mode(
    "with periods of 1 and longer ones",
    {
        CONSTANT_UNIT: "a policy reads a norm: of gradients at a period of 1, but of movements at "
        'a longer one: set outer.period_one = "parameters", or this signal'
    },
)
STREAMING = Mode(
    "with fragments, a delay or mixing", {ALIKE_WORKERS: "there workers are never alike"}
)
UNION_PASS = Mode(
    "in one pass of all workers",
    {WORKER_GRADIENTS: "only the mean of their gradients is computed: set union_pass = false"},
)
ONE_WORKER = Mode("with one worker", {SEVERAL_WORKERS: "there is nothing to compare it with"})
HALF = Mode(
    "with half precision",
    {FULL_PRECISION: "products with the Hessian need float32 or float64 parameters"},
)
OWN_OBJECTS = Mode(
    "with data and a model of your own",
    {
        NAMED_TASK: "it is for data sets and networks that Regimes names: change the model and the "
        "data that you pass instead (data.drop_last and data.reshuffle can be set)"
    },
)
TEXT = Mode(
    "with a text",
    {
        BATCH_SIZES: "its batch is its number of parallel streams, which cannot change during a "
        "run",
        LABELS: "it has no classes of samples",
    },
)
BRANCH = Mode("in a branch", {NEW_START: "a branch shares it with its trunk"})
PULSE = Mode(
    "in a branch with a length", {OWN_LENGTH: "a pulse ends as its trunk does, and shares it"}
)
_NO_LAUNCH = "there is nothing to launch"
ON_CPU = Mode("on a CPU", {CAPTURED_STEPS: _NO_LAUNCH, CAPTURED_EXCHANGES: _NO_LAUNCH})
COMPILED = Mode("with compile", {CAPTURED_STEPS: "torch decides there what is captured"})
RANDOM_MODEL = Mode(
    "with a model that draws random numbers",
    {
        CAPTURED_STEPS: "it draws them (dropout) from a seed for each worker and step, which a "
        "graph cannot change",
    },
)
STATEFUL_MODEL = Mode(
    "with a model that carries a state",
    {
        CAPTURED_STEPS: "it carries a state from batch to batch: read the text in data.windows = "
        '"contiguous"',
    },
)

# of a training loop of the user's own
HOOK = Mode(
    "in a hook",
    {
        SAMPLES: _NO_DATA,
        OPTIMIZER_STEPS: _ONLY_TRAINER,
        WORKER_MODELS: "workers share each step",
    },
)
WITHOUT_SHARDS = Mode("without shards", {MODULE_PARTS: _NO_PARTS})
WITHOUT_PROBE = Mode(
    "without a probe",
    {
        PROBE: f"{_NO_DATA}, or pass instruments and probe",
    },
)
WITHOUT_OPTIMIZER = Mode(
    "without an optimizer",
    {
        LEARNING_RATE: "it reads the learning rate of each step: add optimizer=optimizer",
    },
)
ENDS_BY_ITSELF = Mode(
    "with every",
    {
        UNITS_BY_CALL: "it is measured in epoch_end(), between two steps: leave every out, and "
        "call hook.epoch_end() where a unit ends"
    },
)
SHARDED_MODEL = Mode(
    "with a sharded model",
    {
        WHOLE_LAYERS: "each process holds some rows of each layer",
        MODULE_PARTS: _NO_PARTS,
        CAPTURED_EXCHANGES: _ONLY_DDP,
    },
)
ON_NODES = Mode(
    "with several devices a node",
    {
        WHOLE_LAYERS: "each device exchanges its rows of each layer: with nodes=False each is a "
        "worker",
    },
)
SHARDED_COLLECTIVES = Mode(
    "with shards",
    {
        WHOLE_LAYERS: "each process has its part of each module's reduced gradient",
        WORKER_GRADIENTS: "gradients are exchanged module by module, and then freed",
        STEP_UPDATES: "each process has its part of each module's reduced gradient",
        OWN_COLLECTIVES: "what FSDP2 exchanges is compressed, and nothing is sent beside it",
        CAPTURED_EXCHANGES: _ONLY_DDP,
    },
)
WHOLE_GRADIENTS = Mode(
    "with shards and a compressor",
    {
        MODULE_PARTS: "whole gradients are exchanged: use scatter in place of the compressor",
        COMPRESSED_PARTS: "each process sees its rows of what is compressed whole: measure "
        '"residual" or "cosine" instead',
    },
)
LOCAL_STEPS = Mode(
    "in local_steps",
    {
        SAMPLES: _NO_DATA,
        PROBE: _NO_DATA,
        OPTIMIZER_STEPS: _ONLY_TRAINER,
        SHARED_UPDATES: LOCAL.lacks[SHARED_UPDATES],
        MODULE_PARTS: _NO_PARTS,
        STEP_UPDATES: "only what is exchanged is seen, once per synchronisation",
        GRADIENT_UNIT: "local steps exchange movements of the weights, whose unit does not depend "
        "on the learning rate: leave it out",
        HALF_PARAMETERS: LOCAL.lacks[HALF_PARAMETERS],
    },
)

# -- the page --------------------------------------------------------------------------------------

# docs/reference/works-with.md: its columns, and further modes in which something may be refused
WAYS: dict[str, tuple[Mode, ...]] = {
    "run": (SHARED_STEPS,),
    "run --processes": (SHARED_STEPS, PROCESSES),
    "run, sync_policy": (LOCAL,),
    "simulate": (SHARED_STEPS, OWN_OBJECTS),
    "attach, DDP": (HOOK, WITHOUT_SHARDS),
    "attach, FSDP2": (HOOK, WITHOUT_SHARDS, SHARDED_MODEL),
    "attach, FSDP2 shards": (HOOK, SHARDED_COLLECTIVES),
    "local_steps": (LOCAL_STEPS,),
    "local_steps, FSDP2": (LOCAL_STEPS, SHARDED_MODEL),
}
CONDITIONS = (
    UNION_PASS,
    ONE_WORKER,
    HALF,
    TEXT,
    RANDOM_MODEL,
    STATEFUL_MODEL,
    STREAMING,
    COMPILED,
    ON_CPU,
    WITHOUT_PROBE,
    WITHOUT_OPTIMIZER,
    ENDS_BY_ITSELF,
    WHOLE_GRADIENTS,
    ON_NODES,
)
