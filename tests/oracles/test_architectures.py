"""The layers of the image networks: against torchvision, and by what defines each of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from regimes.data.sources import torchvision_datasets
from regimes.models import build, resnet
from regimes.models.googlenet import Inception
from regimes.models.resnet import SqueezeExcite, WideBlock

# -- another library ------------------------------------------------------------------------------


def torchvision():
    torchvision_datasets()  # lets the import pass beside a CPU-only torch
    import torchvision

    return torchvision


def theirs_resnet18():
    model = torchvision().models.resnet18(num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def theirs_densenet():
    model = torchvision().models.DenseNet(12, (6, 12, 24, 16), 24, 4, num_classes=10)
    model.features.conv0 = nn.Conv2d(3, 24, 3, padding=1, bias=False)
    model.features.norm0 = model.features.relu0 = model.features.pool0 = nn.Identity()
    return model


@pytest.mark.parametrize(
    ("name", "make"),
    [("resnet18-cifar10", theirs_resnet18), ("densenet-cifar10", theirs_densenet)],
)
def test_equals_torchvision_with_its_stem_replaced(name, make):
    torch.manual_seed(0)
    ours = build(name, classes=10, channels=3, image_size=32).double()
    theirs = make().double()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        other.data = mine.detach().clone()
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-10, atol=1e-10)  # training mode


def test_squeeze_and_excitation_equals_torchvision():
    ours = SqueezeExcite(48).double()
    theirs = torchvision().ops.SqueezeExcitation(48, 3).double()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        other.data = mine.detach().view(other.shape)
    x = torch.randn(4, 48, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))


# -- closed form ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "last", "expected"),
    [  # with nothing left of the residual: the shortcut, behind a ReLU if there is one
        (resnet.Block, "conv2", functional.relu),
        (resnet.SqueezeExciteBlock, "residual.3", functional.relu),
        (resnet.PreActivationBlock, "conv2", lambda x: x),
        (lambda *shape: WideBlock(*shape, dropout=0.0), "conv2", lambda x: x),
    ],
)
def test_the_shortcut_is_added(block, last, expected):
    block = block(4, 4, 1).eval()
    for parameter in block.get_submodule(last).parameters():
        nn.init.zeros_(parameter)
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(block(x), expected(x))


def test_the_weighing_of_the_two_se_variants():
    """With channel weights of zero nothing but the shortcut is left, whatever the residual."""
    for block in (resnet.SqueezeExciteBlock(4, 4, 1), resnet.PreActivationBlock(4, 4, 1)):
        nn.init.zeros_(block.weigh.excite.weight)
        nn.init.constant_(block.weigh.excite.bias, -1e4)  # sigmoid = 0
        x = torch.rand(2, 4, 6, 6)
        assert torch.equal(block(x), x)


def test_the_three_branches_of_an_inception_see_1_3_and_5_pixels():
    block = Inception(2, [1, 1, 1, 1, 1, 1]).eval()
    for parameter in block.parameters():
        nn.init.ones_(parameter)
    x = torch.ones(1, 2, 9, 9, requires_grad=True)
    for channel, seen in enumerate([1, 3, 5]):
        (gradient,) = torch.autograd.grad(block(x)[0, channel, 4, 4], x)
        rows, columns = gradient[0, 0].nonzero().unbind(1)
        assert len(rows) == seen**2
        assert (rows.min(), rows.max()) == (4 - seen // 2, 4 + seen // 2)
        assert (columns.min(), columns.max()) == (4 - seen // 2, 4 + seen // 2)
