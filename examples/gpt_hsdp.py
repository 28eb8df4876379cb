"""A small GPT on replicas: FSDP2 within a replica, compressed gradients between replicas.

    torchrun --nproc-per-node 4 examples/gpt_hsdp.py --islands 2 --steps 400 --out runs/gpt-hsdp

Trains on the text of Python's standard library, byte by byte. Checkpoints go to OUT/checkpoints;
the same command continues from the last one. So does torchrun by itself with --max-restarts 3,
where the environment has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it torch's store still has
the addresses of the dead. On GPUs each process takes one.
"""

import argparse
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import regimes

CONTEXT, WIDTH, HEADS, BLOCKS = 64, 64, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bytes(x) + self.places.weight
        for block in self.blocks:
            h = block(h)
        return F.linear(self.norm(h), self.bytes.weight)  # the embedding is also the head


def text() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def rate(step: int, steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine."""
    warm = max(1, steps // 10)
    return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--stop", type=int, help="stop after so many steps, as if cut off")
    parser.add_argument("--every", type=int, default=20, help="steps of a unit of the record")
    parser.add_argument("--save", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--out", default="runs/gpt-hsdp")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    shape = args.islands, dist.get_world_size() // args.islands
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    model = GPT().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: rate(s, args.steps))
    hook = regimes.attach_replicas(
        model,
        mesh["replicate"],
        optimizer,
        compressor=regimes.QuantisedAllReduce(bits=8),
        every=args.every,
        record=args.out,
    )

    def parts(source: Path | None = None) -> dict:  # source: a checkpoint that is loaded
        weights, states = get_state_dict(model, optimizer)
        return {
            "model": weights,
            "optimizer": states,
            "scheduler": scheduler.state_dict(),
            "hook": hook.sharded_state(saved=source),
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
        scheduler.load_state_dict(state["scheduler"])
    data = text()
    for step in range(done, args.steps if args.stop is None else args.stop):
        draw = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        starts = torch.randint(len(data) - CONTEXT - 1, (8,), generator=draw)
        rows = torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()]).long().to(device)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        hook.log(train_loss=loss.detach())
        if (step + 1) % args.save == 0:
            dcp.save(parts(), checkpoint_id=saved / str(step + 1))
    hook.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
