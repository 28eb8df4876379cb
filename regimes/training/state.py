"""Starting and continuing a run: open its record, save its state, restore it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from regimes.base.config import to_dict
from regimes.base.errors import RecordError, RegimesError, require
from regimes.job.header import build_header
from regimes.job.state import State
from regimes.records import (
    Header,
    RecordWriter,
    Row,
    check_same,
    has_ended,
    is_complete,
    provenance,
    read_events,
    read_header,
    read_rows,
    trunk_table,
)
from regimes.training import checkpoint
from regimes.training.build import Run
from regimes.training.changes import Notes, fit_checkpoint
from regimes.training.phases import Phase, decisive_changes


def open_record(run: Run, out: Path, resume: bool) -> RecordWriter | None:
    """Starts or continues the record of a run; all processes call it.

    Three cases differ in what each process first restores into ``run``, so that all go on from the
    same unit:

    =========  ========  ===================  =================================================
    case       resume    ``run.phase.trunk``  what is restored
    =========  ========  ===================  =================================================
    new        False     None                 nothing
    branch     False     a folder             the trunk's rows before the branch, and its
                                              checkpoint at the branch
    resumed    True      either               the rows up to the newest checkpoint of ``out``, and
                                              this; for a branch without one, the trunk's at the
                                              branch
    =========  ========  ===================  =================================================

    Args:
        run: the run, not yet trained here; its rows and state are set.
        out: the folder of the record.
        resume: whether the folder has a record to continue.

    Returns:
        The open record on process 0, and None on the others.

    Raises:
        RecordError: the record cannot be read or written; all processes raise it.
    """
    notes = _restore_start(run, out, resume) if resume or run.phase.trunk else None
    run.header = _make_header(run)
    run.world.barrier()  # process 0 changes the record only after all have read it
    failure: RecordError | None = None
    writer = None
    if run.world.rank == 0:
        try:
            if resume:
                place = {"code": run.header["code"], "processes": run.world.processes}
                writer = RecordWriter.resume(out, len(run.rows), **place)
            else:
                writer = RecordWriter.create(out, run.header)
            if notes is not None:
                fields = sorted(
                    decisive_changes(run.phase.config_before(len(run.rows)), run.config)
                )
                writer.event("changed", epoch=len(run.rows), fields=fields, state=notes)
        except RecordError as error:
            failure = error
    failure = run.world.gather_object(failure)[0]  # so that all processes raise it, or none
    if failure:
        raise type(failure)(str(failure))  # a new one: this process's own traceback
    return writer


def remaining_phases(phases: list[Phase], out: Path) -> list[Phase]:
    """Return the phases that a run in a folder, which is resumed, has not completed."""
    done = 0
    if len(phases) > 1:
        rows = _read_finished_rows(out)
        done = (checkpoint.load(out) or (0, None))[0] if rows is None else len(rows)
    return [phase for phase in phases if not phase.is_over(done)]


def _read_finished_rows(out: Path) -> list[Row] | None:
    """All rows of a run that needs no more training; None of any other.

    A run that was killed between its last row and its last checkpoint has no final weights yet, and
    trains on from the checkpoint before. Where no checkpoint is left, its rows are all there is.
    """
    header = read_header(out)
    rows = read_rows(out, header)
    whole = is_complete(header, rows)
    return (
        rows
        if whole and (has_ended(read_events(out)) or not checkpoint.list_checkpoints(out))
        else None
    )


def check_same_task(source: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise RecordError unless samples, loss, metric, model and first weights are those that a
    record has in its header (``data``)."""
    if before["digest"] != now["digest"]:
        raise RecordError(f"{source} was trained on other data: the samples have changed since")
    for name in ("loss", "metric"):  # of a user's own
        if before.get(name) != now.get(name):
            raise RecordError(
                f"{source} was trained with the {name} {before.get(name) or 'by default'}, not "
                f"{now.get(name) or 'that by default'}: choose another folder"
            )
    for name, what in (
        ("model", "another model: its modules (repr) are others"),
        (
            "weights",
            "other first weights: make the model after torch.manual_seed, or pass the "
            "function that makes it",
        ),
    ):  # older records lack them
        if name in before and before.get(name) != now.get(name):
            raise RecordError(f"{source} was trained with {what}; or choose another folder")


def _restore_start(run: Run, out: Path, resume: bool) -> Notes | None:
    """Restore into a run the rows and the checkpoint from which it goes on (see `open_record`).
    Units after the checkpoint are trained again.

    Returns:
        What became of the state's parts, if the checkpoint was written under another configuration;
        else None.
    """
    trunk = run.phase.trunk
    source = out if resume or trunk is None else trunk
    header = read_header(source)
    if resume:
        check_same(out, to_dict(run.phase.recorded))
    check_same_task(source, header["data"], run.task.header())
    if resume and (rows := _read_finished_rows(out)) is not None:
        run.rows = rows
        return None
    done, state = (checkpoint.load(out) if resume else None) or (0, None)
    if state is None and trunk is not None and run.config.branch is not None:
        source, done = trunk, run.config.branch.at
        require(
            done < len(run.units), "branch.at", done, f"one of the run's {len(run.units)} units"
        )
        state = checkpoint.load_at(trunk, done) if done else None
    run.rows = read_rows(out if resume else source, header)[:done]
    if run.rows and not resume:
        # The trunk's last row has the rate of the unit that followed in the trunk. A policy reads
        # it as the rate of the unit that comes next, which the branch may have changed.
        run.rows[-1] = cast("Row", {**run.rows[-1], "next_lr": _first_rate(run)})
    if len(run.rows) < done:
        raise RecordError(f"{source} lacks epochs that its checkpoint has: was it edited?")
    if state is None:
        return None
    return _restore_as(run, state, source)


def _restore_as(run: Run, state: State, source: Path) -> Notes | None:
    """Restore a checkpoint, under this run's configuration if it was written under another."""
    before, notes = run.phase.config_before(len(run.rows)), None
    try:
        if decisive_changes(before, run.config):
            state, notes = fit_checkpoint(run, state, before)
        run.load_state_dict(state)
        if run.phase.has_changed:
            run.rows = run.replay_levels([], run.rows, all_policies=True)
    except RegimesError:
        raise
    except Exception as error:  # torch and plug-ins raise anything for a state that does not fit
        why = " ".join(str(error).split()) or type(error).__name__
        raise RecordError(
            f"the checkpoint of {source} does not fit its configuration ({why:.200}): has the "
            "code of the model or of another part changed since? Start a new run in another folder"
        ) from error
    return notes


def _make_header(run: Run) -> Header:
    config, steps, budget = run.config, len(run.batches), run.config.budget
    levels = {name: run.level_value(name) for name in config.levels}
    # classes and functions of the run that its configuration does not name
    own = [*{type(part) for part in run.model.modules()}, *getattr(run.task, "functions", ())]
    header = build_header(
        to_dict(config),
        provenance.describe_code(to_dict(config), own),
        run.world,
        run.device,
        run.layers,
        run.plug_ins.compressor,
        levels,
        processes=run.world.processes,
        union=run.gradients.union,
        data=run.task.header(),
        metric=run.task.metric,
        steps_per_epoch=steps,
        units=len(run.units),
        budget=None,
    )
    if budget is not None:
        header["budget"] = budget.epochs * steps * header["per_step"][budget.level]["floats"]
    if run.phase.trunk is not None:
        header |= cast("Header", _describe_trunk(run, run.phase.trunk))
    return header


def _first_rate(run: Run) -> float:
    """The rate of a branch's first unit, at the batch of the unit before."""
    at = run.phase.first
    multiple = run.rows[at - 1].get("batch", {}).get("multiple", 1)
    return run.learning_rate(run.units.step_span(at)[0]) * run.rate_scale(multiple)


def _describe_trunk(run: Run, trunk: Path) -> dict[str, Any]:
    """The entries that a branch's header adds, or copies from its trunk."""
    branch = run.phase.recorded.branch
    assert branch is not None
    begins = run.rows and branch.at and run.phase.first == branch.at
    next_lr = _first_rate(run) if begins else None
    table = {"trunk": trunk_table(trunk, branch.at, to_dict(run.phase.recorded), next_lr)}
    # a pulse returns to its trunk's configuration, and ends by the trunk's budget
    return table | ({"budget": read_header(trunk).get("budget")} if branch.length else {})


def save_run(run: Run, out: Path) -> None:
    """Write a checkpoint; all processes call this together."""
    keep = run.config.checkpoint_keep
    checkpoint.save_checkpoint(out, len(run.rows), run.state_dict(), run.world, keep)
