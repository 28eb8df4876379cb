"""Hugging Face's Trainer with compressed gradients: a new GPT-2 with 60 k parameters.

    torchrun --standalone --nproc-per-node 2 examples/trainer_hf.py --out runs/hf

Works offline: weights are random, and the text is the source code of ``argparse``. Lines for
Regimes are marked. When restarted, it continues from its last checkpoint. It takes 20 s on two
cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import regimes
from regimes.integrations.transformers import RegimesCallback  # Regimes: import first

from transformers import (  # isort: skip
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    trainer_utils,
)

LENGTH = 32


def windows() -> list[dict[str, Any]]:
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    chosen = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in chosen]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/hf"))
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--save", type=int, default=12, help="steps between two checkpoints")
    args = parser.parse_args(words)

    data = windows()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=LENGTH,
            n_embd=48,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    arguments = TrainingArguments(  # the learning rate falls linearly to zero, as by default
        output_dir=str(args.out),
        max_steps=args.steps,
        learning_rate=3e-3,
        report_to=[],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=12,
        save_steps=args.save,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=data[64:], eval_dataset=data[:64])
    trainer.add_callback(
        RegimesCallback(  # Regimes: ranks 4 and 1, decided per layer every 8 steps
            trainer,
            every=8,
            policy={"name": "accordion", "interval": 1},
            record=regimes.RecordOptions(args.out / "record", data="argparse"),
        )
    )
    last = trainer_utils.get_last_checkpoint(str(args.out)) if args.out.is_dir() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
