"""A delay between two tap devices: each frame is handed on a fixed time after it came.

    python -m benchmarks.delay SECONDS NAMESPACE NAMESPACE   # device "trunk" in both

`benchmarks.nodes` starts it. The rate of the link is limited elsewhere: ``tc tbf`` on the
devices limits it before a frame comes here.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import os
import select
import signal
import struct
import sys
import time
from pathlib import Path

TUNSETIFF, TAP, NO_INFO = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h
FRAME = 1 << 16


def opened(namespace: str) -> int:
    """A file descriptor of the tap device ``trunk`` in a network namespace, which this process
    enters."""
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", b"trunk", TAP | NO_INFO))
    return tap


def hand_on(taps: tuple[int, int], delay: float) -> None:
    """Without end: read frames from either device and write them to the other when due."""
    other = {taps[0]: taps[1], taps[1]: taps[0]}
    due: collections.deque[tuple[float, int, bytes]] = collections.deque()
    poll = select.epoll()
    for tap in taps:
        poll.register(tap, select.EPOLLIN)
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else -1
        for tap, _ in poll.poll(wait):
            while True:
                try:
                    frame = os.read(tap, FRAME)
                except BlockingIOError:
                    break
                due.append((time.monotonic() + delay, other[tap], frame))
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, tap, frame = due.popleft()
            os.write(tap, frame)


def main() -> None:
    """Open both devices, say so on stdout, and hand frames on until killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the parent
    delay, near, far = sys.argv[1:]
    taps = opened(near), opened(far)
    print("ready", flush=True)
    hand_on(taps, float(delay))


if __name__ == "__main__":
    main()
