"""Which method trains fastest on my link, and how much faster than dense? One call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from regimes.base.config import DENSE, RunConfig, override_fields
from regimes.base.config.arguments import check_arguments
from regimes.base.console.notebook import describe_kept_runs, end_in_one_sentence
from regimes.base.console.progress import shown_by
from regimes.base.errors import require
from regimes.collectives.launcher import read_launch
from regimes.cost.job import WITHIN, parse_seconds, read_links
from regimes.cost.methods import parse_method, parse_methods
from regimes.cost.network import Network
from regimes.records.files import record_folder
from regimes.search.plans.decide import FEWEST
from regimes.search.plans.earlier import read_curve
from regimes.search.plans.priced import (
    Links,
    Price,
    keep_faster,
    price_methods,
    renew_prices,
    time_short_runs,
)
from regimes.search.plans.probes import in_steps
from regimes.search.plans.result import Plan
from regimes.search.plans.search import PlanSearch, decode_probes, read_prices
from regimes.search.rounds import (
    SearchBudget,
    SearchLog,
    Show,
    as_whole,
    expect,
    read_log,
    refuse_damage,
)
from regimes.search.subject import read_subject

if TYPE_CHECKING:
    from regimes.data.task import Task
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
    loss: float | None = None,
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
        loss: left out since version 0.5, because the fastest method reaches any loss first.
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
    require((link is None) != (links is None), "link, links", (link, links), "one of the two")
    reached = "none: the method that is the most times as fast as dense reaches any loss first"
    require(loss is None, "loss", loss, reached)
    step = None if step is None else parse_seconds(step, "step")
    seconds = None if seconds is None else parse_seconds(seconds, "seconds", ENDLESS)
    where = _links(link, links, gpus, step)
    budget = SearchBudget(10.0 if minutes is None and runs is None else minutes, runs)
    data = train_data, test_data
    config, task = read_subject(what, *data, set, training)
    require(config.workers > 1, "workers", config.workers, "2 or more: one exchanges nothing")
    smaller = (
        (config, task) if probe is None else _smaller(what, config, probe, data, set, training)
    )
    chosen = parse_methods(METHODS if methods is None else methods)
    dense = parse_method(DENSE)
    every = [dense, *(method for method in chosen if method != dense)]
    given = {} if curve is None else read_curve(curve)
    out = record_folder(out)
    question = {"link": str(where.between), "within": str(where.within), "gpus": gpus, "step": step}
    question |= {"methods": [m.label for m in every], "seconds": seconds}
    # the short runs' records tell one model from another
    question["probe"] = "a model" if callable(probe) else probe and dict(cast("Table", probe))
    log, start = read_log(out, decode_probes), time.monotonic()
    per_epoch, first, unrest = price_methods(config, every, where, task)
    short = in_steps(smaller[0], per_epoch)
    here = time_short_runs(short, every, smaller[1])
    first = {name: replace(x, here=here.get(name, x.here)) for name, x in first.items()}
    spent = time.monotonic() - start
    first, now = _latest(out, log, first)
    trained = in_steps(config, per_epoch)
    span = float(trained.steps or 0) * first[DENSE].seconds if seconds is None else seconds
    faster = keep_faster(every, first)
    least = FEWEST * min(first[method.label].seconds for method in faster)
    enough = f"{least:.3g} or more, in which the fastest method has {FEWEST} steps"
    require(span >= least, "seconds", span, enough)
    left_out = tuple(method.label for method in every if method not in faster)
    table = {method.label: method for method in faster}
    search = PlanSearch(out, question, short, table, first, now, span, smaller[1], spent, jobs)
    with end_in_one_sentence(lambda: describe_kept_runs(out)), shown_by(show) as line:
        log = search.search(budget, line)
    return Plan(
        search.known(log),
        table,
        left_out,
        trained,
        search.shown(log),
        str(where.between),
        given,
        own=task is not None,
        smaller=probe is not None,
        budget=budget,
        more=search.larger(budget, log),
        unrest=unrest,
        out=out,
    )


def _latest(
    out: Path, log: SearchLog[Any], timed: dict[str, Price]
) -> tuple[dict[str, Price], dict[str, Price]]:
    """The prices with which the plan in a folder began, and the latest ones."""
    known = []
    for each in log.rounds:
        with refuse_damage(out, each.line):
            if "prices" in each.facts:
                known.append(read_prices(each.facts))
            as_whole(log.rounds[0].facts["first"], 1)
            as_whole(each.facts.get("length", 1), 1)
            expect(known[-1].keys() == timed.keys())
    return (known[0], renew_prices(known[-1], timed)) if known else (timed, timed)


def _smaller(
    what: Any,
    config: RunConfig,
    probe: Any,
    data: tuple[Any, Any],
    set: Mapping[str, Any] | None,
    training: Mapping[str, Any],
) -> tuple[RunConfig, Task | None]:
    """The configuration and task of a smaller model."""
    fields = isinstance(what, str | RunConfig)
    good = isinstance(probe, Mapping) if fields else callable(probe)
    expected = "fields of the configuration" if fields else "a model for the same data"
    require(good, "probe", probe, expected)
    return (
        (override_fields(config, probe), None)
        if fields
        else read_subject(probe, *data, set, training)
    )


def _links(
    link: str | Network | None, links: str | Path | None, gpus: int, step: float | None
) -> Links:
    require(gpus >= 1, "gpus", gpus, "at least 1")
    if links is not None:
        found = read_links(Path(links))
        between = found.get("between") or found.get("within")
        require(between is not None, "links", str(links), "a file with a link")
        assert between is not None
        return Links(between, found.get("within", WITHIN), gpus, step)
    between = Network.parse(link) if isinstance(link, str) else link
    assert between is not None
    return Links(between, WITHIN, gpus, step)
