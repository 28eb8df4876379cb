"""Lightning with compressed gradients: digits on two processes.

    torchrun --standalone --nproc-per-node 2 examples/module_lightning.py --out runs/lightning

Lines for Regimes are marked. When restarted, it continues from its last checkpoint. It takes 20 s
on two cores.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import regimes
from regimes.integrations.lightning import RegimesCallback  # Regimes: import before lightning

from lightning.pytorch import LightningModule, Trainer, seed_everything  # isort: skip
from lightning.pytorch.callbacks import ModelCheckpoint  # isort: skip


class Digits(LightningModule):
    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.epochs = epochs
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 16, 10),
        )

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        x, y = batch
        found = self.net(x)
        self.log("val_loss", F.cross_entropy(found, y), sync_dist=True)
        self.log("val_accuracy", (found.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [self.epochs // 2])
        return [optimizer], [schedule]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args(words)

    seed_everything(0, verbose=False)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    callback = RegimesCallback(  # Regimes: ranks 4 and 1, decided per layer after each epoch
        policy={"name": "accordion", "interval": 1},
        record=regimes.RecordOptions(args.out / "record", data="digits", metric="accuracy"),
    )
    keep = ModelCheckpoint(args.out, filename="{epoch:03d}", save_top_k=-1)
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 2)),
        max_epochs=args.epochs,
        callbacks=[callback, keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.out,
    )
    saved = sorted(args.out.glob("*.ckpt"))
    trainer.fit(
        Digits(args.epochs),
        DataLoader(TensorDataset(x[:1536], y[:1536]), 32, shuffle=True),
        DataLoader(TensorDataset(x[1536:], y[1536:]), 300),
        ckpt_path=str(saved[-1]) if saved else None,
    )


if __name__ == "__main__":
    main()
