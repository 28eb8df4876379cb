"""A hook held wrong: one sentence soon, on every process that is concerned, and no long silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ddp_scripts import group, wrong

BOTH = "every process makes the same calls and takes the same number of steps"
# what each way says: to process 0, to process 1 ("" is nothing)
APART = {  # these leave processes in different places, so each has a group of its own
    "one rank": (
        "ConfigError: process 0 is in the first step of an epoch after 4 steps, but process 1 is "
        "in step 5 without it",
    )
    * 2,
    "one rank that talks": (
        "ConfigError: process 1 is in the end of an epoch after 4 steps, but process 0 is in step "
        "5 without it",
    )
    * 2,
    "uneven": (
        "ConfigError: process 0 is in the first step of an epoch after 4 steps, but process 1 is "
        "in step 5 without it",
    )
    * 2,
    "loaded alone": (
        "ConfigError: process 0 is in load_state_dict() after 4 steps, but process 1 is in step 5",
    )
    * 2,
    "joined": ("ConfigError: the hook works inside backward() only: uneven inputs",) * 2,
    "attached alone": ("TrainingError: process 0 has waited 2 s in attach() for process 1", ""),
}
TOGETHER = {
    "forgotten": (
        (
            "UserWarning: 5 steps, and epoch_end() was not called: all levels are as they "
            "began (dense, low)",
            "regimes: 7 steps, and epoch_end() was not called",
        ),
        (),
    ),
    "other units": (("ConfigError: process 1 has every = 3, process 0 has every = 2",),) * 2,
    "long interval": (
        (
            "regimes: policy: accordion compares every 10 units, and the run has 2",
            "regimes: policy: accordion chose 'low' for everything",
        ),
        (),
    ),
    "never changes": (("regimes: policy: accordion chose 'low' for everything",), ()),
    "silent sampler": (
        ("UserWarning: 5 steps, and set_epoch() of the sampler has named no other",),
        (),
    ),
    "epoch_end beside every": (("ConfigError: epoch_end: this hook ends its units by itself",),)
    * 2,
    "no rate": (("ConfigError: epoch_end: give the learning rate, epoch_end(lr=...), or",),) * 2,
    "every without optimiser": (("ConfigError: every = 2: the hook reads the learning rate",),) * 2,
    "every of nothing": (("ConfigError: every = 0: expected a number of steps from 1 up",),) * 2,
    "foreign optimiser": (("ConfigError: optimizer: it has none of the model's parameters",),) * 2,
    "record of no folder": (("ConfigError: record = RecordOptions(folder='',",),) * 2,
    "no levels": (("ConfigError: levels: Nameless has no default levels: say what low and high",),)
    * 2,
    "logged text": (("ConfigError: log: accuracy = 'good': expected a number",), ()),
    "in a run": (("RecordError: FOLDER/again already holds a run: load the state of its hook",),)
    * 2,
    "in a file": (("RecordError: cannot write to FOLDER/file: ",),) * 2,
    "in another job": (
        ("RecordError: FOLDER/other holds a run that differs in policy: continue it",),
    )
    * 2,
    "full disk": (("UserWarning: cannot write FOLDER/full/epochs.jsonl: ",), ()),
    "FSDP2": (
        (
            "ConfigError: attach needs a DistributedDataParallel model, got a model of "
            "fully_shard (FSDP2): it keeps a part of the parameters on each process",
        ),
    )
    * 2,
    "DataParallel": (
        (
            "ConfigError: attach needs a DistributedDataParallel model, got DataParallel"
            ": it is one process with several devices",
        ),
    )
    * 2,
    "compiled": (
        (
            "ConfigError: attach needs a DistributedDataParallel model, got a compiled "
            "DistributedDataParallel: attach before compiling",
        ),
    )
    * 2,
}


@pytest.mark.parametrize("way", APART)
def test_processes_in_different_places_hear_why(way: str) -> None:
    found = group.run(wrong.heard, 2, way)
    for result, start in zip(found, APART[way], strict=True):
        errors = [said for said in result["said"] if "Warning: " not in said]
        assert len(errors) == bool(start), result
        assert all(said.startswith(start) for said in errors), result
        assert result["seconds"] < 20
    if way == "attached alone":
        assert found[0]["said"][1].startswith("UserWarning: process 0 has waited 0 s in attach()")


def test_a_mistake_that_all_processes_share_is_reported(tmp_path: Path) -> None:
    answers = group.run(wrong.all_of, 2, list(TOGETHER), tmp_path)
    for rank, found in enumerate(answers):
        for (way, expected), result in zip(TOGETHER.items(), found, strict=True):
            said: Any = [
                text.replace(str(tmp_path), "FOLDER")
                for text in result["said"]
                if "has waited 0 s in attach()" not in text  # a slow machine, and a short patience
            ]
            starts = expected[rank]
            assert len(said) == len(starts), (way, said)
            for text, start in zip(said, starts, strict=True):
                assert text.startswith(start), (way, text)
                assert "\n" not in text
            assert result["seconds"] < 20
