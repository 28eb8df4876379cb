"""A language model of bytes: an LSTM, clipped SGD, the rate divided by 4 when it gets no better.

    torchrun --standalone --nproc-per-node 2 words.py --epochs 15

A usual DistributedDataParallel script and three lines that end in "# regimes"; without them
(``grep -v '# regimes$'``) it is plain DDP. The text is the source of Python's standard library.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import regimes  # regimes


class Model(nn.Module):
    """Embedding, LSTM and a decoder that shares the embedding's weights."""

    def __init__(self, size: int, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(256, size)
        self.rnn = nn.LSTM(size, size, batch_first=True)
        self.decoder = nn.Linear(size, 256)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.rnn(self.drop(self.encoder(x)))
        return self.decoder(self.drop(x))


def text(size: int, window: int) -> tuple[TensorDataset, TensorDataset]:
    """Windows of the first ``size`` bytes, one byte longer than what is predicted; the last tenth
    of them is for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    content = bytearray()
    for path in sorted(root.glob("*.py")):
        content += path.read_bytes() if len(content) < size else b""
    ids = torch.frombuffer(content[:size], dtype=torch.uint8).long()
    windows = ids.unfold(0, window + 1, window)
    cut = len(windows) // 10
    return TensorDataset(windows[:-cut]), TensorDataset(windows[-cut:])


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, clip: float
) -> Iterator[float]:
    """One epoch; the loss of this process after each step."""
    model.train()
    for (windows,) in loader:
        optimizer.zero_grad()
        loss = loss_of(model, windows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        yield loss.item()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    losses = [loss_of(model, windows).item() * len(windows) for (windows,) in loader]
    return sum(losses) / len(loader.dataset)  # type: ignore[arg-type]


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=16, help="windows per process")
    parser.add_argument("--bytes", type=int, default=120_000, help="of text")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=20.0)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--unit", type=int, default=21, help="steps per unit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-model", help="file for the weights")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    training, held_out = text(args.bytes, args.window)
    sampler = DistributedSampler(training, seed=args.seed)
    loader = DataLoader(training, args.batch_size, sampler=sampler, drop_last=True)
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Model(args.size, args.dropout))
    torch.manual_seed(args.seed + 1000 * rank)  # each process drops other units
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    hook = regimes.attach(model, optimizer, every=args.unit, record="runs/lm")  # regimes

    best = math.inf
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        total = 0.0
        for loss in train(model, loader, optimizer, args.clip):
            hook.log(train_loss=loss)  # regimes
            total += loss
        found = torch.tensor(evaluate(model.module, DataLoader(held_out, 100)) if rank == 0 else 0)
        dist.broadcast(found, 0)
        if rank == 0:
            print(
                f"epoch {epoch:3d} | train loss {total / len(loader):.4f}"
                f" | test loss {found:.4f} | lr {optimizer.param_groups[0]['lr']:g}",
                flush=True,
            )
        if found < best:
            best = found.item()
        else:
            optimizer.param_groups[0]["lr"] /= 4

    if rank == 0 and args.save_model:
        torch.save(model.module.state_dict(), args.save_model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
