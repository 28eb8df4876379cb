"""Branches of a run: continue it from a unit's checkpoint under another configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regimes.base.config import BranchConfig
from regimes.base.config.arguments import check_arguments
from regimes.base.errors import ConfigError
from regimes.data.objects import Loss, LossWeight, Metric, own_task
from regimes.job.given import GivenModel, HasSamples
from regimes.job.reporters import Reporter
from regimes.records import OWN, Record
from regimes.records.files import record_folder
from regimes.training.loop import run
from regimes.training.phases import branch_config
from regimes.training.simulate import _name_of


@check_arguments("model", "loss", "metric")
def branch(
    record: Record | str | Path,
    *,
    at: int,
    out: str | Path,
    length: int | None = None,
    skip: bool = False,
    set: Mapping[str, Any] | Sequence[str] = (),
    reporters: Sequence[Reporter] | None = None,
    model: GivenModel | None = None,
    train_data: HasSamples | None = None,
    test_data: HasSamples | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    loss_weight: LossWeight | None = None,
) -> Record:
    """Continues a run from the start of a unit under another configuration, in a folder of its own.

    The trunk needs the checkpoint before this unit (``checkpoint_keep``); unit 0 needs none. What
    becomes of the state is in `training.changes`. The same call goes on after a stop. If nothing is
    changed, the branch ends with the trunk's bits.

    >>> from regimes import get_preset, override, run
    >>> short = ["epochs=2", "data.train_size=100", "optimizer.decay_epochs=[]"]
    >>> config = override(get_preset("smoke/low"), [*short, "checkpoint_keep=[1]"])
    >>> trunk = run(config, "runs/trunk")
    >>> pulse = branch(trunk, at=1, length=1, set={"policy.level": "high"}, out="runs/pulse")
    >>> [row["layers"]["level"][0] for row in pulse.rows]
    ['low', 'high']

    Args:
        record: The trunk, or its folder.
        at: The first unit of the branch.
        out: The folder of the branch, which holds its own rows and the path to the trunk.
        length: The number of units after which the trunk's configuration returns (a pulse). None:
            never.
        skip: Leave these units out, in place of changing something (deletion): the trunk goes on
            after them with the state from before them, at the rates and with the data of its place,
            as if the run had never had them. It needs a length. Their rows have no steps.
        set: What is changed: ``{"policy.level": "high"}``, or ``["policy.level=high"]``.
        reporters: As in `run`.
        model, train_data, test_data, loss, metric, loss_weight: For a run of `simulate`, what was
            passed there. Data and first weights are compared by digests, the model by its ``repr``,
            loss and metric by their names.

    Returns:
        The record of the branch, with the trunk's rows before its own.

    Raises:
        ConfigError: a branch cannot change one of the fields; or as in `run`.
        DataError: the data are none.
        RecordError: there is no such run or checkpoint, ``out`` holds another run, or the trunk has
            had another model or other data.
    """
    out = record_folder(out)
    folder = record.folder if isinstance(record, Record) else Path(record)
    config = branch_config(folder, BranchConfig(at=at, length=length, skip=skip or None), set, out)
    task = None
    if config.data.name == OWN:
        if model is None or train_data is None or test_data is None:
            raise ConfigError(
                f"{folder} was trained by regimes.simulate: pass model, train_data and test_data "
                "as you did there"
            )
        _name_of(model)
        task = own_task(model, train_data, test_data, loss, metric, loss_weight)
    elif any(x is not None for x in (model, train_data, test_data, loss, metric, loss_weight)):
        raise ConfigError(
            f"{folder} was trained on {config.data.name}: model and data are those that its "
            "configuration names"
        )
    resume = (out / "run.json").exists()
    return run(config, out, resume=resume, reporters=reporters, task=task)
