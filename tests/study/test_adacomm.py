"""AdaComm, by hand and by its formula."""

from __future__ import annotations

import pytest
from decided import levels

from analysis.plugins.adacomm import AdaComm
from regimes.base.errors import ConfigError
from regimes.policies import make_policy


def test_adacomm_by_hand() -> None:
    """16 sqrt(F / F_0), rounded up: 16, 16 sqrt(1/4) = 8, 16 sqrt(0.1) = 5.06."""
    losses: list[float | None] = [2.0, 0.5, 0.2, None]
    assert levels(AdaComm(16), [0.1] * 4, losses) == ["16", "16", "8", "6", "6"]
    # a rate that falls tenfold asks for sqrt(10) times as many: 8 sqrt(10) = 25.3
    assert levels(AdaComm(16), [0.1, 0.1, 0.01], losses)[2] == "26"
    assert levels(AdaComm(16, rates=False), [0.1, 0.1, 0.01], losses)[2] == "8"
    assert levels(AdaComm(4), [0.1] * 2, [1.0, 0.0])[-1] == "1"


@pytest.mark.parametrize("start", [[0.0], [0.0, 0.0], [0.01], [0.0, 0.05]])
def test_a_warm_up_leaves_adacomm_its_period(start: list[float]) -> None:
    """The authors' first rate is the highest: with a warm-up that of its end, whatever it starts
    at. At a loss that stays the period then stays, and a decay by 4 doubles it."""
    found = levels(AdaComm(8), [*start, 0.1, 0.1, 0.1, 0.025], [2.0])
    assert found == ["8"] * (len(start) + 3) + ["16"] * 2


@pytest.mark.parametrize("fields", [{"base": 0}, {"needs": []}])
def test_what_makes_no_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_policy({"name": "adacomm", **fields}, "sync_policy")
