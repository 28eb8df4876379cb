"""A signal that was not recorded: the error names the option that records it. Oracle: a run with
that option has it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from configs import smoke_constant_rate as config

import regimes
from analysis.paper import figure3
from regimes.base.errors import ConfigError, RecordError
from regimes.instruments import make_instruments
from regimes.policies.detectors.statistics import FIELDS, INSTRUMENT, measuring_options

SHORT = ["epochs=2", "data.train_size=80", "data.test_size=20"]


def words(text: str) -> list[str]:
    return [word for word in shlex.split(text) if word != "--set"]


def test_figure_3_names_the_option_that_it_needs(tmp_path: Path) -> None:
    run = regimes.run(config(*SHORT), tmp_path / "without")
    with pytest.raises(RecordError) as error:
        figure3.signals([run])
    said = str(error.value)
    assert "recorded no 'eigenvalue' and no 'eigenvalue:batch'" in said
    option = said.partition("train it with ")[2].partition(", or")[0]
    small = ["instruments.curvature.images=8", "instruments.curvature.batch=4"]
    run = regimes.run(config(*SHORT, *words(option), *small), tmp_path / "with")
    assert len(figure3.signals([run])) == 2


@pytest.mark.parametrize("name", [*INSTRUMENT, *FIELDS, "norm:worker0", "norm*lr"])
def test_the_option_is_one_that_a_configuration_takes(name: str) -> None:
    found = make_instruments(config(*words(measuring_options(name))).instruments)
    assert len(found) == 1


def test_a_policy_without_its_statistic_is_told_the_option(tmp_path: Path) -> None:
    rule = "{name='change', per_layer=false, statistic='eigenvalue:batch'}"
    table = f"policy={{name='detected', detector={rule}}}"
    small = "instruments.curvature={images=8, batch=4}"
    with pytest.raises(ConfigError, match=r"modes=\[\"batch-statistics\"\]"):
        regimes.run(config(*SHORT, table, small), tmp_path)


@pytest.mark.parametrize("name", ["torch.optim:SparseAdam", "torch.optim:LBFGS"])
def test_an_optimizer_that_cannot_step_so_is_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the optimizer '{name}' cannot be (used|built): "):
        regimes.run(config(*SHORT, f"optimizer.name={name}"), tmp_path)
    assert not (tmp_path / "run.json").exists()
