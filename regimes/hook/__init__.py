"""Compression in a user's own training: ``attaching`` has the three functions, ``ddp`` the hook,
``fsdp`` models that FSDP2 divides, ``local`` local steps. ``integrations`` alone may import it."""
