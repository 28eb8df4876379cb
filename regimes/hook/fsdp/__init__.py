"""Models that ``fully_shard`` (FSDP2) divides, under a hook of ``ddp``; ``attaching`` and ``local``
alone may import this room.

``replicas`` is what replicas of shards exchange, ``shards`` FSDP2's own collectives, compressed.
"""
