"""What the processes of a test group have imported when they are forked; shape checks on."""

import importlib

import shapes

shapes.install()
for name in (
    "torch._dynamo",
    "sklearn.datasets",
    "pandas",
    "regimes.training.loop",
    "ddp_scripts.jobs",
):
    importlib.import_module(name)
