"""A small GPT under plain FSDP2, whose reduce-scatter and all-gather are compressed.

    torchrun --nproc-per-node 2 examples/gpt_fsdp.py --steps 400 --out runs/gpt-fsdp

In the order of torchtitan's loop: the model without memory, a function that divides it, its
weights, the optimiser; accumulation, clipping, distributed checkpoints. Lines for Regimes are
marked. Checkpoints go to OUT/checkpoints; the same command continues from the last one. On GPUs
each process takes one.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt_hsdp import CONTEXT, GPT, rate, text  # the model and its data, beside this file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import regimes


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Activation checkpointing and fully_shard, block by block; then the rest of the model."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
        fully_shard(model.blocks[i], mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)


@torch.no_grad()
def init_weights(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes of a step")
    parser.add_argument("--scatter", type=int, default=4, help="bits of a gradient: 8 or 4")
    parser.add_argument("--gather", type=int, help="bits of a weight: 8 or 4; none: as they are")
    parser.add_argument("--every", type=int, default=20, help="steps of a unit of the record")
    parser.add_argument("--save", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--out", default="runs/gpt-fsdp")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    with torch.device("meta"):
        model = GPT()
    parallelize(model, mesh)
    model.to_empty(device=device)
    torch.manual_seed(0)
    init_weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: rate(s, args.steps))
    hook = regimes.attach_shards(
        model,
        mesh,
        optimizer,
        scatter={"level": args.scatter},
        gather=None if args.gather is None else {"level": args.gather},
        every=args.every,
        record=args.out,
    )

    def parts(source: Path | None = None) -> dict:  # source: a checkpoint that is loaded
        weights, states = get_state_dict(model, optimizer)
        return {
            "model": weights,
            "optimizer": states,
            "scheduler": scheduler,
            "hook": hook.sharded_state(saved=source),  # Regimes
        }

    saved = Path(args.out, "checkpoints")
    done = max((int(f.parent.name) for f in saved.glob("*/.metadata")), default=0)
    if done:
        folder = saved / str(done)
        dcp.load(state := parts(folder), checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    data = text()
    for step in range(done, args.steps):
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        for part in range(args.accumulate):
            model.set_requires_gradient_sync(part == args.accumulate - 1)
            starts = torch.randint(len(data) - CONTEXT - 1, (4,), generator=draw).tolist()
            rows = torch.stack([data[s : s + CONTEXT + 1] for s in starts]).long().to(device)
            answer = model(rows[:, :-1]).flatten(0, 1).float()
            loss = F.cross_entropy(answer, rows[:, 1:].flatten()) / args.accumulate
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        hook.log(train_loss=loss.detach() * args.accumulate)  # Regimes
        if (step + 1) % args.save == 0:
            dcp.save(parts(), checkpoint_id=saved / str(step + 1))
    hook.close()  # Regimes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
