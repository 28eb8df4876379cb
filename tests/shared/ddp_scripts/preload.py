"""What the processes of a test group have imported when they are forked; shape checks on."""

import gc
import importlib
import sys

import shapes

shapes.install()
for name in (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "sklearn.datasets",
    "pandas",
    "pytest",  # by works that stand in the module of a test
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "regimes.training.loop",
    "regimes.data.classification",
    "regimes.data.language",
    "regimes.hook.local.starting",
    "regimes.compression.powersgd",
    "regimes.compression.sparse",
    "regimes.instruments.curvature",
    "forked",
    "ddp_scripts.jobs",
    "ddp_scripts.hsdp",
):
    importlib.import_module(name)

# Once, not in each process: the commit, and the digest of all source files.
read_once = importlib.import_module("read_once")
read_once.install()
sys.modules["regimes.records.provenance"].find_commit()
sys.modules["regimes.records.provenance"].code_digest()

# A collection would write to each object that is shared with the server, and so copy its page.
gc.collect()
gc.freeze()
