"""What pulses change (oracle: the fields that a branch of the trainer has), and the command."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from configs import smoke
from PIL import Image

import regimes
from regimes.base.errors import ConfigError
from regimes.presets import get_grid
from regimes.records import load_all
from regimes.search.harms.evidence import Pulse
from regimes.search.harms.kinds import apply_pulse, kinds_of, trunk_config

LOW = {"name": "static", "level": "low"}
CHANGES: dict[str, dict[str, Any]] = {
    "high": {"policy": {"name": "static", "level": "high"}},
    "dense": {"policy": {"name": "static", "level": "dense"}},
    "no-feedback": {"compressor": {"name": "powersgd", "error_feedback": False}},
    "period=8": {
        "sync_levels": {"low": 1, "high": 8},
        "sync_policy": {"name": "static", "level": "high"},
    },
    "batch=4": {
        "batch_levels": {"low": 8, "high": 32},
        "batch_policy": {"name": "static", "level": "high"},
    },
    "precision": {"precision": "bfloat16"},
    "deletion": {},
    "optimizer.clip=0.5": {},
}


@pytest.mark.parametrize("word", CHANGES)
def test_a_pulse_changes_these_fields(word: str) -> None:
    trunk = trunk_config(smoke("dtype=float32"))
    ((name, kind),) = kinds_of([word], [], trunk).items()
    pulse = apply_pulse(trunk, kind, [(1, 2)])
    for field, value in CHANGES[word].items():
        assert getattr(pulse, field) == value
    assert (pulse == trunk) == (word == "deletion") == kind.skip
    assert pulse.optimizer.clip == (0.5 if word == "optimizer.clip=0.5" else None)
    assert "/" not in name


def test_several_spans_are_a_policy_of_windows() -> None:
    trunk = trunk_config(smoke())
    kind = kinds_of(["high"], ["features.0.*"], trunk)["high in features.0.*"]
    rule = apply_pulse(trunk, kind, [(0, 1), (2, 3)]).policy
    assert rule["name"] == "by-layer"
    assert rule["groups"] == {
        "features.0.*": {
            "name": "windows",
            "windows": [[0, 1], [2, 3]],
            "inside": "high",
            "outside": "low",
        }
    }
    assert rule["otherwise"] == LOW


def test_the_trunk_has_one_level() -> None:
    assert trunk_config(smoke()).policy == LOW  # ACCORDION decides there
    high = trunk_config(smoke("policy=static", "policy.level=high"))
    assert high.policy["level"] == "high"
    assert kinds_of(["low"], [], high)["low"].text == "rank 4"
    with pytest.raises(ConfigError, match=r"policy.level = 'low': expected one of mine, dense"):
        trunk_config(
            smoke("levels={mine=2}", "policy={name='static', level='mine'}", "policy=accordion")
        )


@pytest.mark.slow
def test_the_command_writes_a_figure_and_a_ladder(
    command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    words = ["--runs", "9", "--parts", "2", "--margin", "1000", "--set", "data.train_size=100"]
    short = [
        "--set",
        "data.test_size=50",
        "--set",
        "epochs=4",
        "--set",
        "optimizer.decay_epochs=[3]",
    ]
    done = command("harm", "smoke", *words, *short)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("trunk/seed-0: accuracy % ")
    assert sum(line.startswith("high, 2 units from") for line in lines) == 6
    assert lines[9].startswith("epochs 0-1  safe        harm < 1000.0 points (95 %): ")
    assert "rank 1 in epochs 0-1 saves " in lines[11]
    folder = tmp_path / "runs/harm/smoke"
    assert lines[12:] == ["runs/harm/smoke/harm.png", "runs/harm/smoke/harm.toml"]
    with Image.open(folder / "harm.png") as picture:
        assert 3.2 < picture.width / picture.info["dpi"][0] < 3.6  # inches: one column
    assert get_grid(str(folder / "harm.toml"))["rate ladder"].policy["levels"] == ["high", "low"]
    again = command("harm", "smoke", *words, *short, "--quiet")
    assert again.stdout.splitlines() == lines[9:]
    assert len(load_all(folder)) == 9


@pytest.mark.slow
def test_pulses_side_by_side_share_their_trunks(tmp_path: Path) -> None:
    """No pulse changes the trunk: what is left out sends nothing, a level sends less."""
    config = smoke("optimizer.decay_epochs=[]")
    found = regimes.harm(
        config, pulse=["high", "deletion"], runs=18, parts=2, margin=1e3, out=tmp_path
    )
    assert sum(pulse is None for pulse, _ in found.known.harms) == 3
    high, deleted = (found.saved[Pulse(arm, ((0, 2),))] for arm in ("high", "deletion"))
    assert 0 < high < deleted == pytest.approx(0.5)
    text = str(found)
    assert text.index("rank 1:") < text.index("leaving units out:")
