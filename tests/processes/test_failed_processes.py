"""What is said when one of several local processes fails. Oracle: what each wrote."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regimes.errors import TrainingError
from regimes.launch import processes

LOST = "error: lost contact with process 1"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ((LOST, "error: the loss is not finite"), "the loss is not finite"),
        (("", LOST), "lost contact with process 1"),
        (("error: no disk", "error: no memory"), "no disk"),
        (("", ""), "no message"),
    ],
)
def test_the_most_telling_message_is_the_error(
    written: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    logs = [tmp_path / str(rank) for rank in range(len(written))]
    for log, text in zip(logs, written, strict=True):
        log.write_text(text)
    group: Any = [SimpleNamespace(returncode=code) for code in (3, 0)]
    error = processes._failure(group, 0, logs)
    assert (str(error), error.exit_code) == (said, 3)
    group[1].returncode = -signal.SIGKILL
    killed = processes._failure(group, 1, logs)
    assert isinstance(killed, TrainingError)
    assert "process 1 of 2 was killed by SIGKILL" in str(killed)
