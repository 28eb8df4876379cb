"""Your own loop with Accelerate and compressed gradients: digits, accumulation, clipping.

    torchrun --standalone --nproc-per-node 2 examples/loop_accelerate.py --out runs/accelerate

Lines for Regimes are marked. When restarted, it continues from its last checkpoint. It takes 15 s
on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import regimes
from regimes.integrations.accelerate import attach  # Regimes: import before accelerate

from accelerate import Accelerator  # isort: skip
from accelerate.utils import DataLoaderConfiguration  # isort: skip

ACCUMULATED, BATCH = 2, 16


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args(words)

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # the same order in a resumed epoch
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATED,
        cpu=not torch.cuda.is_available(),
        dataloader_config=order,
    )
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [args.epochs // 2])
    loader = DataLoader(TensorDataset(x[:1536], y[:1536]), BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    accelerator.register_for_checkpointing(schedule)

    about = regimes.RecordOptions(args.out / "record", data="digits", metric="accuracy")
    hook = attach(  # Regimes: ranks 4 and 1, decided per layer at the end of each epoch
        accelerator,
        model,
        optimizer,
        every=len(loader) // ACCUMULATED,
        record=about,
        policy={"name": "accordion", "interval": 1},
    )

    saved = sorted(args.out.glob("epoch-*"))
    if saved:
        accelerator.load_state(str(saved[-1]))
    for epoch in range(len(saved), args.epochs):
        loader.set_epoch(epoch)
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            hook.log(train_loss=loss)  # Regimes
        schedule.step()
        with torch.no_grad():
            chosen = net(x[1536:].to(accelerator.device)).argmax(1).cpu()
        share = (chosen == y[1536:]).float().mean().item()
        hook.log(accuracy=share)  # Regimes
        accelerator.print(f"epoch {epoch}: {share:.1%}, {hook.traffic.bytes / 1e6:.2f} MB sent")
        accelerator.save_state(str(args.out / f"epoch-{epoch:03d}"))
    hook.close()  # Regimes
    accelerator.end_training()


if __name__ == "__main__":
    main()
