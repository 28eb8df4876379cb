"""A model that a trainer divides with FSDP2, with and without the hook; run by torchrun on two
processes: FILE TRAINER FOLDER.

Prints what it found as JSON. A folder with checkpoints is continued; otherwise the same training
runs three times: without a hook, with one that compresses nothing, and at 4 bits in FOLDER.

Accelerate, and with it Hugging Face's Trainer, turns FSDP on only where it finds an accelerator:
``DistributedType.FSDP`` is set for GPUs and their like, not for ``MULTI_CPU``. One line, which is
marked, names GPUs; all after it is their own, on the CPU. A model that transformers divides as it
loads it, and Lightning's ModelParallelStrategy, need no such line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import regimes.integrations  # before the trainers' packages  # noqa: F401

LENGTH = 32
FOUR = {"scatter": {"level": 4}, "every": 8}
Weights = dict[str, Tensor]


def whole(model: nn.Module) -> Weights:
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}


def found(folder: Path, pattern: str) -> str | None:
    """The last checkpoint."""
    saved = sorted(folder.glob(pattern))
    return str(saved[-1]) if saved else None


# -- Hugging Face's Trainer ------------------------------------------------------------------------


def windows() -> list[dict[str, Any]]:
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    chosen = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in chosen]


def arguments(folder: Path, **more: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        max_steps=24,
        learning_rate=3e-3,
        report_to=[],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=4,
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **more,
    )


def fitted(model: Any, given: Any, folder: Path, hook: dict[str, Any] | None) -> Weights:
    from transformers import Trainer

    from regimes.integrations.transformers import RegimesCallback

    trainer = Trainer(model, given, train_dataset=windows())
    if hook is not None:
        trainer.add_callback(RegimesCallback(trainer, record=folder / "record", **hook))
    trainer.train(resume_from_checkpoint=found(folder, "checkpoint-*"))
    return whole(trainer.model_wrapped)


def with_transformers(folder: Path, hook: dict[str, Any] | None) -> Weights:
    from accelerate import DistributedType
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 48, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    given = arguments(folder, fsdp=True, save_steps=12)
    given.distributed_state.distributed_type = DistributedType.MULTI_GPU  # what it finds on GPUs
    return fitted(model, given, folder, hook)


def with_loading(folder: Path, hook: dict[str, Any] | None) -> Weights:
    """Divided by transformers as it loads the model; its Trainer saves no checkpoint of such."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    given = arguments(folder, save_strategy="no")
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 48, "intermediate_size": 96}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(folder / "weights")  # on process 0
    dist.barrier()
    shards = DistributedConfig(fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder / "weights", distributed_config=shards)
    return fitted(model, given, folder, hook)


# -- a loop of one's own with Accelerate -----------------------------------------------------------


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5)
    )


def samples() -> list[tuple[Tensor, Tensor]]:
    rows = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    return [(x, x[:5].argmax()) for x in rows]


def with_accelerate(folder: Path, hook: dict[str, Any] | None) -> Weights:
    from regimes.integrations.accelerate import attach  # before accelerate

    from accelerate import Accelerator, DistributedType, PartialState  # isort: skip
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

    AcceleratorState._reset_state()
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # what it finds on GPUs
    policy: dict[str, Any] = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 200}
    accelerator: Any = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(dp_shard_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, **policy
        ),
        gradient_accumulation_steps=2,
    )
    net = layers()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(samples(), 8)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    made = None
    if hook is not None:
        made = attach(accelerator, model, optimizer, record=folder / "record", **hook)
    last = found(folder, "epoch-*")
    if last is not None:
        accelerator.load_state(last)
    for epoch in range(0 if last is None else int(last[-1]) + 1, 4):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if made is not None:
                made.log(train_loss=loss.detach())
        if made is not None:
            accelerator.save_state(str(folder / f"epoch-{epoch}"))
    if made is not None:
        made.close()
    accelerator.free_memory()
    return whole(model)


# -- Lightning -------------------------------------------------------------------------------------


def with_lightning(folder: Path, hook: dict[str, Any] | None) -> Weights:
    from regimes.integrations.lightning import RegimesCallback  # before lightning

    from lightning.pytorch import LightningModule, Trainer, seed_everything  # isort: skip
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Divided(LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = layers()
                mesh = self.device_mesh["data_parallel"]
                for layer in self.net[::2]:
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    seed_everything(0, verbose=False)
    callbacks: list[Any] = [ModelCheckpoint(folder, filename="{epoch:03d}", save_top_k=-1)]
    if hook is not None:
        callbacks.append(RegimesCallback(record=folder / "record", **hook))
    module = Divided()
    Trainer(
        accelerator="cpu",
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        devices=2,
        max_epochs=4,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(
        module,
        torch.utils.data.DataLoader(samples(), 8, shuffle=True),
        ckpt_path=found(folder, "epoch=*"),
    )
    return whole(module.net)


TRAINERS: dict[str, Callable[[Path, dict[str, Any] | None], Weights]] = {
    "transformers": with_transformers,
    "loading": with_loading,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
}


def main(trainer: str, place: str) -> None:
    train, folder = TRAINERS[trainer], Path(place)
    said: dict[str, Any] = {}
    if not (folder / "record").exists():
        plain = train(folder / "plain", None)
        dense = train(folder / "dense", {"every": 8})
        said["same"] = all(torch.equal(dense[name], p) for name, p in plain.items())
    last = train(folder, FOUR)
    said["sums"] = {name: p.double().sum().item() for name, p in last.items()}
    if os.environ["RANK"] == "0":
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
