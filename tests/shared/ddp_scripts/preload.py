"""What the processes of a test group have imported when they are forked; shape checks on."""

import importlib
import sys

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

# Reads the metadata of all packages once, not in each process.
sys.modules["regimes.config.entry_points"].entry_points("regimes.compressors")
