"""What workers send each other, simulated or by torch.distributed, and how much of it.

`comm.Comm` counts, and a `world.World` carries: the base class for simulated workers, `processes`
for real ones. This room uses base alone; whatever exchanges numbers uses it.
"""
