"""ACCORDION for any DistributedDataParallel script, in three lines::

    hook = regimes.attach(model, policy=Accordion(low=PowerSGD(rank=4), high=PowerSGD(rank=1)))
    ...                                  # train an epoch as before
    hook.epoch_end(lr=scheduler.get_last_lr()[0])
    torch.save(hook.state_dict(), f"hook-{rank}.pt")  # each process its own

The compressors and policies are the trainer's, and so are the numbers. ``hook`` is the
class that does its work: levels, units, state; ``steps`` exchanges DDP's buckets while backward
goes on.
"""

from regimes.hook.ddp.hook import Hook
from regimes.job.recorder import RecordOptions

__all__ = ["Hook", "RecordOptions"]
