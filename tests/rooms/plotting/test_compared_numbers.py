"""How `regimes.compare` writes differences (oracle: t intervals by hand, and pandas' text)."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st

import regimes
from regimes.base.statistics import t_interval
from regimes.records import Record, load

accuracies = st.floats(0.0, 1.0).map(lambda x: round(x * 10_000) / 10_000)  # of 10,000 samples


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return load(synthetic.make(tmp_path_factory.mktemp("runs"), "low", 0))


def runs_of(run: Record, values: dict[str, list[float]], scale: float) -> list[Record]:
    made = []
    for name, reached in values.items():
        for seed, value in enumerate(reached):
            config = run.config | {"name": name, "seed": seed}
            rows = [row | {"metric": scale * value} for row in run.rows]
            header = run.header | {"config": config}
            if scale != 1:
                header["metric"] = "own error"
            made.append(replace(run, header=header, rows=rows))
    return made


@settings(deadline=None, max_examples=60)
@given(
    a=st.lists(accuracies, min_size=4, max_size=4),
    shifts=st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.1, -0.02]), min_size=4, max_size=4),
    n=st.sampled_from([1, 2, 4]),
    scale=st.sampled_from([1.0, 1e-6, 250.0]),
)
def test_differences_have_the_digits_that_say_something(
    run: Record, a: list[float], shifts: list[float], n: int, scale: float
) -> None:
    b = [x + 0.3 - 0.3 + shift for x, shift in zip(a, shifts, strict=True)]  # equal but for noise
    table = regimes.compare(runs_of(run, {"a": a[:n], "b": b[:n]}, scale))
    factor = 100.0 if scale == 1 else scale
    mean, low, high = t_interval([factor * (x - y) for x, y in zip(a[:n], b[:n], strict=True)])
    row = table.iloc[0]
    assert row["unit"] == ("points" if scale == 1 else "own error")
    most = factor * max(*a[:n], *b[:n])
    slack = 1e-6 * most if math.isnan(low) else 0.0005 * (high - low) / 2 + 1e-12 * most
    assert row["difference"] == pytest.approx(mean, abs=slack)
    if not math.isnan(low):
        assert (row["ci_low"], row["ci_high"]) == pytest.approx((low, high), abs=2 * slack)
    if scale != 1e-6:
        assert not re.search(r"e[-+]\d\d", table.to_string()), table.to_string()
    assert "-0.0 " not in f"{row['difference']} "
    if not any(shifts[:n]):
        assert row["difference"] == 0
