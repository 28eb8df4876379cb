"""What works with what: declared capabilities beside the hand-written matrices that they replace.

Oracle: ``tests/shared/combinations.json``, what the code of commit 62ffe26 answered to each part in
each mode; and, by hand, which modes the sentences of a column name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import combinations
import pytest
import torch
from combinations import CHANGED, attached, configuration, settings, stepped
from torch import Tensor, nn

import regimes
from regimes import RunConfig, compression, override
from regimes.base import capabilities
from regimes.base.capabilities import MEANING, Mode, Part
from regimes.base.config import recorded
from regimes.base.errors import ConfigError, RegimesError
from regimes.base.precision import is_half
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression.scatter import QuantisedScatter
from regimes.hook import attaching
from regimes.hook.local import starting
from regimes.instruments.base import MeasurementContext
from regimes.instruments.gradient_norm import PER_WORKER
from regimes.instruments.needs import statistic_needs
from regimes.instruments.panel import choose_instruments
from regimes.training.plug_ins import PlugIns

RECORDED = json.loads(Path(combinations.__file__).with_suffix(".json").read_text())


def refused(call: Callable[[], Any]) -> str:
    """The sentence; empty where it works."""
    try:
        call()
    except RegimesError as error:
        return str(error)
    return ""


def mean_square(model: nn.Module, *batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def measured(chosen: Any, needs: Any, signal: Any, workers: int, **more: Any) -> None:
    """Choose instruments as a run does that has workers, but no training."""
    dtype = more.pop("dtype", torch.float32)
    model = nn.Linear(3, 2).to(dtype)
    layers = [Layer(name, tuple(p.shape)) for name, p in model.named_parameters()]
    batches = [(torch.ones(2, 3, dtype=dtype), torch.zeros(2, dtype=torch.int64))]
    context = MeasurementContext(
        model,
        mean_square,  # type: ignore[arg-type]
        World(workers),
        layers,
        0,
        more.pop("union", False),
        lambda *_: batches,
        lambda *_: batches,
        **more,
    )
    choose_instruments(chosen, needs, signal, context)


def trained(mode: str, part: str) -> None:
    _, processes, device = combinations.TRAINER[mode]
    config = configuration(mode, part)
    plug_ins = PlugIns.from_config(config)
    plug_ins.check(plug_ins.modes(torch.device(device), processes))
    dtype, local = getattr(torch, config.dtype), config.sync_policy is not None
    own = local or is_half(dtype) or config.signal in PER_WORKER
    measured(
        config.instruments,
        plug_ins.policy_needs,
        config.signal,
        config.workers,
        dtype=dtype,
        union=config.union_pass and plug_ins.compressor.linear and not own,
        compressor=plug_ins.compressor,
        levels=config.levels,
        optimizer=lambda: (0.1, [0.0, 0.0]),
        is_local=(lambda: True) if local else None,
    )


def attach(mode: str, part: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given: dict[str, dict[str, Any]] = {
        "DDP": {},
        "DDP with an optimiser": {"optimizer": optimizer},
        "DDP with counted units": {"optimizer": optimizer, "every": 5},
        "FSDP2": {"replicas": object()},
    }
    words = {**given[mode], **attached()[part]}
    if not words.keys() & {"shards", "compressor", "policy"}:
        words["policy"] = "accordion"
    regimes.attach(model, **words)


def local_steps(mode: str, part: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given: dict[str, dict[str, Any]] = {
        "processes": {},
        "FSDP2": {"replicas": object()},
    }
    regimes.local_steps(model, optimizer, **given[mode], **stepped()[part])


class Made:
    """In place of what a job is made of, once its arguments are checked."""

    closed, local = True, (torch.ones(1),)

    by_process = False
    nodes = None

    world = SimpleNamespace(rank=1)

    def __init__(self, model: Any = None, *_: Any, **__: Any) -> None:
        self.network = model

    def make_world(self, timeout: float) -> None: ...

    def choose_nodes(self, *_: Any) -> None: ...


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Hook", "DDPGradients", "ShardedGradients", "FSDPModules"):
        monkeypatch.setattr(attaching, name, Made)
    for name in ("LocalSteps", "check_trained"):
        monkeypatch.setattr(starting, name, Made)


CALLS = {"trainer": trained, "attach": attach, "local_steps": local_steps}
MODES = [(call, mode) for call, modes in RECORDED["refused"].items() for mode in modes]

# The modes that the refusals of a column name, beside those of a simulated run.
SIMULATED = {"without a sync_policy", "in one pass of all workers"}
HOOK, OWN = (
    {"in a hook", "without a probe"},
    {"in local_steps", "with fragments, a delay or mixing"},
)
LOCALLY = {"with a sync_policy"}
NAMED: dict[str, set[str]] = {
    "trainer, simulated": SIMULATED | {"on a CPU"},
    "trainer, one worker": SIMULATED | {"on a CPU"},
    "trainer, separate passes": {"without a sync_policy", "on a CPU"},
    "trainer, processes": SIMULATED | {"on several processes"},
    "trainer, local steps": LOCALLY,
    "trainer, mixed periods": LOCALLY | {"with periods of 1 and longer ones"},
    "trainer, streaming": OWN - {"in local_steps"} | LOCALLY,
    "trainer, half precision": LOCALLY
    | {"with half precision", "without a sync_policy", "on a CPU"},
    "trainer, own objects": SIMULATED | {"with data and a model of your own", "on a CPU"},
    "trainer, a GPU": SIMULATED,
    "trainer, graphs": SIMULATED | LOCALLY | {"with compile", "with the compressor 'threshold'"},
    "attach, DDP": HOOK | {"without an optimizer"},
    "attach, DDP with an optimiser": HOOK,
    "attach, DDP with counted units": HOOK | {"with every"},
    "attach, FSDP2": HOOK | {"without an optimizer", "with a sharded model"},
    "local_steps, processes": OWN,
    "local_steps, FSDP2": OWN | {"with a sharded model"},
}
TABLE = [mode for mode in vars(capabilities).values() if isinstance(mode, Mode)]
REASONS = {f"{mode.name}: {why}": mode.name for mode in TABLE for why in mode.lacks.values()}
TAKEN_AWAY = re.compile("(with the compressor 'threshold'): .+")
# what is no part of a run at all: an instrument of a hook
ABSENT = re.compile(r"instruments: '\w+': .*Known: .+")


def find_mode(said: str) -> str | None:
    """The mode that a sentence names; its words are those of the table. None: what it asks for does
    not exist."""
    if ABSENT.fullmatch(said):
        return None
    asked = re.match(r"[\w.]+( = .+)?: expected .+? (?=(in|on|with|without) )", said)
    assert asked, said
    for sentence, mode in REASONS.items():
        if said.endswith(f" {sentence}"):
            return mode
    taken = TAKEN_AWAY.search(said)
    assert taken, said
    return taken[1]


@pytest.mark.parametrize(("call", "mode"), MODES, ids=lambda word: word)
def test_the_same_is_refused_as_by_hand(call: str, mode: str, made: None) -> None:
    parts = {"trainer": settings, "attach": attached, "local_steps": stepped}[call]()
    known: list[str] = RECORDED["parts"][call]
    named: set[str | None] = set()
    assert {*known} <= {*parts}
    for part in known:
        said = refused(partial(CALLS[call], mode, part))
        before = part in RECORDED["refused"][call][mode]
        assert bool(said) == (before != ((call, mode, part) in CHANGED)), (part, said)
        named.update({find_mode(said)} if said else ())
    assert named - {None} == NAMED[f"{call}, {mode}"]


# -- closed form ------------------------------------------------------------------------------


def test_modes_together_offer_what_each_of_them_offers() -> None:
    one, other = Mode("in one", {"probe": "one"}), Mode("in another", {"samples": "another"})
    both = one.offers & other.offers
    for need in MEANING:
        part = Part("field", {need})
        said = refused(partial(capabilities.check, [part], [one, other]))
        assert bool(said) == (need not in both)


# -- sentences -------------------------------------------------------------------------------------


def test_no_sentence_offers_what_only_records_name() -> None:
    """The study measures it, which an installation of the toolkit alone does not have."""
    assert statistic_needs().keys() & recorded.RECORDED["instrument"].keys() == set()
    assert {"eigenvalue", "residual"} <= statistic_needs().keys()


def test_a_sentence_names_field_value_what_works_mode_and_reason() -> None:
    mode = Mode("on paper", {"probe": "there is nothing to measure"})
    needs = {"a": frozenset({"probe"}), "b": frozenset({"samples"}), "c": frozenset()}
    parts = {
        "instruments.a: expected none": Part("instruments.a", {"probe"}),
        "compile = True: expected false": Part("compile", {"probe"}, True, "false"),
        "policy = 'a': expected b or c": Part("policy", {"probe"}, "a", "one", lambda: needs),
        "policy = 'a': expected one": Part(
            "policy", {"probe"}, "a", "one", lambda: {"a": {"probe"}}
        ),
    }
    for said, part in parts.items():
        sentence = f"{said} on paper: there is nothing to measure"
        assert refused(partial(capabilities.check, [part], [mode])) == sentence


def test_every_reason_is_one_sentence_of_a_known_capability() -> None:
    assert len(TABLE) >= 20
    lacked = {need: mode.name for mode in TABLE for need in mode.lacks}
    assert {*lacked} == {*MEANING}  # a capability that all modes offer separates nothing
    for mode in TABLE:
        for why in mode.lacks.values():
            assert why.strip(" .\n") == why


def test_what_one_call_chooses_has_a_name_and_is_refused_elsewhere(made: None) -> None:
    table = compression.REGISTRY.table(QuantisedScatter())
    assert table["name"] == "quantised-scatter"
    assert table["name"] not in compression.REGISTRY  # no list offers it
    assert compression.make_compressor(table) == QuantisedScatter()
    model = nn.Linear(3, 2)
    said = refused(
        lambda: regimes.attach(model, compressor={"name": "quantised-scatter", "level": 8})
    )
    assert "without shards: it is for what FSDP2 exchanges" in said


# -- plug-ins of users -----------------------------------------------------------------------------


class Quiet:
    """Declares nothing, as those of version 0.3."""


class Demanding:
    requires = frozenset({"whole_layers"})
    takes_away: ClassVar[dict[str, str]] = {"several_workers": "it asks for one"}


class Misspelt:
    requires = frozenset({"whole_layer"})
    takes_away: ClassVar[dict[str, str]] = {"several_worker": "it asks for one"}


def test_a_plug_in_declares_by_attributes() -> None:
    assert capabilities.declared_needs(Quiet()) == frozenset()
    assert capabilities.declared_needs(Quiet(), {"samples"}) == {"samples"}
    assert capabilities.declared_needs(Demanding()) == {"whole_layers"}
    assert capabilities.mode_of(Quiet(), "with it").offers == {*MEANING}
    assert capabilities.mode_of(Demanding(), "with it").lacks == Demanding.takes_away
    with pytest.raises(ConfigError, match=r"Misspelt.requires: 'whole_layer': did you mean 'whole"):
        capabilities.declared_needs(Misspelt())
    with pytest.raises(
        ConfigError, match=r"takes_away: 'several_worker': did you mean 'several_workers'"
    ):
        capabilities.mode_of(Misspelt(), "with it")


class Bare:
    """A deficit of a package that keeps the contract without the base class."""

    windows = ()

    def inputs(self, x: Any, *_: Any) -> Any:
        return x

    labels = updates = inputs


def test_a_deficit_that_declares_nothing_may_change_updates() -> None:
    config = override(RunConfig(), combinations.LOCAL)
    with_it = replace(config, deficit={"name": "package:Bare"})
    plug_ins = replace(PlugIns.from_config(config), config=with_it, deficit=Bare())  # type: ignore[arg-type]
    sentence = refused(lambda: plug_ins.check(plug_ins.modes()))
    assert sentence.startswith("deficit = 'package:Bare': expected none with")
