"""One call from Python that trains and records a model on data of the program's own."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict

from torch import nn
from torch.optim import Optimizer

from regimes import compression, policies
from regimes.base.config import (
    DataConfig,
    GivenLevel,
    ModelConfig,
    OptimizerConfig,
    Registry,
    RunConfig,
    as_level,
)
from regimes.base.config.arguments import check_arguments
from regimes.base.config.registry import required_arguments
from regimes.base.config.toml import override_fields
from regimes.base.errors import ConfigError, suggest_nearest, unexpected_value
from regimes.compression import Compressor
from regimes.data.objects import Loss, LossWeight, Metric, ObjectTask, own_task
from regimes.job.choices import choose_levels
from regimes.job.given import GivenCompressor, GivenModel, GivenPolicy, HasSamples, Table
from regimes.job.reporters import Reporter
from regimes.job.run_warnings import run_warnings
from regimes.records import OWN, Record, read_header
from regimes.records.files import record_folder
from regimes.training import optimizers
from regimes.training.loop import has_epoch, run
from regimes.training.plug_ins import PlugIns


class Training(TypedDict, total=False):
    """Names the arguments that other functions pass on to `simulate`."""

    workers: int
    batch_size: int
    epochs: int
    compressor: GivenCompressor | None
    levels: Mapping[str, GivenLevel] | None
    policy: GivenPolicy | None
    optimizer: str | Table | OptimizerConfig | None
    loss: Loss | None
    metric: Metric | str | None  # a text: of a function of `harm`, the name of what it returns
    loss_weight: LossWeight | None
    seed: int
    name: str | None


@check_arguments("model", "loss", "metric", "compressor", "policy", "optimizer")
def simulate(
    model: GivenModel,
    train_data: HasSamples,
    test_data: HasSamples,
    *,
    out: str | Path,
    workers: int = 8,
    batch_size: int = 32,
    epochs: int = 10,
    compressor: GivenCompressor | None = None,
    levels: Mapping[str, GivenLevel] | None = None,
    policy: GivenPolicy | None = None,
    optimizer: str | Table | OptimizerConfig | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    loss_weight: LossWeight | None = None,
    seed: int = 0,
    name: str | None = None,
    set: Mapping[str, Any] | None = None,
    reporters: Sequence[Reporter] | None = None,
) -> Record:
    """Trains a copy of a model on simulated workers, and leaves a record.

    Under torchrun each process calls this, and the workers are shared out over the processes. The
    results are the same except for rounding: equal to 1e-12 in float64; in float32 single runs
    drift apart, and means over seeds agree. After a stop the same call goes on. After the end it
    returns the record, and warns if a policy made no difference.

    >>> import torch
    >>> x = torch.randn(64, 5)
    >>> data = x[:48], (x[:48].sum(1) > 0).long()
    >>> test = x[48:], (x[48:].sum(1) > 0).long()
    >>> model = nn.Linear(5, 2)
    >>> rank = {"name": "powersgd", "level": 1}
    >>> short = {"workers": 2, "batch_size": 8, "epochs": 2}
    >>> record = simulate(model, data, test, out="runs/mine", compressor=rank, **short)
    >>> len(record.epochs)
    2

    Args:
        model: A module, with whose parameters all seeds begin; or a function or class without
            arguments that makes one, which then uses the random numbers of ``seed``.
        train_data, test_data: A pair of tensors or arrays, inputs and targets. Or a data set with a
            length, whose samples are such pairs, or mappings with ``input_ids``. In a mapping the
            targets of tokens are the next tokens, or those of ``labels`` if it has any; padding at
            the end, which ``attention_mask`` marks, is no target. What a data set draws at random
            depends on seed, epoch, step and worker alone.
        out: The folder of the record.
        workers: The number of simulated workers, W.
        batch_size: The number of samples that a worker reads in a step.
        epochs: The number of epochs.
        compressor, policy: As in `attach`: ``compressor=PowerSGD(rank=4)`` for one level, or
            ``policy=Accordion(low=PowerSGD(rank=4), high=PowerSGD(rank=1))``; or names, or tables
            with a name. The default is PowerSGD with ACCORDION.
        levels: The level that each word of the policy stands for, if neither compressor nor policy
            says it. By default they are the compressor's usual levels. A level may have error
            feedback of its own: ``{"level": 1, "error_feedback": False}``.
        optimizer: "sgd", "adamw", "muon" or ``package.module:Class``; or a table such as ``{"name":
            "adamw", "lr": 0.001}`` with the fields of `OptimizerConfig`. The default is SGD with a
            learning rate of 0.1 and a momentum of 0.9.
        loss: A function of the model's output and the targets that returns one number. The default
            is cross-entropy for classes and tokens, and the mean squared error for real targets. An
            output may also be an object with ``logits``.
        metric: A function of the outputs and targets of all test samples that returns one number.
            If an output is not a tensor, it is called for each batch, and the results are averaged
            with the numbers of samples as weights. The default is the accuracy for classes, and
            otherwise the loss. A record names both functions.
        loss_weight: What ``loss`` divides the sum of a batch's terms by: "samples" (it is a mean
            over samples), "sum" (it divides by nothing), or a function of the batch's targets that
            returns the divisor, such as the number of pixels that count. It is needed where a
            worker's batch or the test set comes in parts. By default Regimes knows it for torch's
            losses with ignored targets and class weights, and finds it by trying for others.
        seed: The seed of all random streams.
        name: The name of the schedule in tables and figures. The default is the policy's name.
        set: Other fields of `RunConfig`, such as ``{"unit_steps": 50, "instruments.fisher": {}}``.
        reporters: What is called as the run proceeds, as in `run`.

    Returns:
        The record of the run.

    Raises:
        ConfigError, DataError: In one sentence, before any training.
        RecordError: ``out`` holds another run.
        TrainingError: As in `run`.
    """
    folder = record_folder(out)
    config, task = own_training(
        model,
        train_data,
        test_data,
        workers=workers,
        batch_size=batch_size,
        epochs=epochs,
        compressor=compressor,
        levels=levels,
        policy=policy,
        optimizer=optimizer,
        loss=loss,
        metric=metric,
        loss_weight=loss_weight,
        seed=seed,
        name=name,
        set=set,
    )
    if "union_pass" not in (set or {}) and has_epoch(folder):
        # earlier versions had one pass for each worker; a run that they began goes on like that
        begun = read_header(folder)["config"].get("union_pass", config.union_pass)
        config = replace(config, union_pass=begun)
    record = run(config, folder, resume="auto", reporters=reporters, task=task)
    for sentence in run_warnings(record.header, record.rows):
        warnings.warn(sentence, stacklevel=2)
    return record


def own_training(
    model: GivenModel, train_data: HasSamples, test_data: HasSamples, **given: Any
) -> tuple[RunConfig, ObjectTask]:
    """Make the configuration and the task of `simulate` with these arguments.

    Raises:
        ConfigError, DataError: as there; or an argument that a configuration has no place for.
    """
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(simulate).parameters.items()
        if name not in ("model", "train_data", "test_data", "out", "reporters")
    }
    for name in given:
        if name not in defaults:
            raise ConfigError(
                f"{name}: no argument of a training. {suggest_nearest(name, defaults)}"
            )
    own: Any = SimpleNamespace(**defaults | given)
    rule, compressor, levels = choose_levels(own.policy, own.compressor)
    rule, chosen = _as_table(policies.REGISTRY, rule), _compressor_table(own.compressor, compressor)
    if levels is None:
        levels = compressor.usual if own.levels is None else own.levels
    elif own.levels is not None:
        raise ConfigError(
            f"levels = {own.levels!r}: the compressor has its level already: leave one of them out"
        )
    config = RunConfig(
        name=own.name or str(rule["name"]).rpartition(":")[2],
        seed=own.seed,
        epochs=own.epochs,
        workers=own.workers,
        batch_size=own.batch_size,
        compressor=chosen,
        levels={name: as_level(x, f"levels.{name}") for name, x in dict(levels).items()},
        policy=rule,
        optimizer=_optimizer_config(own.optimizer),
        data=DataConfig(name=OWN),
        model=ModelConfig(name=_name_of(model)),
    )
    for name in own.set or {}:
        if name in defaults and getattr(own, name) != defaults[name]:
            raise ConfigError(f"set: {name} is an argument of its own too: leave one of them out")
    config = override_fields(config, dict(own.set or {}))
    PlugIns.from_config(config)  # refuses what does not go with a model and data of the user's own
    made = own_task(model, train_data, test_data, own.loss, own.metric, own.loss_weight)
    return config, made


def _compressor_table(spelling: Any, compressor: Compressor) -> dict[str, Any]:
    """The table of a compressor without its levels, which a configuration has apart; a name or a
    table as it was written."""
    usual = {"name": "powersgd"}
    if spelling is None and compressor == compression.make_compressor(usual):
        return usual
    if spelling is None or isinstance(spelling, Compressor):
        return compression.REGISTRY.table(compressor)
    words = ("level", "levels", compressor.level_word)
    table = _as_table(compression.REGISTRY, spelling)
    return {key: value for key, value in table.items() if key not in words}


def _as_table(registry: Registry, part: Any) -> dict[str, Any]:
    """The table of a configuration for a name, a table or an object."""
    if isinstance(part, str):
        return {"name": part}
    if isinstance(part, Mapping):
        if not isinstance(part.get("name"), str) and registry is not optimizers.CLASSES:
            raise unexpected_value(registry.kind, dict(part), "a name, or a table with a name")
        return dict(part)
    if part is None or isinstance(part, int | float | type):
        expected = "a name, a table with a name, or an object"
        raise unexpected_value(registry.kind, part, expected)
    return registry.table(part)


def _optimizer_config(optimizer: Any) -> OptimizerConfig:
    """The optimiser's part of the configuration."""
    if isinstance(optimizer, OptimizerConfig):
        return optimizer
    table = {"lr": 0.1} if optimizer is None else _as_table(optimizers.CLASSES, optimizer)
    if isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__.lower()
        raise ConfigError(
            "optimizer: the copy of the model that is trained has other parameters than a torch "
            f'optimiser that exists: write optimizer={{"name": "{kind}", "lr": ...}}'
        )
    name = table.get("name", "sgd")
    if isinstance(name, str):
        optimizers.CLASSES.load(name)  # a name that nothing has is said before what it lacks
    if "lr" not in table:
        others = [key for key in table if key not in {f.name for f in fields(OptimizerConfig)}]
        unknown = f" ({', '.join(others)}: no such field)" if others else ""
        raise ConfigError(
            f"optimizer = {name!r}: its learning rate is missing{unknown}: write "
            f'optimizer={{"name": "{name}", "lr": ...}}'
        )
    changes = {f"optimizer.{key}": value for key, value in table.items()}
    return override_fields(RunConfig(), changes).optimizer


def _name_of(model: Any) -> str:
    """The name of a module's class, or of the function that makes one.

    Raises:
        ConfigError: it is neither, or the function needs arguments.
    """
    made = type(model) if isinstance(model, nn.Module) else model
    if not callable(made):
        raise unexpected_value("model", model, "an nn.Module, or a function that makes one")
    name = str(getattr(made, "__name__", type(made).__name__)).strip("<>")
    if made is model and (needed := required_arguments(made)):
        raise ConfigError(
            f"model: {name} needs {', '.join(needed)}, and is called without arguments: pass "
            f"functools.partial({name}, {needed[0]}=...), or a module"
        )
    return name
