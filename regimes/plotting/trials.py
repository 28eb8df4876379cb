"""What trials of levels have shown (``policies.trial``): each level's harm over the run."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.ticker import MaxNLocator

from regimes.errors import ConfigError
from regimes.plotting import style
from regimes.policies import Trial, make_policy
from regimes.policies.history import History
from regimes.records import Record, unit_name
from regimes.replay.replay import past_epochs


def rule_of(run: Record) -> Trial | None:
    """The run's policy, if it makes trials."""
    try:
        rule: Any = make_policy(dict(run.config["policy"]))
    except ConfigError:  # a package's that is not installed
        return None
    return rule if isinstance(rule, Trial) else None


def tabulate_harms(run: Record) -> pd.DataFrame:
    """The intervals of each level's harm after each epoch, as the run's policy saw them, one row
    for each: epoch, level, blocks (of trials), mean, low, high (in nats; infinite while there are
    too few trials), shown (whether the level was shown to harm since the last decay). Empty for a
    run without trials."""
    columns = ["epoch", "level", "blocks", "mean", "low", "high", "shown"]
    rows, past, rule = [], History(), rule_of(run)
    for epoch in past_epochs(run) if rule is not None else ():
        assert rule is not None
        past.append(epoch)
        shown = rule.shown(past)
        for level, found in rule.intervals(past).items():
            rows.append((len(past) - 1, level, *found, level in shown))
    return pd.DataFrame(rows, columns=columns)


def draw_harms(run: Record, width: float = style.WIDTH) -> style.Drawing:
    """Each level's harm over the run, with its interval; a large marker where it was shown.

    Args:
        width: inches.

    Returns:
        The figure, and its numbers, `tabulate_harms`.
    """
    numbers, rule = tabulate_harms(run), rule_of(run)
    levels = list(dict.fromkeys(numbers["level"]))
    colours = dict(zip(levels, sns.color_palette("colorblind", len(levels)), strict=True))
    with style.theme():
        fig = style.figure(2.4, width)
        ax = fig.add_subplot()
        for level in levels:
            whole = numbers[numbers["level"] == level]
            known = whole.where(whole["high"].map(math.isfinite))
            ax.fill_between(
                whole["epoch"], known["low"], known["high"], color=colours[level], alpha=0.25, lw=0
            )
            ax.plot(whole["epoch"], known["mean"], color=colours[level], label=level)
            first = known[known["shown"] == True].head(1)  # noqa: E712  (null where not known)
            ax.plot(first["epoch"], first["mean"], "o", color=colours[level], markersize=6)
        ax.axhline(0.0 if rule is None else rule.margin, color="#666666", linewidth=0.8)
        ax.set(xlabel=unit_name(run.config), ylabel="harm (nats)", xlim=(0, max(1, len(run.rows))))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        style.mark_decays(ax, run)
        place: Any = "outside upper left"
        fig.legend(*ax.get_legend_handles_labels(), loc=place, ncols=max(1, len(levels)))
    return style.Drawing(fig, numbers)
