"""A language model of bytes: a tied embedding, dropout, clipped AdamW whose rate falls with each
step, bfloat16 autocast, two backward passes in a step.

A usual DistributedDataParallel script and three lines that end in "# regimes"; without them it is
plain DDP. The text is the source of Python's standard library.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import regimes  # regimes

WINDOW, ACCUMULATE = 32, 2


class Model(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(256, size), nn.Linear(size, 256)
        self.decoder.weight = self.encoder.weight
        self.block = nn.TransformerEncoderLayer(size, 4, 2 * size, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.block(self.encoder(x)))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--bytes", type=int, default=9200)
    parser.add_argument("--unit", type=int, default=4, help="steps")
    parser.add_argument("--save-model", help="file for the weights")
    args = parser.parse_args(words)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    text = torch.tensor([*Path(argparse.__file__).read_bytes()[: args.bytes]])
    windows = text.unfold(0, WINDOW + 1, WINDOW)
    sampler = DistributedSampler(windows)
    loader = DataLoader(windows, 16, sampler=sampler, drop_last=True)
    torch.manual_seed(1)
    model = DistributedDataParallel(Model(16))
    torch.manual_seed(1000 * rank)  # each process drops other units
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    hook = regimes.attach(model, optimizer, every=args.unit, record="runs/lm")  # regimes

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        total = parts = 0.0
        for number, x in enumerate(loader, start=1):
            last = number % ACCUMULATE == 0
            with nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16):
                    scores = model(x[:, :-1]).flatten(0, 1)
                loss = nn.functional.cross_entropy(scores.float(), x[:, 1:].flatten()) / ACCUMULATE
                loss.backward()
            parts += loss.item()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                hook.log(train_loss=parts)  # regimes
                total, parts = total + parts, 0.0
        if rank == 0:
            print(f"epoch {epoch} | train loss {total / (len(loader) // ACCUMULATE):.4f}")
    if rank == 0 and args.save_model:
        torch.save(model.module.state_dict(), args.save_model)
    dist.destroy_process_group()
