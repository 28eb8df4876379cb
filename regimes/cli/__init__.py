"""The commands: each parses its words, calls the toolkit and prints. Nothing imports this room.

``train`` has the commands that train, ``read`` those that read records. ``monitor`` is `regimes
watch`, ``machine`` `regimes doctor`, ``html_report`` `regimes report`. Torch is imported when
training starts.
"""

from regimes.cli.app import app
from regimes.cli.train import ablate, presets, run, tune

from regimes.cli.branch import branch  # isort: skip (the order of the help)

from regimes.cli.harm import harm  # isort: skip (the order of the help)

from regimes.cli.plan import plan  # isort: skip (the order of the help)

from regimes.cli.read import cost, detect, doctor, figure, frame, pack, report, watch  # isort: skip (the order of the help)

__all__ = [
    "ablate",
    "app",
    "branch",
    "cost",
    "detect",
    "doctor",
    "figure",
    "frame",
    "harm",
    "pack",
    "plan",
    "presets",
    "report",
    "run",
    "tune",
    "watch",
]

app.commands = {name: globals()[name] for name in __all__ if name != "app"}
