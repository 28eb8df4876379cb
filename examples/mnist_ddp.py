"""Handwritten digits on several processes: a plain DistributedDataParallel script.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else a restart reads old addresses (torch 2.13)
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/mnist_ddp.py --out runs/ddp

The script follows PyTorch's documentation; lines for Regimes are marked ACCORDION. When restarted,
by hand or by torchrun after a process has died, it continues from its last checkpoint and ends with
the same weights. The digits are those of scikit-learn (8 x 8 pixels). It takes 15 s on two cores.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import regimes  # ACCORDION


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 16, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.dropout(F.relu(self.fc1(x.flatten(1))), 0.2, self.training)
        return self.fc2(x)


def digits() -> tuple[Dataset, Dataset]:
    """Training and test data; every fifth image is test data."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target)
    test = torch.arange(len(x)) % 5 == 0
    return TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test])


def train(model: nn.Module, loader: DataLoader, optimizer: Any, device: torch.device) -> float:
    """Train one epoch; return the mean loss of this process."""
    model.train()
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    hits = [(model(x.to(device)).argmax(1).cpu() == y).float() for x, y in loader]
    return torch.cat(hits).mean().item()


def newest(folder: Path, processes: int) -> int:
    """The number of epochs that every process has saved."""
    saved = [int(p.name) for p in folder.glob("[0-9]*") if len(list(p.glob("*.pt"))) >= processes]
    return max(saved, default=0)


def save(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--out", type=Path, default=Path("runs/ddp"), help="for checkpoints")
    args = parser.parse_args(words)

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)

    training, testing = digits()
    sampler = DistributedSampler(training)
    loader = DataLoader(training, args.batch_size, sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = MultiStepLR(optimizer, milestones=[args.epochs * 2 // 3])

    about = regimes.RecordOptions(args.out / "record", data="digits", metric="accuracy")
    low, high = regimes.PowerSGD(rank=4), regimes.PowerSGD(rank=1)
    # ACCORDION: ranks 4 and 1, decided per layer every two epochs
    hook = regimes.attach(
        model,
        optimizer,
        policy=regimes.Accordion(interval=2, low=low, high=high),
        record=about,
    )

    start = newest(args.out, processes)
    if start:
        file = args.out / f"{start:03d}" / f"process-{rank}.pt"
        saved = torch.load(file, map_location=device, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        hook.load_state_dict(saved["hook"])  # ACCORDION

    for epoch in range(start, args.epochs):
        torch.manual_seed(processes * epoch + rank)  # for dropout
        sampler.set_epoch(epoch)
        loss = train(model, loader, optimizer, device)
        scheduler.step()
        hook.epoch_end()  # ACCORDION
        if rank == 0:
            share = accuracy(model.module, DataLoader(testing, 500), device)
            hook.log(train_loss=loss, accuracy=share)  # ACCORDION
            low = sum(level == "low" for level in hook.levels.values())
            sent = hook.traffic.bytes / 1e6
            print(
                f"epoch {epoch + 1:2d}  loss {loss:.3f}  accuracy {share:.1%}  sent {sent:.2f} MB"
                f"  layers at low compression next: {low}",
                flush=True,
            )
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "hook": hook.state_dict(),
        }
        save(args.out / f"{epoch + 1:03d}" / f"process-{rank}.pt", state)
    hook.close()  # ACCORDION
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
