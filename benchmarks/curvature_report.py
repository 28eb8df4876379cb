"""The report of `benchmarks.curvature` as Markdown: targets, then a table per measurement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# As a share of PyHessian's time, by (probe, method, k).
TARGETS = {
    ("small", "regimes cold", 1): 0.8,
    ("resnet18", "regimes cold", 1): 1.0,
    ("small", "regimes warm", 1): 0.4,
    ("resnet18", "regimes warm", 1): 0.4,
    ("small", "regimes cold", 5): 0.3,
    ("resnet18", "regimes cold", 5): 0.3,
}
FLOOR, ALLOWED = 2.0, 1.1  # of one product, in forward + backward passes


def verdicts(report: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Per target: what, measured, target, met or missed."""
    lines = []

    def judge(what: str, measured: float, limit: float, at_least: bool = False) -> None:
        met = measured >= limit if at_least else measured <= limit
        sign = ">=" if at_least else "<="
        lines.append((what, f"{measured:.2g}", f"{sign} {limit:g}", "met" if met else "missed"))

    for name, result in report["probes"].items():
        ratio = result["products"]["regimes"]["over_forward_backward"]
        judge(f"{name}: product over forward + backward", ratio, FLOOR * ALLOWED)
        for (probe, method, k), limit in TARGETS.items():
            row = result.get(f"top{k}", {}).get(method, {})
            if probe != name or "over_pyhessian" not in row:
                continue
            what = f"{name}: top-{k} {method}"
            judge(f"{what}, time over PyHessian's", row["over_pyhessian"], limit)
            gain = result[f"top{k}"]["PyHessian"]["error"] / max(row["error"], 1e-16)
            judge(f"{what}, times smaller error", gain, 100 if k == 1 else 1, at_least=True)
    return lines


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    columns = head.count("|") + 1
    body = [f"| {head} |", "|" + "---|" * columns, *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(body) + "\n"


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    parts = [
        "# Curvature: products and eigenvalues against other libraries\n",
        f"torch {report['torch']}, {report['machine']}, {report['threads']} thread; "
        + ", ".join(f"{name} {version}" for name, version in report["peers"].items())
        + ". CPU seconds, medians; errors relative, against float64. "
        "`python -m benchmarks.curvature` makes this page and says what is measured.\n",
        "## Targets\n",
        table("what | measured | target | verdict", verdicts(report)),
    ]
    for name, r in report["probes"].items():
        parts += [
            f"## {name}: {r['parameters']} parameters\n",
            f"One product, {r['images']} images; over forward + backward, in the usual memory "
            "layout and in the faster of the two.\n",
            table(
                "method | seconds | over forward + backward | over the faster",
                (
                    [
                        m,
                        f"{p['seconds']:.3f}",
                        f"{p['over_forward_backward']:.2f}",
                        f"{p['over_fastest_layout']:.2f}",
                    ]
                    for m, p in r["products"].items()
                ),
            ),
        ]
        parts += [top_table(r, k) for k in (1, 5) if f"top{k}" in r]
        parts += [frontier_table(r)] if "frontier" in r else []
    return "\n".join(parts)


def top_table(r: dict[str, Any], k: int) -> str:
    rows = (
        [
            m,
            f"{t['seconds']:.2f} ({t['spread'][0]:.2f} to {t['spread'][1]:.2f}, n = {t['runs']})",
            f"{t['products']:g}",
            f"{t['error']:.1e}",
            f"{t['over_pyhessian']:.2f}" if "over_pyhessian" in t else "",
        ]
        for m, t in r[f"top{k}"].items()
    )
    title = f"Top {k}, {r['eigenvalue_images']} images, warm = {r['steps_between']} steps later.\n"
    return title + "\n" + table("method | seconds | products | error | over PyHessian", rows)


def frontier_table(r: dict[str, Any]) -> str:
    rows = (
        [str(c["products"])]
        + [x for e in (c, w) for x in (f"{e['error']:.0e}", f"{e['residual']:.0e}")]
        + [f"{c['over_forward_backward']:.1f}"]
        for c, w in zip(r["frontier"]["cold"], r["frontier"]["warm"], strict=True)
    )
    title = "The largest eigenvalue after each product; cost, graph included, in passes.\n"
    head = "products | cold error | cold residual | warm error | warm residual | cost"
    return title + "\n" + table(head, rows)
