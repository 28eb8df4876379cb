"""Small probes (model, batches) for the curvature tests, and their explicit Hessians."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.func import functional_call

from regimes.base.seeding import derive_seed


class Residual(nn.Module):
    """A block with a skip, a stride, groups, and batch norm before and behind convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pre = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, groups=2)
        self.norm1 = nn.BatchNorm2d(2 * width)
        self.conv2 = nn.Conv2d(2 * width, 2 * width, 3, padding=2, dilation=2, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * width, affine=False)
        self.skip = nn.Conv2d(width, 2 * width, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm1(self.conv1(torch.relu(self.pre(x)))))
        return nn.functional.silu(self.norm2(self.conv2(y)) + self.skip(x), inplace=True)


class Net(nn.Module):
    """Everything a convolutional net does in under 700 parameters; flattens with `view`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.block = Residual(4)
        self.up = nn.ConvTranspose2d(8, 3, 2, stride=2, bias=False)
        self.upnorm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3 * 2 * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(torch.sigmoid(self.norm(self.stem(x))))
        x = nn.functional.max_pool2d(self.upnorm(self.up(x)), 2)
        return self.head(x.view(x.size(0), -1))


def seeded(make, *key):
    """What `make` builds from torch's global stream, seeded; the stream is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("test", *key))
        return make()


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """The net with lived-in running statistics, in eval mode."""

    def make() -> nn.Module:
        model = Net()
        for _ in range(3):
            model(2 * torch.randn(20, 2, 6, 6) + 1)
        return model.eval().to(dtype)

    return seeded(make, "net")


def data(n: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return seeded(lambda: (torch.randn(n, 2, 6, 6, dtype=dtype), torch.randint(0, 3, (n,))), "data")


def split(batch: tuple[Tensor, Tensor], *sizes: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(part.split(list(sizes)) for part in batch), strict=True))


@contextlib.contextmanager
def normalising_by_batch(model: nn.Module):
    """BatchNorms without running statistics: the plain meaning of "batch-statistics"."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    kept = [(m.running_mean, m.running_var) for m in norms]
    for m in norms:
        m.running_mean = m.running_var = None
    yield
    for m, (mean, var) in zip(norms, kept, strict=True):
        m.running_mean, m.running_var = mean, var


def explicit_hessian(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """d x d, by torch's own second derivatives, one row at a time."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    flat = torch.cat([p.detach().reshape(-1) for p in parameters.values()])

    def loss(vector: Tensor) -> Tensor:
        pieces = vector.split([p.numel() for p in parameters.values()])
        named = {n: v.view_as(p) for (n, p), v in zip(parameters.items(), pieces, strict=True)}
        return nn.functional.cross_entropy(functional_call(model, named, (batch[0],)), batch[1])

    return torch.func.jacrev(torch.func.grad(loss), chunk_size=64)(flat)


def explicit_gauss_newton(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """J' H_L J of the mean cross-entropy, row by row."""
    z = model(batch[0])
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = [torch.autograd.grad(e, parameters, retain_graph=True) for e in z.view(-1)]
    j = torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])
    p = z.softmax(-1).detach()
    blocks = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / len(p)
    return j.mT @ torch.block_diag(*blocks) @ j


class Quadratic(nn.Module):
    """The loss w'Hw / 2 of a given H."""

    def __init__(self, h):
        super().__init__()
        self.w = nn.Parameter(torch.ones(len(h), dtype=h.dtype))
        self.register_buffer("h", h)

    def forward(self, x):
        return (self.w @ self.h @ self.w / 2).expand(len(x))
