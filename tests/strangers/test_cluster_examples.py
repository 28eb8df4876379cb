"""The examples for clusters, which cannot be run here: each is parsed, as what it is.

Oracles: bash's own parser, torchrun's, the command line of Regimes, and where they are installed
those of the launchers.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import os
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from regimes import cli
from regimes.presets import get_preset

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
SHELL = {path.name: path.read_text() for path in sorted(CLUSTER.glob("*.sh"))}
SKY = yaml.safe_load((CLUSTER / "sky.yaml").read_text())
SCRIPTS = {**SHELL, "sky setup": SKY["setup"], "sky run": SKY["run"]}
SBATCH = {  # options of sbatch that these files use, and what their values are
    "job-name": r"[\w-]+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-task": r"\d+",
    "gpus-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "time": r"\d\d:\d\d:\d\d",
    "requeue": "",
    "open-mode": "append|truncate",
    "output": r"[\w%-]+\.out",
}
APPENDS = {
    "MOUNT_CACHED"
}  # SkyPilot: MOUNT writes whole files, COPY nothing; a record is appended to
SKY_KEYS = {"name", "workdir", "num_nodes", "resources", "file_mounts", "envs", "setup", "run"}
VARIABLES = {  # what a launcher, or the file itself, sets
    "SLURM_CPUS_PER_TASK": "8",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "a[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "1.2.3.4",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_NUM_GPUS_PER_NODE": "4",
    **SKY["envs"],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_parses_them(name: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=SCRIPTS[name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SHELL)
def test_the_options_of_a_batch_script_are_sbatchs(name: str) -> None:
    lines = SHELL[name].splitlines()
    assert lines[0] == "#!/bin/bash"
    options = [line for line in lines if line.startswith("#SBATCH")]
    last = max(lines.index(line) for line in options)
    assert all(line.startswith("#") for line in lines[: last + 1])  # sbatch stops at a command
    for line in options:
        option, _, value = line.removeprefix("#SBATCH --").partition("=")
        assert re.fullmatch(SBATCH[option], value), line


def started(script: str, tmp_path: Path) -> list[list[str]]:
    """What a script would start: run by bash, with stand-ins that say how they were called."""
    for name in ("srun", "torchrun", "python", "scontrol", "pip"):
        stand_in = tmp_path / "bin" / name
        stand_in.parent.mkdir(exist_ok=True)
        said = "echo a1" if name == "scontrol" else f'printf "%s\\n" "{name} $*" >> {tmp_path}/said'
        stand_in.write_text(f"#!/bin/bash\n{said}\n")
        stand_in.chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text("")
    env = {**VARIABLES, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-eu", "-c", script],
        cwd=tmp_path,
        env=env,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in (tmp_path / "said").read_text().splitlines()]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "sky setup"])
def test_what_they_start_is_a_command(name: str, tmp_path: Path) -> None:
    """torchrun's parser takes its part, the command line of Regimes the rest; the processes divide
    the workers among them."""
    (words,) = started(SCRIPTS[name], tmp_path)
    tasks = re.search(r"--nodes=(\d+)\n#SBATCH --ntasks-per-node=(\d+)", SCRIPTS[name])
    processes = math.prod(map(int, tasks.groups())) if tasks else 0
    words = words[1:] if words[0] == "srun" else words
    if words[0] == "torchrun":
        parsed = get_args_parser().parse_args(words[1:])
        assert parsed.nnodes == "2"
        processes = 2 * int(parsed.nproc_per_node)
        words = [
            "python",
            *(["-m"] if parsed.module else []),
            parsed.training_script,
            *parsed.training_script_args,
        ]
    if words[:3] != ["python", "-m", "regimes"]:
        assert (ROOT / words[1]).is_file(), words
        return
    verb, preset, *options = words[3:]
    assert verb == "run"
    table = dict(pairwise(options))
    workers = int(table.get("--workers", get_preset(preset).workers))
    assert processes > 1
    assert workers % processes == 0
    known = {f"--{name}" for name in inspect.signature(cli.run).parameters}
    assert {word for word in options if word.startswith("--")} <= known
    assert ("--resume" in options) == (name == "slurm.sh")  # it was queued again; no record there


def test_the_file_for_skypilot_has_what_it_knows() -> None:
    assert set(SKY) <= SKY_KEYS
    assert isinstance(SKY["num_nodes"], int)
    assert set(SKY["resources"]) <= {"accelerators", "use_spot", "cloud", "cpus", "memory"}
    mounted = SKY["file_mounts"]
    assert {mount["mode"] for mount in mounted.values()} <= APPENDS
    assert all(re.search(rf"--out \"{folder}/", SKY["run"]) for folder in mounted)
    get_preset(SKY["envs"]["PRESET"])


def test_the_component_for_torchx_parses() -> None:
    """torchx itself reads a component so: an annotated function whose docstring has its words."""
    body = ast.parse((CLUSTER / "torchx_regimes.py").read_text()).body
    (function,) = [node for node in body if isinstance(node, ast.FunctionDef)]
    imported = {node.module for node in body if isinstance(node, ast.ImportFrom)}
    assert "__future__" not in imported  # it reads the annotations, which that makes texts
    assert all(a.annotation is not None for a in function.args.args)
    words = ast.get_docstring(function) or ""
    assert re.findall(r"^    (\w+):", words, re.M) == [a.arg for a in function.args.args]
    assert ast.unparse(function.returns or ast.Constant(None)) == "specs.AppDef"


@pytest.mark.integrations
def test_torchx_makes_a_job_of_it() -> None:
    builders = pytest.importorskip("torchx.specs.builders", reason="make integrations")
    file = CLUSTER / "torchx_regimes.py"
    spec = importlib.util.spec_from_file_location("torchx_regimes", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    words = ["--preset", "smoke", "--j", "2x4", "--settings", "epochs=3;seed=1"]
    (role,) = builders.materialize_appdef(module.run, words).roles
    assert (role.num_replicas, role.resource.gpu) == (2, 4)
    text = " ".join(role.args)
    assert "-m regimes run smoke --out runs/torchx --set epochs=3 --set seed=1" in text
    assert "--nnodes 2" in text
