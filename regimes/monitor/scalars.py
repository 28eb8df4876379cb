"""The numbers of an epoch by name, as programs that draw curves want them."""

from __future__ import annotations

from regimes.monitor.text import Row, at_low


class Curves:
    """A reporter of whole epochs; what becomes of their numbers is a subclass's: ``open``, ``put``
    and ``stop``."""

    def open(self, header: Row, done: int) -> None:
        """A run begins, or goes on after so many epochs."""
        raise NotImplementedError

    def put(self, epoch: int, numbers: dict[str, float]) -> None:
        """Those of one epoch."""
        raise NotImplementedError

    def start(self, header: Row, rows: list[Row]) -> None:
        self.header, self.floats = header, sum(row["floats"] for row in rows)
        self.open(header, len(rows))

    def step(self, epoch: int, done: int, steps: int) -> None:
        """Says nothing: the numbers are those of whole epochs."""

    def epoch(self, row: Row, seconds: dict[str, float]) -> None:
        self.floats += row["floats"]
        low, layers = at_low(self.header, row)
        numbers = {
            "loss/train": row["train_loss"],
            "loss/test": row["test_loss"],
            self.header["metric"]: row["metric"],
            "lr": row["lr"],
            "traffic/floats": self.floats,
            "traffic/share of layers at low": low / max(layers, 1),
            **{f"logged/{name}": value for name, value in row.get("logged", {}).items()},
            **{f"seconds/{name}": value for name, value in seconds.items()},
        }
        known = {name: value for name, value in numbers.items() if value is not None}
        self.put(row["epoch"], known)  # without what was not logged in this epoch
