"""What ours is compared with: a plain loop and torch's own hooks, on one batch that stays on the
device, without data, augmentation, instruments or record: the least that a step can take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.place import Place, numerics
from benchmarks.gpu.sizes import UNITS, size, text_size
from benchmarks.gpu.timing import Timer
from regimes.data.models import build_model


class Task(NamedTuple):
    """What a plain loop trains: ``steps`` in a unit."""

    network: nn.Module
    x: Tensor
    y: Tensor
    optimizer: Callable[..., torch.optim.Optimizer]
    steps: int


def images(place: Place) -> Task:
    """ResNet-18, channels-last."""
    s = size(place)
    net = build_model(s.model, classes=10, channels=3, image_size=s.side, width=s.width)
    net = net.to(place.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(s.shape).to(place.device, memory_format=torch.channels_last)
    y = torch.randint(0, 10, (len(x),)).to(place.device)
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    return Task(net, x, y, sgd, s.steps)


def texts(place: Place) -> Task:
    """GPT-2."""
    s = text_size(place)
    x, y = (t.to(place.device) for t in s.tokens(4 * s.batch))
    adamw = partial(torch.optim.AdamW, lr=1e-4)
    return Task(s.network().to(place.device), x, y, adamw, s.steps)


def loop(
    place: Place,
    precision: str,
    wrap: Callable[[nn.Module], nn.Module],
    make: Callable[[Place], Task] = images,
) -> dict[str, Any]:
    """A plain training loop."""
    torch.manual_seed(0)
    if place.gpu:
        torch.cuda.reset_peak_memory_stats()
    task, timer = make(place), Timer(place)
    model = wrap(task.network.train())
    optimizer = task.optimizer(model.parameters(), fused=place.gpu)
    for done in range(UNITS * task.steps):
        optimizer.zero_grad()
        with torch.autocast(place.device, torch.bfloat16, enabled=precision == "bfloat16"):
            out: Tensor = model(task.x)
        F.cross_entropy(out.float().flatten(0, -2), task.y.flatten()).backward()
        optimizer.step()
        timer.step(done % task.steps + 1, task.steps)
    return timer.row()


def ddp(hook: str = "none", rank: int = 2) -> Callable[[nn.Module], nn.Module]:
    """torch's DDP in a group of one process, without or with one of its hooks."""

    def wrap(net: nn.Module) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
        if hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif hook == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return model

    return wrap


def compiled(net: nn.Module) -> Any:
    torch._dynamo.reset()  # in one process torch falls back to eager after eight networks
    return torch.compile(net)


PEERS: dict[str, Callable[[nn.Module], Any]] = {
    "plain loop": lambda net: net,
    "DDP": ddp(),
    "DDP, torch's fp16": ddp("fp16"),
    "DDP, torch's PowerSGD 2": ddp("powersgd", 2),
    "DDP, torch's PowerSGD 4": ddp("powersgd", 4),
    "plain loop, compiled": compiled,
}

_used: list[Any] = []  # process groups, so that each lives as long as the process


def peer(
    place: Place, name: str, precision: str, make: Callable[[Place], Task] = images
) -> dict[str, Any]:
    """One of them; DDP needs a process group, of one."""
    import torch.distributed as dist

    with numerics(place.device, precision):
        if not name.startswith("DDP"):
            return loop(place, precision, PEERS[name], make)
        store = dist.HashStore()
        dist.init_process_group("nccl" if place.gpu else "gloo", store=store, rank=0, world_size=1)
        # The futures of torch's PowerSGD hold the group, and gloo's thread drops them late. If that
        # were the last reference, the thread would join itself, and the process abort.
        _used.append(dist.group.WORLD)
        try:
            return loop(place, precision, PEERS[name], make)
        finally:
            dist.destroy_process_group()
