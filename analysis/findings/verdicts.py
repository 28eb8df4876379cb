"""Verdicts: what an interval says of an effect, and of a sentence that expects one. Numbers only.

The *verdict* is decided by the 95 % t interval of the mean effect, relative to zero (`Claim.base`)
and to the margin, the smallest effect that matters. It is one of six:

- *better*: above zero, and an effect as large as the margin is not excluded;
- *better, within the margin*: above zero and below the margin, so too small to matter;
- *equivalent*: contains zero and lies between minus the margin and the margin;
- *worse, within the margin*, and *worse*: the same below zero;
- *open*: contains zero and an effect that matters; more seeds are needed.

A sentence expects *more* (an effect that matters) or *no less* (no decrease larger than the
margin). More is *supported* if the effect is better, also after Holm's correction within the
family, and its mean at least the margin; *contradicted* if the interval lies below the margin; open
otherwise. A sentence about networks of a quality that the runs do not reach cannot be contradicted
by them: it is *not reproduced at this scale*. So a claim of no effect is decided by the interval
alone, and a claim of an effect must also hold after correction.
"""

from __future__ import annotations

from typing import Literal

Verdict = Literal[
    "better", "better, within the margin", "equivalent", "worse, within the margin", "worse", "open"
]
Expect = Literal["more", "no less"]
NOT_REPRODUCED: Literal["not reproduced at this scale"] = "not reproduced at this scale"
Outcome = Literal["supported", "contradicted", "not reproduced at this scale", "open"]
ALPHA = 0.05  # a difference with a larger p is not called better


def verdict(low: float, high: float, margin: float) -> Verdict:
    """What an interval says about a difference from zero; open where there is none (nan).

    >>> verdict(-0.97, -0.02, 1), verdict(0.29, 1.25, 1), verdict(-0.6, 2.1, 1)
    ('worse, within the margin', 'better', 'open')
    """
    if not low <= high:
        return "open"
    within = -margin < low and high < margin
    if low > 0:
        return "better, within the margin" if within else "better"
    if high < 0:
        return "worse, within the margin" if within else "worse"
    return "equivalent" if within else "open"


def outcome(
    expect: Expect, low: float, high: float, margin: float, p: float, reached: bool = True
) -> Outcome:
    """Whether a sentence is supported.

    Args:
        p: of no effect, corrected for the family.
        reached: whether the runs are of the quality that the sentence is about.

    >>> outcome("more", 0.29, 1.25, 1, 0.01), outcome("more", 0.29, 2.25, 1, 0.01)
    ('open', 'supported')
    >>> outcome("no less", -0.97, -0.02, 1, 0.04), outcome("more", -0.97, -0.02, 1, 0.04)
    ('supported', 'contradicted')
    >>> outcome("more", -0.97, -0.02, 1, 0.04, reached=False)
    'not reproduced at this scale'
    """
    against: Outcome = "contradicted" if reached else NOT_REPRODUCED
    if expect == "no less":  # the other side is not more
        other = outcome("more", -high, -low, margin, p)
        return {"supported": against, "contradicted": "supported"}.get(other, "open")
    if high < margin:
        return against
    significant = (
        verdict(low, high, margin) == "better" and p < ALPHA and (low + high) / 2 >= margin
    )
    return "supported" if significant else "open"
