"""The paper's scale by the paper's text, where the authors' loop does otherwise (`paper`).

"Divided by 10 at epochs 150 and 250" here ends epochs 150 and 250, counted from 0: 151 and 251 are
the first at the lower rates, and the warm-up has no lag. ACCORDION looks every 10 epochs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from regimes.config import RunConfig
from regimes.presets import paper
from regimes.presets.registry import Grid, grid, preset

DECAYS = {(152, 252): (151, 251), (62, 81): (61, 81)}  # of the authors' loop -> of the text


def by_text(config: RunConfig) -> RunConfig:
    """A preset of `paper` with the rates and the interval of the text."""
    decays = DECAYS[config.optimizer.decay_epochs]  # type: ignore[index]
    return replace(
        config,
        optimizer=replace(config.optimizer, warmup_hold=0, decay_epochs=decays),
        policy={**config.policy, "interval": 10},
    )


def _preset(name: str, loop: Callable[[], RunConfig]) -> None:
    def config() -> RunConfig:
        return by_text(loop())

    config.__doc__ = f"`regimes run paper-text-{name}`: paper-{name}, rates by the text; a GPU."
    preset(f"paper-text-{name}")(config)


for _name, _loop in {
    "resnet18-cifar100": paper.paper_resnet18_cifar100,
    "resnet18-cifar10": paper.paper_resnet18_cifar10,
    "vgg19bn-cifar10": paper.paper_vgg19bn_cifar10,
    "lstm": paper.paper_lstm,
}.items():
    _preset(_name, _loop)


@grid("paper-text-figure2")
def paper_text_figure2() -> Grid:
    """`regimes ablate paper-text-figure2`: paper-figure2, rates and windows by the text; a GPU."""
    return paper.schedules(by_text(paper.paper_resnet18_cifar100()))


@grid("paper-text-table1-resnet18")
def paper_text_table1() -> Grid:
    """`regimes ablate paper-text-table1-resnet18`: paper-table1-resnet18, rates by the text; a
    GPU."""
    return paper.some(paper.schedules(by_text(paper.paper_resnet18_cifar10())), paper.THREE)


@grid("paper-text-lstm")
def paper_text_lstm() -> Grid:
    """`regimes ablate paper-text-lstm`: paper-lstm, rates and interval by the text; a GPU."""
    return paper.some(paper.schedules(by_text(paper.paper_lstm())), paper.THREE)
