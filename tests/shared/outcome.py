"""How a stranger's input ends: fine, or refused in a sentence. All else is a failure."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

from regimes.base.errors import RegimesError

seen: Counter[str] = Counter()  # "KIND fine" and "KIND refused", of all that was tried


def one_sentence(kind: str, work: Callable[[], object]) -> bool:
    """Was it fine? What is no RegimesError is a failure, and so is one without words."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
    except RegimesError as error:
        if not str(error).strip() or "Traceback" in str(error):
            raise AssertionError(f"{error!r} is no sentence") from error
        seen[f"{kind} refused"] += 1
        return False
    seen[f"{kind} fine"] += 1
    return True
