"""FSDP2 as torch's tutorial has it: a Transformer sharded layer by layer, mixed precision, AdamW,
clipping and distributed checkpoints.

Two dimensions of processes, because that is where the hook is of use; all else is the tutorial's.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main(args: argparse.Namespace) -> None:
    dist.init_process_group(backend="gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    mesh = init_device_mesh(
        "cpu",
        (args.replicas, dist.get_world_size() // args.replicas),
        mesh_dim_names=("replicate", "shard"),
    )

    torch.manual_seed(0)
    vocab_size, batch_size, seq_len = 1024, 4, 32
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(vocab_size, 64),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Linear(64, vocab_size),
    )
    fsdp_kwargs = {"mesh": mesh}  # MESH
    if args.mixed_precision:
        fsdp_kwargs["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for part in model[1].layers:
        fully_shard(part, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # HOOK

    def app_state():
        model_state, optim_state = get_state_dict(model, optim)
        return {"model": model_state, "optim": optim_state}

    start = 0
    if os.path.exists(f"{args.checkpoint}/.metadata"):
        state = app_state()
        dcp.load(state, checkpoint_id=args.checkpoint)
        set_state_dict(
            model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        with open(f"{args.checkpoint}/step") as file:
            start = int(file.read())
    for step in range(start, args.steps):
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        x = torch.randint(0, 32, (batch_size, seq_len), generator=generator)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1).float(), (x.flatten() * 7) % 32)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optim.step()
        optim.zero_grad()
        # LOG
        if step + 1 == args.save_at:
            dcp.save(app_state(), checkpoint_id=args.checkpoint)
            if rank == 0:
                with open(f"{args.checkpoint}/step", "w") as file:
                    file.write(str(step + 1))
            if args.die:
                os._exit(1)
    if rank == 0:
        print(f"loss {loss.item():.6f}", flush=True)
    # CLOSE
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-at", type=int, default=14)
    parser.add_argument("--checkpoint", default="checkpoint")
    parser.add_argument("--mixed-precision", action="store_true")
    parser.add_argument("--die", action="store_true")
    main(parser.parse_args())
