"""On a process's path: at its very end it writes down which of its threads are gloo's."""

import atexit
import os
from pathlib import Path


def report() -> None:
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    rank = os.environ.get("RANK", "launcher")
    found = "\n".join(sorted(name for name in names if "gloo" in name))
    Path(os.environ["AT_EXIT"], rank).write_text(found)


atexit.register(report)  # before all others, so called after them
