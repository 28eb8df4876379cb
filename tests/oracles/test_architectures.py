"""The layers of the image networks: against torchvision, and by what defines each of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from regimes.data.models import build_model, resnet
from regimes.data.models.googlenet import Inception
from regimes.data.models.lstm import LSTM
from regimes.data.models.resnet import Shortcut, SqueezeExcite, WideBlock
from regimes.data.sources import torchvision_datasets

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
    ours = build_model(name, classes=10, channels=3, image_size=32).double()
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
        (resnet.ResidualBlock, "conv2", functional.relu),
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


@pytest.mark.parametrize("channels", [4, 7, 8])
def test_a_narrow_shortcut_is_a_convolution_with_a_stride(channels: int) -> None:
    """In channels-last memory, where oneDNN is wrong below 8 channels on some processors."""
    torch.manual_seed(0)
    ours = Shortcut(channels, 8, 1, 2)
    x = torch.randn(20, channels, 9, 9).to(memory_format=torch.channels_last).requires_grad_()
    ours(x).square().sum().backward()
    with torch.no_grad():
        rows = x[:, :, ::2, ::2].permute(0, 2, 3, 1).reshape(-1, channels).double()
        weight = ours.weight.flatten(1).double()
        out = rows @ weight.T + ours.bias.double()
    assert torch.allclose(ours.weight.grad.flatten(1).double(), 2 * out.T @ rows, rtol=1e-4)
    expected = torch.zeros_like(x)
    images = (2 * out @ weight).float().view(20, 5, 5, channels)
    expected[:, :, ::2, ::2] = images.permute(0, 3, 1, 2)
    assert torch.allclose(x.grad, expected, atol=1e-5)


@pytest.mark.parametrize("way", ["parameters", "autocast"])
def test_an_lstm_in_bfloat16_on_a_cpu(way: str) -> None:
    """Against float32, within a few roundings to 8 bits; also where oneDNN has none in bfloat16."""
    torch.manual_seed(0)
    model = LSTM(classes=50, width=16, depth=2, dropout=0.0)
    words = torch.randint(0, 50, (3, 7))
    expected, _ = model(words, None)
    if way == "parameters":
        model = model.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
        found, _ = model(words, None)
    found.float().sum().backward()
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() < 2**-6 * expected.abs().max()
    assert torch.backends.mkldnn.enabled
