"""Handwritten digits with a small CNN: Adadelta, the rate times gamma after each epoch.

    torchrun --standalone --nproc-per-node 2 mnist.py --epochs 30

A usual DistributedDataParallel script and three lines that end in "# regimes"; without them
(``grep -v '# regimes$'``) it is plain DDP. The digits come with scikit-learn (8 x 8 pixels).
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import regimes  # regimes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(32 * 16, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(self.dropout1(x.flatten(1))))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """For training, and every fifth for testing."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target)
    test = torch.arange(len(x)) % 5 == 0
    return TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test])


def train(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> float:
    """One epoch; the mean loss of this process."""
    model.train()
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    found = [(model(x), y) for x, y in loader]
    output, target = (torch.cat(parts) for parts in zip(*found, strict=True))
    right = (output.argmax(1) == target).float().mean().item()
    return F.nll_loss(output, target).item(), right


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.85, help="of the rate, per epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-model", help="file for the weights")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    training, testing = digits()
    sampler = DistributedSampler(training, seed=args.seed)
    loader = DataLoader(training, args.batch_size, sampler=sampler)
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Net())
    torch.manual_seed(args.seed + 1000 * rank)  # each process drops other units
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    hook = regimes.attach(model, optimizer, every=sampler, record="runs/mnist")  # regimes

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train(model, loader, optimizer)
        scheduler.step()
        if rank == 0:
            test_loss, accuracy = test(model.module, DataLoader(testing, 500))
            hook.log(train_loss=loss, test_loss=test_loss, accuracy=accuracy)  # regimes
            print(
                f"epoch {epoch:3d} | train loss {loss:.4f} | test loss {test_loss:.4f}"
                f" | accuracy {accuracy:.1%}",
                flush=True,
            )

    if rank == 0 and args.save_model:
        torch.save(model.module.state_dict(), args.save_model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
