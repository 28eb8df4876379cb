"""Which method trains fastest on my link, and how much faster than dense? One call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from regimes.base.config import DENSE, RunConfig, override_fields
from regimes.base.config.arguments import check_arguments
from regimes.base.console.notebook import describe_kept_runs, end_in_one_sentence
from regimes.base.console.progress import shown_by
from regimes.base.errors import require
from regimes.collectives.launcher import read_launch
from regimes.cost.methods import parse_method, parse_methods
from regimes.cost.models import Model
from regimes.cost.network import FASTEST, Network
from regimes.cost.nodes import WITHIN, DataParallelJob, parse_seconds, read_links, require_link
from regimes.records.files import record_folder
from regimes.search.plans.dense_curve import read_curve
from regimes.search.plans.result import Plan
from regimes.search.plans.search import PlanSearch
from regimes.search.rounds import SearchBudget, Show
from regimes.search.subject import read_subject

if TYPE_CHECKING:
    from regimes.job.given import GivenModel, HasSamples, Table
    from regimes.training.simulate import Training

METHODS = (
    *("dense", "cast:fp16", "quantised-all-reduce:8", "quantised-all-reduce:4", "powersgd:4"),
    *("dense/8", "quantised-all-reduce:4/8", "dense/32"),
)
ENDLESS = 1e9  # seconds, 30 years


@check_arguments("what")
def plan(
    what: str | RunConfig | GivenModel,
    train_data: HasSamples | None = None,
    test_data: HasSamples | None = None,
    *,
    link: str | Network | None = None,
    links: str | Path | None = None,
    gpus: int = 1,
    seconds: float | str | None = None,
    curve: str | Path | Mapping[float, float] | None = None,
    step: float | str | None = None,
    methods: Sequence[str] | None = None,
    probe: GivenModel | Table | None = None,
    minutes: float | None = None,
    runs: int | None = None,
    out: str | Path = "runs/plan",
    jobs: int = 1,
    set: Mapping[str, Any] | None = None,
    show: Show | None = None,
    **training: Unpack[Training],
) -> Plan:
    """Find how many times as fast as without compression each method trains on a link.

    Short runs with simulated workers measure each method's clock: how many steps without
    compression one of its steps is worth (`plans.clock`). The cost model predicts how long
    a step takes on the link (`regimes.cost`); compute and compression are timed on this machine. A
    method's speed is its clock times the seconds of a step without compression, divided by the
    seconds of its own step. The same call goes on after a stop, or with a larger budget.

    Args:
        what: a preset's name, the path of a TOML file, a configuration, or a model as `simulate`
            takes it.
        train_data, test_data: the data of a model, as `simulate` takes them.
        link: the link of a node to the others, such as "100Mbit/s,50us".
        links: a file that `regimes doctor --links` has written; give it in place of ``link``.
        gpus: how many devices a node has. Each worker is one.
        seconds: how long the training may take, also as a text such as "20min". Its schedule is
            stretched to the steps that each method can take in this time. Default: as long as the
            configured training takes without compression.
        curve: what earlier trainings without compression ended at: a CSV file of steps and losses,
            a folder of records, or losses by steps, in the unit of figures (percent, bits per
            byte). The answer then has the loss after the seconds also where the short runs are too
            short for it.
        step: the seconds of one worker's step on the device of the training, also as a text such as
            "40ms". Default: they are timed here.
        methods: COMPRESSOR:LEVEL, with /PERIOD for local steps. Default: `METHODS`. Dense is always
            among them.
        probe: a smaller model that stands for this one in the short runs. For a model it is another
            module for the same data; otherwise it is fields of the configuration, such as
            ``{"model.width": 32}``.
        minutes, runs: the budget of all that is trained and timed. Default: 10 minutes.
        jobs: how many short runs are trained at once. Each is a process, to which model and data
            are sent.
        set: fields of the configuration.
        show: is called after each short run, with a line and the share of the budget that is spent.
            Default: one line in a notebook, a bar on a terminal, and otherwise lines on standard
            error.
        training: for a model, further arguments of `simulate`, such as ``workers`` or
            ``optimizer``.

    Raises:
        ConfigError, DataError: something is refused before any training, in one sentence.
        RecordError: the folder holds another plan.
        TrainingError: a process was killed; what is finished is kept.
    """
    require(
        read_launch().count == 1, "plan", "under a launcher", "one process, which starts the runs"
    )
    one = "one of the two, e.g. link 100Mbit/s,50us"
    require((link is None) != (links is None), "link, links", (link, links), one)
    compute = None if step is None else parse_seconds(step, "step")
    span = None if seconds is None else parse_seconds(seconds, "seconds", ENDLESS)
    budget = SearchBudget(10.0 if minutes is None and runs is None else minutes, runs)
    config, task = read_subject(what, train_data, test_data, set, training)
    job, short = _job(link, links, gpus, config.workers), (config, task)
    if probe is not None and isinstance(what, str | RunConfig):
        fields = "fields of the configuration"
        require(isinstance(probe, Mapping), "probe", probe, fields)
        short = override_fields(config, cast("Table", probe)), None
    elif probe is not None:
        require(callable(probe), "probe", probe, "a model for the same data")
        short = read_subject(probe, train_data, test_data, set, training)
    named = parse_methods(METHODS if methods is None else methods)
    every = {DENSE: parse_method(DENSE), **{method.label: method for method in named}}
    given = {} if curve is None else read_curve(curve)
    out = record_folder(out)
    question = {"link": str(job.between), "within": str(job.within), "gpus": gpus, "step": compute}
    question |= {"methods": [*every], "seconds": span}
    # the short runs' records tell one model from another
    question["probe"] = "a model" if callable(probe) else probe and dict(cast("Table", probe))
    search = PlanSearch(
        out, question, (config, task), short, every, job, compute, span, given, jobs
    )
    with end_in_one_sentence(lambda: describe_kept_runs(out)), shown_by(show) as line:
        return search.search(budget, line)


def _job(
    link: str | Network | None, links: str | Path | None, gpus: int, workers: int
) -> DataParallelJob:
    """Where the training will run, with no model yet."""
    require(workers > 1, "workers", workers, "2 or more: one exchanges nothing")
    require(gpus >= 1, "gpus", gpus, "at least 1")
    require(workers % gpus == 0, "gpus", gpus, f"a number that divides the {workers} workers")
    found = {} if links is None else read_links(Path(links))
    between = Network.parse(link) if isinstance(link, str) else link
    if links is not None and gpus > 1:  # else all workers have one kind of link
        require_link("within", found, Path(links), "leave --gpus out")
        if between is None and workers > gpus:
            require_link("between", found, Path(links), f"give --gpus {workers}")
    between = between or found.get("between") or found.get("within")
    require(between is not None, "links", str(links), "a file with a link")
    return DataParallelJob(
        Model("", ()),
        1.0,  # a step has its own seconds
        1.0,
        nodes=workers // gpus,
        gpus=gpus,
        within=found.get("within", WITHIN),
        between=cast("Network", between),
        algorithm=FASTEST,
    )
