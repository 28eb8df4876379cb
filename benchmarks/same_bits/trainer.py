"""Cases of the trainer: configurations, on one process or several, resumed and branched."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import regimes
from benchmarks.same_bits import states
from benchmarks.same_bits.case import Case, Place
from benchmarks.same_bits.meter import Meter

STOP = 4  # steps after which a run that is resumed is stopped
SHORT = (
    "epochs=3",
    "data.train_size=120",
    "data.test_size=100",
    "policy.interval=1",
    "optimizer.decay_epochs=[2]",
    "device=cpu",
)
TOPK = ("compressor=topk", "levels.low=50", "levels.high=2")
DENSE = ("compressor=dense", "levels={}", "policy=static", "policy.level=dense")
TEXT = (
    "data.name=wikitext-2",
    "data.path=TEXT",
    "data.sequence=10",
    "data.train_size=none",
    "data.drop_last=false",
    "model.width=8",
    "batch_size=3",
    "optimizer.lr=1.0",
)
ALL = (
    "union_pass=false",
    'instruments.norms.readings=["update","global","local-mean","worker0"]',
    "instruments.curvature.probes=2",
    "instruments.curvature.images=40",
    "instruments.curvature.batch=20",
    'instruments.curvature.modes=["eval","batch-statistics"]',
    "instruments.sharpness.images=40",
    "instruments.sharpness.batch=20",
    "instruments.fisher.images=40",
    "instruments.fisher.batch=20",
    "instruments.overlap.count=2",
    "instruments.overlap.batches=[16,32]",
    "instruments.noise.stride=1",
    "instruments.msdr={}",
    "instruments.error.stride=8",
    "instruments.moments.stride=4",
    "instruments.moments-frozen.count=6",
)


class Watch:
    """A reporter that tells a meter of each step, or ends the run; called on process 0."""

    def __init__(self, meter: Meter | None) -> None:
        self.meter, self.steps = meter, 0

    def start(self, *_: Any) -> None: ...
    def epoch(self, *_: Any) -> None: ...
    def stop(self, *_: Any) -> None: ...

    def step(self, *_: Any) -> None:
        if self.meter is not None:
            self.meter.step()
        self.steps += 1
        if self.meter is None and self.steps == STOP:
            os.kill(os.getpid(), signal.SIGTERM)  # the run ends with the unit under way


@dataclass(frozen=True, kw_only=True)
class Run(Case):
    """One configuration: ``smoke`` cut short, and changed. A second stage continues the run, which
    the first one has left within."""

    settings: tuple[str, ...] = ()

    def config(self, text: Path) -> Any:
        given = [setting.replace("TEXT", str(text)) for setting in self.settings]
        return regimes.override(regimes.get_preset("smoke"), [*SHORT, *given])

    def train(self, at: Place) -> None:
        out = at.folder / "run"
        if self.is_last(at):
            self.measure(at, out, lambda watch: self._run(at, watch))
            return
        try:
            self._run(at, Watch(None))
        except regimes.RegimesError as error:
            if error.exit_code != 128 + signal.SIGTERM:
                raise
            return
        raise ValueError("the run was not stopped")

    def measure(self, at: Place, out: Path, run: Callable[[Watch], object]) -> None:
        """Run the last stage, and leave what is compared."""
        meter = Meter(*self.counted)
        run(Watch(meter))
        if at.rank == 0:
            states.write(at.folder, 0, states.of_run(out))
            meter.write(at.folder)

    def _run(self, at: Place, watch: Watch) -> None:
        config, out = self.config(at.text), at.folder / "run"
        resume = at.stage > 0
        regimes.run(config, out, resume=resume, reporters=[watch])


@dataclass(frozen=True, kw_only=True)
class Branch(Run):
    """A run keeps its checkpoints in the first stage; in the second another run branches off.

    Attributes:
        at: the unit where it does.
        length: units of a pulse; None: the branch does not return.
        changes: what is changed there.
    """

    counts: tuple[int, ...] = (1, 1)
    at: int = 1
    length: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    def config(self, text: Path) -> Any:
        return regimes.override(super().config(text), ["checkpoint_keep=all"])

    def train(self, at: Place) -> None:
        if not self.is_last(at):
            regimes.run(self.config(at.text), at.folder / "run")
            return
        out = at.folder / "branch"
        options: dict[str, Any] = {"at": self.at, "length": self.length, "set": self.changes}
        self.measure(
            at,
            out,
            lambda watch: regimes.branch(at.folder / "run", out=out, reporters=[watch], **options),
        )


def _batch(policy: str, *more: str) -> tuple[str, ...]:
    return (
        "batch_levels={low=8,high=16,x1=8,x5=16,x25=24}",
        f"batch_policy={policy}",
        "policy=static",
        *more,
    )


def _compressor(name: str, low: Any, high: Any, *more: str) -> tuple[str, ...]:
    return (f"compressor={name}", f"levels.low={low}", f"levels.high={high}", *more)


def _every(period: int | str, *more: str) -> tuple[str, ...]:
    """Local steps."""
    return (f'sync_policy={{name="static",level="{period}"}}', "policy=static", *more)


DILOCO = ("outer.lr=0.7", "outer.momentum=0.9", "outer.nesterov=true")
STREAMS = (*DILOCO, "outer.fragments=3", "outer.delay=1", "outer.mixing=0.4")
ADAMW = ("optimizer.name=adamw", "optimizer.lr=0.01", "optimizer.clip=1.0")
CURVATURE = ("instruments.curvature.images=40", "instruments.curvature.batch=20")

RUNS = {
    # compressors
    "powersgd": (),
    "powersgd-forgets": ("compressor.reset_on_change=true",),
    "topk": TOPK,
    "topk-sum": (
        *TOPK,
        "compressor.reduction=sum",
        "compressor.error_feedback=false",
        "signal=worker0",
        "data.reshuffle=false",
        "optimizer.lr=0.1",
    ),
    "randomk": _compressor("randomk", 50, 10),
    "sign": (
        "compressor=sign",
        "levels={only=1}",
        "policy=static",
        "policy.level=only",
        "optimizer.lr=0.02",
    ),
    "quantise": _compressor("quantise", 8, 4),
    "cast": _compressor("cast", '"fp16"', '"bf16"'),
    "dense": DENSE,
    "low-pass": _compressor("low-pass", 0.5, 0.1),
    "acp-sgd": ("compressor=acp-sgd",),
    "acp-sgd-twice": ("compressor=acp-sgd", "compressor.iterations=2"),
    "dct-topk": _compressor("dct-topk", 20, 2),
    "fading": (*TOPK, "compressor.error_feedback=0.9"),
    "threshold": _compressor("threshold", 1e-4, 1e-3),
    "chunked-topk": _compressor("chunked-topk", 40, 5, "compressor.chunk=16"),
    "quantised-all-reduce": _compressor("quantised-all-reduce", 8, 4, "compressor.block=16"),
    "update-unit": ("compressor.residual=update",),
    "update-unit-topk": (*TOPK, "compressor.residual=update"),
    "dense-start": ("start_compressing_after=4",),
    # policies
    "windows": ("policy=windows", "policy.windows=[[0,1]]", "policy.outside=dense"),
    "detected": (
        "policy=detected",
        'policy.detector={name="eigenvalue-change",interval=1}',
        *CURVATURE,
    ),
    "adaqs": ("policy=adaqs", "policy.fall=0.1", "levels.mid=2"),
    "error-ladder": ("policy=error-ladder", "policy.error=0.3", "levels.mid=2"),
    "accordion-ladder": ("policy=accordion-ladder", "policy.interval=1", "levels.mid=2"),
    "rate-ladder": ("policy=rate-ladder", "levels.mid=2"),
    "by-layer": (
        "policy=by-layer",
        'policy.groups={"*.weight"={name="accordion",interval=1}}',
    ),
    "l-greco": ("policy=l-greco", 'policy.base={name="static",level="mid"}', "levels.mid=2"),
    "gravac": ("policy=gravac", "policy.gain=0.5", "levels.mid=2"),
    "accordion-batch": _batch('{name="accordion-batch",interval=1}'),
    "smith": _batch('{name="smith"}', "optimizer.decay_epochs=[1,2]"),
    "joint": ("batch_levels={low=8,high=16}", 'batch_policy={name="accordion-batch"}'),
    "budget": ('budget={level="high",epochs=2}', "epochs=6"),
    "unit-steps": ("unit_steps=4", "evaluate_every=2", "checkpoint_every=2"),
    "authors": ("quirks=authors",),
    # signals, instruments
    **{f"signal-{s}": (f"signal={s}",) for s in ("global", "local-mean", "worker0", "movement")},
    "instruments": ALL,
    "instruments-float64": (*ALL, "dtype=float64", *TOPK),
    # passes
    "worker-by-worker": ("union_pass=false",),
    "clipped": ("optimizer.clip=0.5",),
    "channels-last": ("channels_last=true",),
    "bfloat16": ("precision=bfloat16",),
    "bfloat16-parameters": ("dtype=bfloat16",),
    "float64": ("dtype=float64",),
    "buckets": ("bucket_mb=0.02", "union_pass=false"),
    # optimisers
    "adamw": ADAMW,
    "muon": ("optimizer.name=muon", "optimizer.lr=0.01"),
    "own-optimizer": ('optimizer.name="torch.optim:RMSprop"', "optimizer.lr=0.001"),
    "cosine": (
        "optimizer.schedule=cosine",
        "optimizer.per=step",
        "optimizer.warmup_steps=3",
        "optimizer.nesterov=false",
    ),
    # deficits
    **{
        f"deficit-{d}": (f'deficit={{name="{d}",windows=[[0,2]]}}',)
        for d in ("blur", "flip", "noise", "labels", "gradient-noise")
    },
    # models and texts
    "resnet8": ('model={name="resnet8",width=4}', "epochs=2"),
    "lstm": (*TEXT, 'model={name="lstm",width=8,depth=2,dropout=0.2}'),
    "transformer": (*TEXT, 'model={name="transformer",width=8,depth=1}', *TOPK),
    "gpt": (*TEXT, 'model={name="gpt",width=8,depth=1,heads=2}', *ADAMW),
    # local steps
    "local-mean": _every(2),
    "local-topk": (*_every(2), *TOPK, "instruments.spread={}"),
    "local-averaged-momenta": _every(3, "outer.states=average", *ADAMW),
    "local-reset-momenta": _every(3, "outer.states=reset"),
    "local-diloco": _every(3, *DILOCO, *DENSE, *ADAMW),
    "local-parameters": _every(1, "outer.period_one=parameters"),
    "local-post": ("sync_policy=post-local", "sync_levels={low=1,high=3}", "policy=static"),
    "local-qsr": ("sync_policy={name='qsr',alpha=0.3,base=2}", "policy=static"),
    "local-adacomm": ("sync_policy={name='adacomm',base=3}", "policy=static"),
    "local-accordion": (
        "sync_policy={name='accordion',interval=1}",
        "sync_levels={low=1,high=3}",
        "signal=movement/lr",
    ),
    "local-streaming": (*_every(3, *STREAMS), *TOPK),
    "local-streaming-units": _every(4, *STREAMS, "outer.delay=2", "unit_steps=5", *ADAMW),
}
LOCAL = {name for name in RUNS if name.startswith("local")}


def _runs() -> list[Case]:
    found: list[Case] = []
    for name, settings in RUNS.items():
        # a synchronisation is among the counted steps of local ones
        counted = (1, 2) if name in LOCAL else (2, 1)
        found.append(Run(name=name, settings=settings, counted=counted, quick=name in QUICK))
    return found


QUICK = ("powersgd", "topk", "local-streaming")
CASES: list[Case] = [
    *_runs(),
    # resumed, and on several processes
    Run(name="resumed", counts=(1, 1)),
    Run(name="resumed-topk", settings=TOPK, counts=(1, 1)),
    Run(name="resumed-local", settings=(*_every(3, *DILOCO), *TOPK), counts=(1, 1)),
    Run(name="resumed-streaming", settings=RUNS["local-streaming-units"], counts=(1, 1)),
    Run(name="two-processes", counts=(2,), quick=True),
    Run(name="two-processes-buckets", settings=("bucket_mb=0.02",), counts=(2,)),
    Run(
        name="two-processes-topk-float64",
        settings=(*TOPK, "dtype=float64", "bucket_mb=0.02"),
        counts=(2,),
    ),
    Run(name="two-processes-instruments", settings=(*ALL, "dtype=float64"), counts=(2,)),
    Run(name="two-processes-resumed", settings=("bucket_mb=0.02",), counts=(2, 2)),
    Run(name="two-processes-then-four", settings=TOPK, counts=(2, 4)),
    Run(name="two-processes-adamw", settings=(*ADAMW, "workers=2"), counts=(2,)),
    Run(name="two-processes-local", settings=RUNS["local-diloco"], counts=(2,), counted=(1, 2)),
    Run(
        name="two-processes-streaming",
        settings=RUNS["local-streaming-units"],
        counts=(2,),
        counted=(1, 4),  # to the end of the unit, when nothing is under way
    ),
    # branches
    Branch(name="branch-null"),
    Branch(name="branch-pulse", length=1, changes={"policy": {"name": "static"}}, quick=True),
    Branch(
        name="branch-compressor",
        changes={"compressor": "topk", "levels.low": 50, "levels.high": 2},
    ),
    Branch(name="branch-optimizer", changes={"optimizer.name": "adamw", "optimizer.lr": 0.01}),
    Branch(
        name="branch-local",
        changes={"sync_policy": {"name": "static", "level": "2"}, "policy": {"name": "static"}},
        length=1,
    ),
    Branch(name="branch-batch", changes={"batch_size": 5}),
    Branch(name="branch-two-processes", counts=(1, 2), changes={"start_compressing_after": 4}),
]
