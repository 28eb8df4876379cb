"""A torchx component: one run on several nodes, with restarts.

    pip install torchx
    torchx run -s local_cwd examples/cluster/torchx_regimes.py:run --preset smoke --j 1x2 --gpu 0
    torchx run -s slurm examples/cluster/torchx_regimes.py:run --preset paper-lstm --j 2x4

``--j`` is nodes x processes. ``--dryrun`` prints the job without starting it.
"""

import torchx.specs as specs
from torchx.components import dist


def run(
    preset: str,
    j: str = "1x1",
    out: str = "runs/torchx",
    settings: str = "",
    gpu: int = -1,
    cpu: int = 8,
    mem: int = 32000,
    image: str = "",
) -> specs.AppDef:
    """Train a preset of Regimes.

    Args:
        preset: as `regimes presets` lists them, or a .toml file.
        j: nodes x processes per node.
        out: folder of the record.
        settings: changes, as for --set, with ";" between them.
        gpu: of a node; -1: one for each process.
        cpu: of a node.
        mem: of a node, in MB.
        image: container with Regimes, where the scheduler wants one.
    """
    words = ["run", preset, "--out", out]
    for setting in filter(None, settings.split(";")):
        words += ["--set", setting]
    processes = int(j.rpartition("x")[2])
    return dist.ddp(
        *words,
        m="regimes",
        j=j,
        image=image,
        name=f"regimes-{preset.partition('/')[0]}",
        gpu=processes if gpu < 0 else gpu,
        cpu=cpu,
        memMB=mem,
        max_retries=3,
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
