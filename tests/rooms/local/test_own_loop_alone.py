"""``regimes.local_steps`` on a group of one process: what ends, is saved and is refused.

Oracle: the job that goes on without an end; a sentence for each wrong use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import regimes
from regimes.base.errors import ConfigError, TrainingError
from regimes.records import read_lines

pytestmark = pytest.mark.usefixtures("one_process")


def begun(saved: Any = None, **options: Any) -> tuple[nn.Module, Any, regimes.LocalSteps]:
    """A model, its optimiser and its local steps, continued from what ``left`` gave."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    local = regimes.local_steps(model, optimizer, **{"policy": 2, "summary": False, **options})
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        local.load_state_dict(saved[2])
    return model, optimizer, local


def train(model: nn.Module, optimizer: Any, local: regimes.LocalSteps, steps: int) -> None:
    for _ in range(steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(local.total))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        local.step()


@pytest.mark.parametrize(
    ("before", "units"), [(4, [4, 4, 4, 1]), (5, [4, 1, 4, 4]), (6, [4, 2, 4, 3])]
)
def test_a_closed_job_goes_on_with_a_unit_of_its_own(before: int, units: list[int]) -> None:
    """The unit that ``close`` ends may be shorter; those after it have all their steps."""
    model, optimizer, local = first = begun(every=4)
    train(*first, before)
    local.close()
    saved = model.state_dict(), optimizer.state_dict(), local.state_dict()
    again = begun(saved, every=4)
    train(*again, 13 - before)
    again[2].close()
    assert [row["steps"] for row in again[2].rows] == units
    stops = [row["unit"]["stop"] for row in again[2].rows]
    assert [row["unit"]["first"] for row in again[2].rows] == [0, *stops[:-1]]
    assert stops[-1] == 13


def test_a_parameter_of_two_optimisers_is_refused_in_a_sentence() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made = [torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ConfigError, match="several have the same parameter"):
        regimes.local_steps(net, made)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="other parameters than the model trains"):
        regimes.local_steps(net, [torch.optim.SGD(net[0].parameters(), lr=0.1)])
    with pytest.raises(ConfigError, match="an optimiser of torch, or a list of such"):
        regimes.local_steps(net, [])


@pytest.mark.parametrize(
    "value",
    [
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(30))),
        torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1),
        torch.zeros(100, 100),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_in_a_sentence_has_one_line(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^policy = .*: expected") as caught:
        regimes.local_steps(nn.Linear(4, 4), None, policy=value)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("given", [{"seed": "x"}, {"seed": None}, {"timeout": -1}])
def test_local_steps_refuse_in_a_sentence(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()  # `test_ddp_arguments` has other values
    with pytest.raises(ConfigError, match=f"^{name} = {value!r}: expected a"):
        begun(**given)


def test_an_optimizer_of_frozen_parameters_is_told_of_those_that_train() -> None:
    model = nn.Linear(5, 3)
    model.bias.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"optimizer: .* build it from \[p for p in .*requires_g"):
        regimes.local_steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trained = [p for p in model.parameters() if p.requires_grad]
    regimes.local_steps(
        model, torch.optim.SGD(trained, lr=0.1), record=regimes.RecordOptions(summary=False)
    )
    optimizer = torch.optim.SGD(trained, lr=0.1)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter to train: there is nothing to synchronise"):
        regimes.local_steps(model, optimizer)


def saved_within_a_round() -> tuple[Any, Any, Any]:
    model, optimizer, local = first = begun(outer={"fragments": 2}, every=4)
    train(*first, 5)
    return model.state_dict(), optimizer.state_dict(), local.state_dict()


def test_a_state_of_another_job_is_one_sentence() -> None:
    model, optimizer, state = saved_within_a_round()
    for given, words in (
        ({}, "saved with outer.fragments 2, this job has 1"),
        ({"outer": {"fragments": 3}}, "saved with outer.fragments 2, this job has 3"),
        (
            {"outer": {"fragments": 2}, "compressor": "topk", "level": 50},
            r"saved with compressor Dense\(.*\), this job has TopK\(",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            begun((model, optimizer, state), **given)
    fewer = state | {"buffers": state["buffers"][:-1]}
    with pytest.raises(ConfigError, match="saved with buffers"):
        begun((model, optimizer, fewer), outer={"fragments": 2})
    released = {key: value for key, value in state.items() if key != "compressor"}
    begun((model, optimizer, released), outer={"fragments": 2})  # up to 0.4


@pytest.mark.parametrize("key", ["round", "rows", "outer"])
@pytest.mark.parametrize("value", ["x", 7, {"a": 1}], ids=str)
def test_a_damaged_state_is_one_sentence(key: str, value: Any) -> None:
    model, optimizer, state = saved_within_a_round()
    if key == "outer":
        value = state["outer"] | {"fragments": [value] * 2}
    with pytest.raises(ConfigError, match="cannot load the hook's state: it is damaged"):
        begun((model, optimizer, state | {key: value}), outer={"fragments": 2})


def test_a_close_that_fails_ends_the_record_and_says_why(tmp_path: Path) -> None:
    """So that the folder is free for another try in the same notebook."""
    model, _, local = first = begun(record=tmp_path, every=2)
    train(*first, 3)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(TrainingError, match="not finite after step 4"):
        local.step()
    with pytest.raises(TrainingError, match="not finite after step 4"):
        local.close()
    last = read_lines(tmp_path / "events.jsonl")[-1]
    assert last["event"] == "stopped"
    assert last["why"].startswith("TrainingError a parameter of process 0 is not finite")
    second = begun(record=tmp_path, every=2)
    with pytest.warns(UserWarning, match="a job that did not end"):
        train(*second, 2)
    second[2].close()
    assert regimes.load(tmp_path).finished
