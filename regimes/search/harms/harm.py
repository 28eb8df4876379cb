"""Where in a training may more be compressed? One call. No torch at import."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from regimes.base.config import BranchConfig, RunConfig
from regimes.base.config.arguments import check_arguments
from regimes.base.console.notebook import describe_kept_runs, end_in_one_sentence
from regimes.base.console.progress import shown_by
from regimes.base.errors import ConfigError, require
from regimes.collectives.launcher import read_launch
from regimes.plotting.looks import METRICS, Metric, find_metric
from regimes.records.files import record_folder
from regimes.search.harms.branches import BranchSearch
from regimes.search.harms.function import FunctionSearch, TrainingFunction
from regimes.search.harms.kinds import PulseKind, apply_pulse, kinds_of, kinds_of_job, trunk_config
from regimes.search.harms.result import Harm
from regimes.search.rounds import SearchBudget, Show
from regimes.search.subject import read_subject

if TYPE_CHECKING:
    from regimes.data.task import Task
    from regimes.job.given import GivenModel, HasSamples
    from regimes.training.simulate import Training


@check_arguments("what")
def harm(
    what: str | RunConfig | GivenModel | TrainingFunction,
    train_data: HasSamples | None = None,
    test_data: HasSamples | None = None,
    *,
    pulse: str | Sequence[str] = "high",
    minutes: float | None = None,
    runs: int | None = None,
    out: str | Path = "runs/harm",
    jobs: int = 1,
    margin: float | None = None,
    groups: Sequence[str] = (),
    deletion: bool | None = None,
    parts: int = 4,
    first_seed: int = 0,
    set: Mapping[str, Any] | None = None,
    show: Show | None = None,
    units: int | None = None,
    lower: bool | None = None,
    **training: Unpack[Training],
) -> Harm:
    """Find where in a training more may be compressed, within a budget.

    For each seed it trains a trunk, and branches of it with a pulse, which is a change in some
    units. The same call goes on after a stop, or with a larger budget. Every run is a record below
    ``out``.

    Args:
        what: a preset's name, the path of a TOML file, a configuration, or a model as `simulate`
            takes it. With ``units`` it is a function that trains: it gets a pulse
            (`regimes.search.harms.evidence.Pulse`, or None for the trunk) and a seed, and returns
            the metric.
        train_data, test_data: the data of a model, as `simulate` takes them.
        pulse: what pulses change, in the words of `harms.kinds`. Several are tried each by
            itself.
        minutes, runs: the budget. Default: 10 minutes. A run that has begun is finished.
        jobs: how many runs are trained at once. Each is a process, to which model and data are
            sent.
        margin: the harm below which a phase is safe, in the unit of the table. For an accuracy the
            default is 1 point, and otherwise 2 % of the trunk's metric. There is no default for a
            function's own metric, and where trunks end close to 0.
        groups: groups of layers, in each of which the level is changed by itself. A group is a text
            of patterns of layers' names, separated by spaces.
        deletion: whether beside each pulse the same units are also left out, which says what lost
            time costs. Default: yes, except for a function. A function with ``deletion=True`` gets
            pulses of the arm "deletion", and leaves their units out.
        parts: how many windows are tried first.
        first_seed: the seed of the first trunk.
        set: fields of the configuration.
        show: is called after each run, with a line and the share of the budget that is spent;
            ``print`` prints them. Default: one line in a notebook, a bar on a terminal, and
            otherwise lines on standard error.
        units: how many units a run of a function has.
        lower: for a function, whether less of its metric is better. This is known of a loss and an
            accuracy.
        training: for a model, further arguments of `simulate`, such as ``epochs`` or ``optimizer``.
            For a function, ``metric``: the name of what it returns, by default "loss".

    Raises:
        ConfigError, DataError: something is refused before any training, in one sentence.
        RecordError: the folder holds another search.
        TrainingError: a trunk broke, or a process was killed; what is finished is kept.
    """
    require(
        read_launch().count == 1, "harm", "under a launcher", "one process, which starts the runs"
    )
    words = [pulse] if isinstance(pulse, str) else [*pulse]
    budget = SearchBudget(10.0 if minutes is None and runs is None else minutes, runs)
    out = record_folder(out)
    if units is not None:
        require(callable(what), "units", units, "none, unless a function trains")
        given: dict[str, Any] = {"train_data": train_data, "test_data": test_data, "set": set}
        given |= {"groups": groups or None, "jobs": None if jobs == 1 else jobs}
        for name, value in given.items():
            require(value is None, name, value, "none beside a function, which trains by itself")
        shown, arms = _choose_metric(lower, **cast(Any, training)), kinds_of_job(words)
        own = f"a number: what change of {shown.name} counts as none is not known"
        require(shown.directed or margin is not None, "margin", margin, own)
        given_job = out, cast(TrainingFunction, what), arms, units, shown, margin, parts, first_seed
        function = FunctionSearch(*given_job, lost_time=bool(deletion))
        with end_in_one_sentence(lambda: describe_kept_runs(out)), shown_by(show) as line:
            return function.search(budget, line)
    require(lower is None, "lower", lower, "none, unless a function trains")
    config, task = read_subject(what, train_data, test_data, set, training)
    trunk = replace(trunk_config(config), seed=first_seed)
    kinds = kinds_of(words, groups, trunk)
    _check_trainable(trunk, kinds, task)
    records = BranchSearch(out, trunk, kinds, task, margin, parts, deletion is not False)
    with end_in_one_sentence(lambda: describe_kept_runs(out)), shown_by(show) as line:
        return records.search(budget, jobs, line)


def _choose_metric(lower: bool | None, metric: str = "loss", **others: Any) -> Metric:
    """How the metric that a function returns is written, and which direction is better."""
    for name in others:
        raise ConfigError(f"{name}: expected metric alone, beside a function and its units")
    known = metric in METRICS
    require(known or lower is not None, "lower", lower, f"True or False: is less {metric} better?")
    return find_metric(metric) if lower is None else replace(find_metric(metric), lower=lower)


def _check_trainable(trunk: RunConfig, kinds: Mapping[str, PulseKind], task: Task | None) -> None:
    """Raise ConfigError unless the trunk and each pulse can be trained."""
    from regimes.training.build import prepare_run  # torch, so late
    from regimes.training.phases import check_branch
    from regimes.training.plug_ins import PlugIns

    with contextlib.closing(prepare_run(trunk, task)) as run:
        units, layers = len(run.units), [layer.name for layer in run.layers if layer.compressed]
    require(units >= 2, "epochs, steps", units, "a run of two units or more")
    for name, kind in kinds.items():
        try:
            changed = apply_pulse(trunk, kind, [(0, 1)])
            branch = BranchConfig(of="trunk", at=0, length=1, skip=kind.skip or None)
            check_branch(trunk, replace(changed, branch=branch), units)
            # its first decision, which names groups that the model does not have
            PlugIns.from_config(changed).policy.decide([], layers)
        except ConfigError as error:
            raise ConfigError(f"pulse {name!r}: {error}") from None
