"""Four nodes on one machine: network namespaces, a limited link, and a process in each.

Each node is a network namespace of its own with one veth link to the bridge of its island, which
has a namespace too. ``tc tbf`` limits both ends of the link between the bridges. Where this link
has a delay, its two ends are tap devices and a process of its own hands each frame on when it is
due (`_delayed`), because not every kernel has ``netem``. Nothing of the machine's own network is
touched, and all of it is deleted at the end, after Ctrl-C too; what a killed benchmark has left,
the next deletes. Linux, root, iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

NODES = 4
PREFIX = "regimes-bench"  # of the namespaces: PREFIX-PID-NODE
DEADLINE = 240.0  # seconds for one command to all nodes
SUBNET = "10.83.7"
FEW = 512  # numbers of a model that are not quantised
PAUSE = 0.5  # seconds between collectives that are seldom


# -- the network -----------------------------------------------------------------------------


def sh(*words: str, check: bool = True) -> str:
    """Run a command; its output."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout


def sweep(pid: int | None = None) -> None:
    """Delete the namespaces of one benchmark process, or of all that are no longer alive."""
    for name in sh("ip", "netns", "list").split():
        if name.startswith(PREFIX) and (owner := name.split("-")[2]).isdigit():
            dead = not Path("/proc", owner).exists()
            if int(owner) == pid or (pid is None and dead):
                sh("ip", "netns", "delete", name, check=False)


@contextlib.contextmanager
def islands(delay: float = 0.0) -> Iterator[tuple[list[str], list[str]]]:
    """Names of `NODES` namespaces, each half of them joined by a bridge, and of the two namespaces
    with the bridges. The device ``trunk`` of each bridge leads to the other one, with ``delay``
    seconds in each direction."""
    sweep()
    names = [f"{PREFIX}-{os.getpid()}-{i}" for i in range(NODES)]
    hubs = [f"{PREFIX}-{os.getpid()}-hub{i}" for i in range(2)]
    try:
        for name in names:
            _add(name)
        for i, hub in enumerate(hubs):
            _bridge(hub, names[i * NODES // 2 : (i + 1) * NODES // 2], names)
        with _delayed(hubs, delay) if delay else _direct(hubs):
            for hub in hubs:
                sh("ip", "-n", hub, "link", "set", "trunk", "master", "bridge", "up")
            yield names, hubs
    finally:
        sweep(os.getpid())


@contextlib.contextmanager
def _direct(hubs: Sequence[str]) -> Iterator[None]:
    words = ["link", "add", "trunk", "type", "veth", "peer", "name", "trunk"]
    sh("ip", "-n", hubs[0], *words, "netns", hubs[1])
    yield


@contextlib.contextmanager
def _delayed(hubs: Sequence[str], delay: float) -> Iterator[None]:
    """Two tap devices, and the process between them."""
    for hub in hubs:
        sh("ip", "-n", hub, "tuntap", "add", "dev", "trunk", "mode", "tap")
    words = [sys.executable, "-m", "benchmarks.delay", str(delay), *hubs]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise SystemExit("the process that delays frames did not start")
            yield
        finally:
            process.kill()


def _add(name: str) -> None:
    sh("ip", "netns", "add", name)
    sh("ip", "-n", name, "link", "set", "lo", "up")


def _bridge(hub: str, members: Sequence[str], names: Sequence[str]) -> None:
    """A namespace with a bridge, to which some nodes are connected."""
    _add(hub)
    sh("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
    sh("ip", "-n", hub, "link", "set", "bridge", "up")
    for name in members:
        i = names.index(name)
        words = ["link", "add", "eth0", "type", "veth", "peer", "name", f"port{i}"]
        sh("ip", "-n", name, *words, "netns", hub)
        sh("ip", "-n", hub, "link", "set", f"port{i}", "master", "bridge", "up")
        sh("ip", "-n", name, "address", "add", f"{SUBNET}.{i + 1}/24", "dev", "eth0")
        sh("ip", "-n", name, "link", "set", "eth0", "up")
        route = ["route", "change", f"{SUBNET}.0/24", "dev", "eth0", "congctl", "cubic"]
        sh("ip", "-n", name, *route)


def crossed(hub: str) -> int:
    """Bytes that the kernel has sent from this namespace over its ``trunk``, headers included."""
    found = json.loads(sh("ip", "-n", hub, "-s", "-j", "link", "show", "trunk"))
    return int(found[0]["stats64"]["tx"]["bytes"])


def limit_trunk(hubs: Sequence[str], rate: float | None) -> None:
    """Set both ends of the link to a rate in Mbit/s; None = unlimited. The bucket holds 1 ms (the
    least that one core keeps up with at 1 Gbit/s), or 3 packets."""
    for hub in hubs:
        if rate is None:
            sh("tc", "-n", hub, "qdisc", "delete", "dev", "trunk", "root", check=False)
            continue
        burst = max(5000, round(rate * 125))  # bytes
        words = ["root", "tbf", "rate", f"{rate}mbit", "burst", f"{burst}", "limit", "4mb"]
        sh("tc", "-n", hub, "qdisc", "replace", "dev", "trunk", *words)


# -- the nodes -------------------------------------------------------------------------------


class Nodes:
    """One process per namespace that obeys JSON lines; killed with this object's block."""

    def __init__(self, names: Sequence[str], deadline: float = DEADLINE) -> None:
        self.port, self.deadline = 29600, deadline
        self.group = []
        for rank, name in enumerate(names):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(names)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": f"{SUBNET}.1",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            words = [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "benchmarks.nodes",
            ]
            self.group.append(
                subprocess.Popen(
                    words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.group:
            process.kill()
            process.wait()

    def ask(self, do: str, **details: Any) -> list[Any]:
        """Let all nodes do the same; their answers."""
        self.port += 1
        for process in self.group:
            print(
                json.dumps({"do": do, "port": self.port, **details}), file=process.stdin, flush=True
            )
        deadline = time.monotonic() + self.deadline
        return [self._answer(process.stdout, deadline) for process in self.group]

    def _answer(self, pipe: IO[str] | None, deadline: float) -> Any:
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        line = pipe.readline() if ready else ""
        if not line:
            raise SystemExit(f"a node did not answer within {self.deadline:.0f} s, or has died")
        return json.loads(line)


def node() -> None:
    """The life of a node: commands on stdin, answers on stdout."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the parent
    answers, sys.stdout = sys.stdout, sys.stderr
    tasks: dict[str, Callable[..., Any]] = {"race": _race, "collectives": _collectives}
    for line in sys.stdin:
        command = json.loads(line)
        os.environ["MASTER_PORT"] = str(command.pop("port"))
        print(json.dumps(tasks[command.pop("do")](**command)), file=answers, flush=True)


def _race(**details: Any) -> dict[str, Any]:
    from benchmarks.entrants import train

    return train(**details)


def _collectives(
    config: dict[str, Any], sizes: Sequence[int], times: int
) -> dict[str, list[tuple[int, float]]]:
    """Median seconds of each kind of collective at some sizes in bytes, as the cost model counts
    them. "pairs" are two means at once, of the first and third and of the second and fourth, which
    begin together; a "seldom" one comes after `PAUSE`, when TCP has forgotten the speed of the
    link; "after" is a mean with the pass of the configuration's model before it; "quantised" are
    the three of a quantised all-reduce, one after the other: an exchange, a gather of a quarter of
    its bytes, and a mean of few numbers.
    """
    import torch
    import torch.distributed as dist

    from regimes.base.config import RunConfig, from_dict
    from regimes.training.build import prepare_run

    run = prepare_run(from_dict(RunConfig, config))
    world = run.world
    x, y = next(iter(run.batches.epoch(0, world.hosted)))
    groups = [dist.new_group([i, i + NODES // 2]) for i in range(NODES // 2)]
    own = groups[world.rank % (NODES // 2)]
    islands = [dist.new_group([i, i + 1]) for i in range(0, NODES, 2)]
    island = islands[world.rank // 2]

    def after(numbers: torch.Tensor) -> None:
        run.task.loss(run.model, x[0], y[0]).backward()
        world.mean_over_workers([numbers])

    def quantised(numbers: torch.Tensor) -> None:
        world.all_to_all([numbers.view(1, NODES, -1)])
        world.all_gather([numbers[:, : numbers.numel() // NODES]])
        world.mean_over_workers([numbers[:, :FEW]])

    kinds: dict[str, Callable[[torch.Tensor], Any]] = {
        "mean": lambda x: world.mean_over_workers([x]),
        "gather": lambda x: world.all_gather([x]),
        "exchange": lambda x: world.all_to_all([x.view(1, NODES, -1)]),
        "pairs": lambda x: dist.all_reduce(x, group=own),
        "after": after,
        "quantised": quantised,
    }
    found: dict[str, list[tuple[int, float]]] = {}
    kinds["seldom"] = kinds["mean"]
    for kind, collective in kinds.items():
        for size in sizes:
            numbers, taken = torch.ones(1, size // 4), []
            often = (size <= 2**17 and kind != "seldom") or kind == "after"
            for _ in range(times if often else min(times, 9)):
                time.sleep(PAUSE if kind == "seldom" else 0.0)
                dist.barrier(island) if kind == "pairs" else None
                start = time.perf_counter()
                collective(numbers)
                taken.append(time.perf_counter() - start)
            found.setdefault(kind, []).append((size, statistics.median(taken)))
    own, groups, island, islands = None, [], None, []
    run.close()
    return found


if __name__ == "__main__":
    node()
