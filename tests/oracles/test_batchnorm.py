"""BatchNorm as each worker has it, against torch's own on each worker's samples; the memory format
of activations is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regimes.collectives.world import World
from regimes.data import models
from regimes.data.classification import classification_loss
from regimes.training.batchnorm import PerWorkerBatchNorm
from regimes.training.gradients import Gradients

LAST = torch.channels_last


def sample(groups: int, last: bool, size: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3 * groups, 6, size, size, generator=generator, dtype=torch.float64)
    return x.to(memory_format=LAST if last else torch.contiguous_format)


class Centred(nn.BatchNorm2d):
    """A user's own kind, which takes no variance."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean((0, 2, 3), keepdim=True)


def test_a_kind_of_the_users_own_computes_what_its_forward_says() -> None:
    ours, x = Centred(6).double().train(), sample(1, last=False)
    norms = PerWorkerBatchNorm(ours)
    with norms.set_pass(1, update=True):
        assert torch.equal(ours(x), Centred.forward(ours, x))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_each_worker_has_a_batchnorm_of_its_own(
    momentum: float | None, groups: int, last: bool
) -> None:
    ours = nn.BatchNorm2d(6, momentum=momentum).double().train()
    nn.init.uniform_(ours.weight), nn.init.uniform_(ours.bias)
    theirs = [copy.deepcopy(ours) for _ in range(groups)]
    norms, x = PerWorkerBatchNorm(ours), sample(groups, last).requires_grad_()
    with norms.set_pass(groups, update=True):
        y = ours(x)
    weights = sample(groups, not last)
    (y * weights).sum().backward()
    mine, ours.weight.grad, ours.bias.grad = ours.weight.grad, None, None
    assert mine is not None
    total = torch.zeros_like(mine)
    for worker, bn in enumerate(theirs):
        own = x.detach()[worker::groups].contiguous().requires_grad_()
        expected = bn(own)
        (expected * weights[worker::groups]).sum().backward()
        torch.testing.assert_close(y[worker::groups], expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(x.grad[worker::groups], own.grad, rtol=1e-9, atol=1e-12)
        total += bn.weight.grad
    torch.testing.assert_close(mine, total, rtol=1e-10, atol=1e-12)
    for name, statistic in theirs[0].named_buffers():  # the running ones follow worker 0
        torch.testing.assert_close(ours.get_buffer(name), statistic, rtol=1e-12, atol=0)
    for tensor in (y, x.grad):
        assert tensor.is_contiguous(memory_format=LAST if last else torch.contiguous_format)
    before = copy.deepcopy(ours.state_dict())  # outside of a pass there is one batch
    whole = torch.nn.functional.batch_norm(x, None, None, ours.weight, ours.bias, True)
    torch.testing.assert_close(ours(x), whole, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(before[name], value) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("shape", [(8, 6), (8, 6, 5), (8, 6, 1, 1), (8, 6, 2, 3, 4)], ids=str)
def test_other_shapes(shape: tuple[int, ...]) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    bn, x = kind(6).double().train(), torch.randn(shape, dtype=torch.float64)
    expected = torch.stack([copy.deepcopy(bn)(x[worker::4]) for worker in range(4)], 1)
    with PerWorkerBatchNorm(bn).set_pass(4, update=True):
        found = bn(x)
    torch.testing.assert_close(found, expected.flatten(0, 1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["resnet8", "vgg7"])
def test_activations_and_their_gradients_stay_channels_last(name: str) -> None:
    blank: dict[str, Any] = dict.fromkeys(["depth", "dropout", "heads", "tied"])
    torch.manual_seed(0)
    model = models.build_model(name=name, width=8, **blank, classes=5, channels=3, image_size=16)
    gradients = Gradients(model, classification_loss, World(4), union=True, seed=0)
    formats: list[bool] = []

    def look(module: nn.Module, inputs: tuple[Tensor]) -> None:
        formats.append(inputs[0].is_contiguous(memory_format=LAST))
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda g: formats.append(g.is_contiguous(memory_format=LAST)))

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            module.register_forward_pre_hook(look)
    x = torch.randn(32, 3, 16, 16).to(memory_format=LAST).unflatten(0, (8, 4)).transpose(0, 1)
    gradients.compute_gradients(x, torch.randint(5, (4, 8)), 0, 0)
    assert len(formats) > 20
    assert all(formats)


class Checkpointed(nn.Module):
    """A network whose middle is computed again in backward; ``reentrant`` None: it is not."""

    def __init__(self, momentum: float | None, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant, self.first, self.last = reentrant, nn.Linear(5, 6), nn.Linear(6, 2)
        norms = nn.BatchNorm1d(6, momentum=momentum), nn.BatchNorm1d(6, momentum=momentum)
        self.middle = nn.Sequential(norms[0], nn.Tanh(), nn.Linear(6, 6), norms[1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.reentrant is None:
            return self.last(self.middle(x))
        return self.last(checkpoint(self.middle, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("union", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_pass_that_is_repeated_in_backward_is_the_same_and_updates_nothing(
    momentum: float | None, union: bool, reentrant: bool
) -> None:
    found = []
    x = torch.randn(4, 3, 5, dtype=torch.float64).transpose(0, 1)
    y = torch.randint(2, (4, 3)).transpose(0, 1)
    for how in (None, reentrant):
        torch.manual_seed(0)
        model = Checkpointed(momentum, how).double()
        gradients = Gradients(model, classification_loss, World(3), union=union, seed=0)
        for step in range(2):
            gradients.compute_gradients(x, y, 0, step)
        found.append([gradients.stack, *model.buffers()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)
