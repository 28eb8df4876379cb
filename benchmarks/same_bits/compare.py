"""What two trees have left of a case, held against each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINES = ("epochs.jsonl", "instruments.jsonl", "rows-*.jsonl")
TABLES = ("run.json", "weights-*.json")
HARDWARE = {"code", "machine"}  # of run.json, which may differ
SHOWN = 6  # differences of a case that are listed
MORE_MEMORY = 1.01  # a step may hold and take so many times the bytes
# What a step costs, and the word for it. Launches and collectives may not grow at all.
COSTS = {"launches": 1.0, "collectives": 1.0, "held": MORE_MEMORY, "peak": MORE_MEMORY}


def differences(before: Path, after: Path) -> Iterator[tuple[str, str]]:
    """(dotted field, file and line) of everything that is not the same."""
    for pattern in LINES:
        for name in _names(pattern, before, after):
            yield from _lines(name, *_texts(name, before, after))
    for pattern in TABLES:
        for name in _names(pattern, before, after):
            texts = _texts(name, before, after)
            if texts[0] != texts[1]:
                tables = [json.loads(text or b"{}") for text in texts]
                for field in _fields(*tables):
                    if field.partition(".")[0] not in HARDWARE:
                        yield field, name


def _names(pattern: str, *folders: Path) -> list[str]:
    """Files of either folder, with the folder within."""
    found = {file.relative_to(f).as_posix() for f in folders for file in f.rglob(pattern)}
    return sorted(found)


def _texts(name: str, *folders: Path) -> list[bytes]:
    return [(f / name).read_bytes() if (f / name).exists() else b"" for f in folders]


def _lines(name: str, before: bytes, after: bytes) -> Iterator[tuple[str, str]]:
    if before == after:
        return
    old, new = before.splitlines(), after.splitlines()
    if len(old) != len(new):
        yield "(number of lines)", f"{name}: {len(old)} and {len(new)}"
    for number, pair in enumerate(zip(old, new, strict=False), start=1):
        if pair[0] != pair[1]:
            fields = list(_fields(*map(json.loads, pair))) or ["(spelling)"]
            yield from ((field, f"{name} line {number}") for field in fields)


def _fields(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Names, dotted, of what differs in two tables."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from _fields(a.get(key), b.get(key), f"{where}.{key}".lstrip("."))
    elif json.dumps(a) != json.dumps(b):
        yield where


def costs(before: Path, after: Path, on_purpose: dict[str, str]) -> tuple[list[str], str]:
    """(what has grown too much, all of it in short)."""
    tables = [json.loads((f / "counts.json").read_text()) for f in (before, after)]
    grown, words = [], []
    for name, most in COSTS.items():
        old, new = (table[name] for table in tables)
        if old is None or new is None:
            continue
        words.append(f"{name} {old}" if old == new else f"{name} {old} -> {new}")
        if new > old * most and name not in on_purpose:
            grown.append(f"{name} {old} -> {new}")
    return grown, ", ".join(words)


def compare(before: Path, after: Path, on_purpose: dict[str, str]) -> tuple[bool, str]:
    """(as expected?, one line) of a case.

    Args:
        on_purpose: fields that may differ, costs that may grow.
    """
    for side, folder in (("base", before), ("present", after)):
        if error := folder.with_name(f"{folder.name}.done").read_text():
            return False, f"FAILED in the {side} tree: {error.strip().splitlines()[-1]}"
    found: dict[str, str] = {}
    for field, place in differences(before, after):
        found.setdefault(field, place)
    values = sum(len(json.loads(f.read_bytes())) for f in after.glob("weights-*.json"))
    if not values:
        return False, "FAILED: no weights to compare"
    grown, spent = costs(before, after, on_purpose)
    wrong = {field: place for field, place in found.items() if field not in on_purpose}
    said = [f"{field} ({place})" for field, place in list((wrong or found).items())[:SHOWN]]
    more = f" and {len(wrong or found) - SHOWN} more" if len(wrong or found) > SHOWN else ""
    text = "; ".join(said) + more
    if wrong:
        return False, f"DIFFERS: {text}"
    if grown:
        return False, f"MORE: {', '.join(grown)}"
    return True, f"same{f' but {text}' if found else ''}, {values} values; {spent}"
