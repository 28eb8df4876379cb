"""The time columns of the paper's Tables 1-6, held against the cost model on the paper's network.

::

    regimes figure paper_times

The paper trained on 4 nodes joined by 10 Gbit/s and prints floats and seconds of whole trainings.
Its compute seconds are not printed, so they are an input: what remains of the high row (high
compression, or the large batch) after the model's communication, taken to be the same in the other
two rows, as the model is of the network alone. Per setting:

- ``predicted``: speed-up of ACCORDION over the low row, by the model at 10 Gbit/s;
- ``explained``: the model's communication as a share of the printed difference low - high;
- ``implied``: the bandwidth at which it would be all of it. Whatever else grows with the traffic
  (compression, decoding; with smaller batches, the number of steps) is in it too, so it is no
  measurement of their network;
- ``floats``, ``seconds``: where ACCORDION lies between high (0) and low (1). Equal where time is
  linear in traffic, as the model says, at whatever bandwidth.

Latencies fall out of all differences but the batch's, where they are set to zero.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from regimes.cost.network import Network, collective_seconds
from regimes.records import write_output

from ..common.estimates import Cell, as_table, number, word
from . import published
from .table_rules import UNITS

NODES, NETWORK = 4, Network.parse("10Gbit/s")
KEYS = ["table", "data", "model", "compressor"]


def communication(compressor: str, floats: float, bandwidth: float) -> float:
    """Seconds of a whole training's collectives: of 4-byte floats by the paper's count, in which a
    gather (TopK) counts once per worker, a mean (PowerSGD, batch) once."""
    kind, share = ("gather", NODES) if compressor == "topk" else ("mean", 1)
    return float(collective_seconds(kind, 4 * floats / share, Network(bandwidth), NODES))


def compare() -> pd.DataFrame:
    """One row per setting of the tables; see the module's docstring."""
    table = published.tables()
    table["floats"] = table["printed"].astype(float) * table["unit"].map(UNITS)
    rows = []
    for key, group in table.groupby(KEYS, sort=False):
        static = group[group["level"] != "accordion"].sort_values("floats")
        high, low = static.iloc[0], static.iloc[-1]
        ours = group[group["level"] == "accordion"].iloc[0]
        rows.append(dict(zip(KEYS, key, strict=True)) | _row(str(key[3]), low, high, ours))
    return pd.DataFrame(rows)


def _row(compressor: str, low: pd.Series, high: pd.Series, ours: pd.Series) -> dict[str, float]:
    bandwidth = float(NETWORK.bandwidth)
    unit = communication(compressor, 1.0, bandwidth)  # seconds per float
    gap = unit * (low["floats"] - high["floats"])

    def predicted(row: pd.Series) -> float:
        return float(high["seconds"] + unit * (row["floats"] - high["floats"]))

    printed, model = low["seconds"] / ours["seconds"], predicted(low) / predicted(ours)
    return {
        "compute": high["seconds"] - unit * high["floats"],
        "low_seconds": low["seconds"],
        "high_seconds": high["seconds"],
        "accordion_seconds": ours["seconds"],
        "printed": printed,
        "predicted": model,
        "error": model / printed - 1,
        "explained": gap / (low["seconds"] - high["seconds"]),
        "implied": bandwidth * gap / (low["seconds"] - high["seconds"]),
        **{
            name: (ours[name] - high[name]) / (low[name] - high[name])
            for name in ("floats", "seconds")
        },
    }


def markdown(frame: pd.DataFrame) -> str:
    """The comparison as a Markdown table, with its medians."""
    columns: dict[str, Cell] = {
        "table": word("table"),
        "setting": lambda row: f"{row['model']}, {row['data']}, {row['compressor']}",
        "speed-up over low, printed": number("printed", ".2f"),
        "predicted": number("predicted", ".2f"),
        "of low - high explained": lambda row: f"{100 * row['explained']:.0f} %",
        "implied Gbit/s": lambda row: f"{row['implied'] / 1e9:.2f}",
        "ACCORDION between high and low, floats": number("floats", ".2f"),
        "seconds": number("seconds", ".2f"),
    }
    text = [as_table(frame, columns, texts=2).markdown()]
    for kind, part in frame.groupby("compressor", sort=False):
        off = (part["floats"] - part["seconds"]).abs()
        text.append(
            f"\n{kind}, n = {len(part)}: {100 * part['explained'].median():.0f} % of the printed "
            f"difference explained (median); place between high and low by floats and by seconds "
            f"differ by {off.median():.2f} (median), {off.max():.2f} at most."
        )
    return "\n".join(text) + "\n"


def main(out: Path | None = None) -> pd.DataFrame:
    """Print the comparison as Markdown.

    Args:
        out: file for the same table.
    """
    frame = compare()
    text = markdown(frame)
    if out:
        write_output(out, text)
    print(text, end="")
    return frame
