"""In the place of a campaign's process: one that sleeps, dies, or answers; it imports nothing."""

from __future__ import annotations

import os
import subprocess
from typing import Any


def serve(connection: Any, place: Any, name: str, parent: int) -> None:
    os.setsid()
    connection.send("ready")
    while True:
        _, question = connection.recv()
        if question == "sleep":
            child = subprocess.Popen(["sleep", "100"])
            (place.out / "grandchild").write_text(str(child.pid))
            connection.recv()
        if question == "die":
            os._exit(3)
        connection.send({"ok": True})
