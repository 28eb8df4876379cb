"""Every part beside every mode, as users write them: settings of a configuration, or arguments of a
call. ``combinations.json`` has what the hand-written matrices of commit 62ffe26 said of each pair.
"""

from __future__ import annotations

from typing import Any

from regimes import compression, instruments, policies
from regimes.base.config import RunConfig, override
from regimes.data import deficits

# Where the answer is another one on purpose since then: (call, mode, part) -> why.
BY_PARTS = "the error is added up over the parts of a layer"
WHOLE = "weights are gathered for a measurement"
CHANGED: dict[tuple[str, str, str], str] = {
    **{("attach", "FSDP2", f"instrument {name}"): WHOLE for name in ("curvature", "sharpness")},
    ("attach", "FSDP2", "policy that reads error:low"): BY_PARTS,
    ("local_steps", "FSDP2", "policy that reads error:low"): BY_PARTS,
    ("attach", "FSDP2", "scaler"): "a scale of the loss was refused, and not undone",
}

COMPRESSORS = (*compression.REGISTRY, "dct-topk", "low-pass", "threshold")  # the study's as well

# -- the trainer: settings -------------------------------------------------------------------------

LOCAL = ("sync_levels={low=2,high=8}", "sync_policy={name='static',level='high'}")
MIXED = ("sync_levels={low=1,high=8}", "sync_policy={name='post-local'}")
EIGENVALUE = "policy={name='detected',detector={name='eigenvalue-change'}}"

# mode -> (settings, processes, device)
TRAINER: dict[str, tuple[tuple[str, ...], int, str]] = {
    "simulated": ((), 1, "cpu"),
    "one worker": (("workers=1",), 1, "cpu"),
    "separate passes": (("union_pass=false",), 1, "cpu"),
    "processes": ((), 2, "cpu"),
    "local steps": (LOCAL, 1, "cpu"),
    "mixed periods": (MIXED, 1, "cpu"),
    "streaming": ((*LOCAL, "outer.fragments=2"), 1, "cpu"),
    "half precision": (("dtype=bfloat16",), 1, "cpu"),
    "own objects": (("data.name=own",), 1, "cpu"),
    "a GPU": ((), 1, "cuda"),
    "graphs": (("graphs=2",), 1, "cuda"),
}


def settings() -> dict[str, tuple[str, ...]]:
    """The parts of a configuration, by name."""
    parts: dict[str, tuple[str, ...]] = {}
    for name in COMPRESSORS:
        usual = dict(compression.make_compressor({"name": name}).usual) or dict.fromkeys(
            ("low", "high"), "dense"
        )
        levels = tuple(f"levels.{word}={level!r}" for word, level in usual.items())
        parts[f"compressor {name}"] = (f"compressor={{name='{name}'}}", *levels)
    parts["residual in updates"] = ("compressor={name='topk',residual='update'}",)
    for name in (*policies.REGISTRY, "accordion-ladder", "error-ladder", "gravac"):
        # one is made of other policies, one decides periods alone
        if name not in ("by-layer", "qsr"):
            parts[f"policy {name}"] = (f"policy={{name='{name}'}}",)
    parts["policy that reads curvature"] = (EIGENVALUE,)
    for name in instruments.REGISTRY:
        if name != "overlap":  # then of the study's package
            parts[f"instrument {name}"] = (f"instruments={{{name}={{}}}}",)
    for name in deficits.REGISTRY:
        parts[f"deficit {name}"] = (f"deficit={{name='{name}',windows=[[0,1]]}}",)
    for signal in ("update", "global", "local-mean", "worker0", "movement", "movement/lr"):
        parts[f"signal {signal}"] = (f"signal={signal}",)
        parts[f"reading {signal}"] = (f"instruments={{norms={{readings=['{signal}']}}}}",)
    for kind in ("adamw", "muon"):
        parts[f"optimizer {kind}"] = (f"optimizer.name={kind}",)
    return parts | {
        "branch": ("branch.of='trunk'", "branch.at=1"),
        "compile": ("compile=true",),
        "channels_last": ("channels_last=true",),
        "float64": ("dtype=float64",),
        "bfloat16": ("dtype=bfloat16",),
        "float16": ("dtype=float16",),
        "sync_policy": LOCAL,
        "graphs": ("graphs=2",),
        "outer": ("outer.lr=0.7",),
        "outer.states average": ("outer.states=average",),
        "outer.states reset": ("outer.states=reset",),
        "batch_policy": (
            "batch_levels={low=8,high=16}",
            "batch_policy={name='static',level='low'}",
        ),
        "data.augment": ("data.augment=true",),
        "model.width": ("model.width=4",),
    }


_WORDS = (
    *("levels.mid=2", "levels.inside=4", "levels.outside=1", "levels.before=4", "levels.after=1"),
    *("levels.x1=4", "levels.x5=2", "levels.x25=1", "levels.local=1", "levels.1=4"),
)


def configuration(mode: str, part: str) -> RunConfig:
    """The smallest preset in a mode of the trainer, with a part."""
    given = settings()[part]
    base = [
        s for s in TRAINER[mode][0] if not any(s.split("=")[0] == g.split("=")[0] for g in given)
    ]
    return override(RunConfig(), [*(_WORDS if part.startswith("policy") else ()), *base, *given])


# -- calls in a user's own loop: arguments ---------------------------------------------------------

HOOKS = ("DDP", "DDP with an optimiser", "DDP with counted units", "FSDP2")


def attached() -> dict[str, dict[str, Any]]:
    """Arguments of ``attach``, by the name of the part."""
    parts: dict[str, dict[str, Any]] = {"nothing": {}}
    for name in COMPRESSORS:
        parts[f"compressor {name}"] = {"compressor": name, **_levels(name)}
    parts["residual in updates"] = {"compressor": {"name": "topk", "residual": "update"}}
    parts |= _policies("policy")
    for signal in ("update", "global", "local-mean", "worker0", "movement", "movement/lr"):
        parts[f"signal {signal}"] = {"signal": signal}
    for name in ("curvature", "sharpness", "fisher", "noise"):
        parts[f"instrument {name}"] = {"instruments": {name: {}}, "probe": PROBE}
    return parts | {"scaler": {"scaler": SCALER}}


def stepped() -> dict[str, dict[str, Any]]:
    """Arguments of ``local_steps``, by the name of the part."""
    parts: dict[str, dict[str, Any]] = {"nothing": {}}
    for name in COMPRESSORS:
        level = next(iter(compression.make_compressor({"name": name}).usual.values()), "dense")
        parts[f"compressor {name}"] = {"compressor": name, "level": level}
    parts["residual in updates"] = {
        "compressor": {"name": "topk", "residual": "update"},
        "level": 1,
    }
    parts |= _policies("periods")
    return parts | {
        "outer.states average": {"outer": {"states": "average"}},
        "outer.states reset": {"outer": {"states": "reset"}},
        "fragments": {"outer": {"fragments": 2}},
        "fragments, states average": {"outer": {"fragments": 2, "states": "average"}},
        "delay": {"outer": {"delay": 1}, "policy": 8},
        "mixing": {"outer": {"mixing": 0.5}},
    }


class Scaler:
    """Stands in for a GradScaler."""

    def get_scale(self) -> float:
        return 1.0


SCALER = Scaler()


def mean_loss(model: Any, batch: Any) -> Any:
    return model(batch).mean()


def _probe() -> Any:
    import torch

    return mean_loss, torch.ones(2, 3)


PROBE = _probe()


def _levels(name: str) -> dict[str, Any]:
    usual = compression.make_compressor({"name": name}).usual
    return {} if usual else {"levels": {"low": "dense", "high": "dense"}}


def _policies(kind: str) -> dict[str, dict[str, Any]]:
    """A policy for each statistic, and those that read something else."""
    words = (
        {"low": 2, "mid": 4, "high": 8} if kind == "periods" else {"low": 4, "mid": 2, "high": 1}
    )
    table = {"name": "detected", "detector": {"name": "change"}}
    parts: dict[str, dict[str, Any]] = {}
    for name in STATISTICS:
        read = {**table, "detector": {"name": "change", "statistic": name}}
        parts[f"policy that reads {name}"] = {"policy": read}
    parts["policy adaqs"] = {
        "policy": {"name": "adaqs"},
        ("periods" if kind == "periods" else "levels"): words,
    }
    parts["policy adacomm"] = {"policy": {"name": "adacomm"}} if kind == "periods" else {}
    return {name: given for name, given in parts.items() if given}


STATISTICS = (
    "norm",
    "eigenvalue",
    "hessian_trace",
    "fisher_trace",
    "critical_sharpness",
    "noise_scale",
    "diversity",
    "msdr",
    "error:low",
    "spread",
    "rivals",
)
