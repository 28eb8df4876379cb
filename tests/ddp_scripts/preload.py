"""What the processes of a test group have imported when they are forked; shape checks on."""

import importlib

from jaxtyping import install_import_hook

install_import_hook("regimes", "shapes.check")
for name in (
    "torch._dynamo",
    "sklearn.datasets",
    "pandas",
    "regimes.training.loop",
    "ddp_scripts.jobs",
):
    importlib.import_module(name)
