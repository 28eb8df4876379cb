"""Compression in a training loop of the user's own.

``attaching`` has the three functions that attach a hook, ``ddp`` the hook itself, ``fsdp`` what
FSDP2 divides, ``local`` local steps. This room uses job and training; integrations alone use it.
"""
