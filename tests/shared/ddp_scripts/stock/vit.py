"""Handwritten digits with a small vision transformer: AdamW, warm-up and cosine per step,
label smoothing, bfloat16 autocast, and gradients of several batches in a step.

    torchrun --standalone --nproc-per-node 2 vit.py --epochs 40

A usual DistributedDataParallel script and three lines that end in "# regimes"; without them
(``grep -v '# regimes$'``) it is plain DDP. The digits come with scikit-learn (8 x 8 pixels).
"""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import regimes  # regimes


class ViT(nn.Module):
    """Patches of 2 x 2 pixels and a class token."""

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, size, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, size))
        self.position = nn.Parameter(torch.randn(1, 17, size) * 0.02)
        block = nn.TransformerEncoderLayer(
            size, 4, 2 * size, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.blocks(x)[:, 0]))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """For training, and every fifth for testing."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    y = torch.tensor(data.target)
    test = torch.arange(len(x)) % 5 == 0
    return TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test])


def train(
    model: DistributedDataParallel,
    loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    args: argparse.Namespace,
) -> float:
    """One epoch; the mean loss of this process."""
    model.train()
    optimizer.zero_grad()
    total = 0.0
    for number, (x, y) in enumerate(loader, start=1):
        whole = number % args.accumulate == 0
        with nullcontext() if whole else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                loss = F.cross_entropy(model(x), y, label_smoothing=args.smoothing)
            (loss / args.accumulate).backward()
        total += loss.item()
        if whole:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return total / len(loader)


@torch.no_grad()
def accuracy_of(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    return torch.cat([(model(x).argmax(1) == y).float() for x, y in loader]).mean().item()


def rate(step: int, warm_up: int, steps: int) -> float:
    """Up to 1 in a line, then down to 0 as a cosine."""
    if step < warm_up:
        return (step + 1) / warm_up
    return (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))) / 2


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16, help="per process and backward pass")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per step")
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warm-up", type=int, default=40, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-model", help="file for the weights")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    training, testing = digits()
    sampler = DistributedSampler(training, seed=args.seed)
    loader = DataLoader(training, args.batch_size, sampler=sampler, drop_last=True)
    steps = len(loader) // args.accumulate
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(ViT(args.size, args.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    scheduler = LambdaLR(optimizer, lambda step: rate(step, args.warm_up, steps * args.epochs))
    hook = regimes.attach(model, optimizer, every=steps, record="runs/vit")  # regimes

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train(model, loader, optimizer, scheduler, args)
        accuracy = accuracy_of(model.module, DataLoader(testing, 500)) if rank == 0 else 0.0
        hook.log(train_loss=loss, accuracy=accuracy)  # regimes
        if rank == 0:
            print(f"epoch {epoch:3d} | train loss {loss:.4f} | accuracy {accuracy:.1%}", flush=True)

    if rank == 0 and args.save_model:
        torch.save(model.module.state_dict(), args.save_model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
