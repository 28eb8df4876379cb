"""ACCORDION for any DistributedDataParallel script, in three lines::

    hook = regimes.attach(model, policy="accordion", levels={"low": 4, "high": 1})  # PowerSGD
    ...                                  # train an epoch as before
    hook.epoch_end(lr=scheduler.get_last_lr()[0])
    torch.save(hook.state_dict(), f"hook-{rank}.pt")  # each process its own

The compressors and policies are the trainer's, and so are the numbers. ``hook`` is what a user
holds: levels, epochs, state; ``buckets`` drives DDP's buckets while backward goes on.
"""

from regimes.ddp.hook import Hook, attach
from regimes.ddp.recording import Recording

__all__ = ["Hook", "Recording", "attach"]
