"""What is said when one of several local processes fails. Oracle: what each wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regimes.base.errors import TrainingError
from regimes.search import processes

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


def test_what_cannot_be_decoded_hides_no_message(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    log.write_bytes(b"error: \xff is no letter\n")
    group: Any = [SimpleNamespace(returncode=3)]
    assert str(processes._failure(group, 0, [log])).endswith(" is no letter")


UNDER_C = """
import sys
import regimes
from pathlib import Path
from regimes.base.config import load_toml
from regimes.search import processes

def start(command, rank, count, scratch, log):
    print(ascii(load_toml(command[4]).name))
    raise SystemExit

processes._start = start
processes.spawn_processes(regimes.RunConfig(name="\\xe9", workers=2), Path("out"), 2)
"""


def test_a_name_is_no_matter_of_the_locale(tmp_path: Path) -> None:
    """The processes read the configuration as UTF-8, as TOML is."""
    plain = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    words = [sys.executable, "-c", UNDER_C]
    done = subprocess.run(words, env=plain, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("'\\xe9'\n", "")
