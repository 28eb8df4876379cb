"""Records, read, compared and drawn."""

from typing import assert_type

import matplotlib.axes
import pandas as pd

import regimes


def read(folder: str, ax: matplotlib.axes.Axes) -> float:
    runs = regimes.load_all(folder, where=["seed=1"])
    assert_type(runs, list[regimes.Record])
    record = regimes.load(f"{folder}/seed-1")
    epochs: pd.DataFrame = record.epochs
    assert_type(regimes.summary(runs), pd.DataFrame)
    assert_type(regimes.frame(folder, layers=True), pd.DataFrame)
    table = regimes.compare(runs, baseline="low")
    assert_type(table, pd.DataFrame)
    drawing = regimes.plot(runs, "train_loss", against="floats")
    files: list[str] = [path.name for path in drawing.save("mine")]
    numbers: pd.DataFrame = drawing.data
    drawing.savefig("mine.pdf")
    regimes.plot(folder, ax=ax).set_size_inches(3.0, 2.0)
    return float(len(epochs) + len(numbers) + len(files) + record.seed)
