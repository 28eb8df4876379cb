"""A call as version 0.4 had it does what the present spelling does, and says it (oracle: pairs,
written by hand; both train to the same bits)."""

from __future__ import annotations

import inspect
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import regimes
from regimes.base.errors import ConfigError
from regimes.compression import REGISTRY, make_compressor
from regimes.hook import attaching
from regimes.job.spellings import EARLIER

pytestmark = pytest.mark.usefixtures("one_process")

# the arguments of both functions in version 0.4
ATTACH = [
    *("model", "replicas", "shards", "scatter", "gather", "policy", "compressor", "level"),
    *("levels", "signal", "seed", "start_compressing_after", "optimizer", "every", "record"),
    *("scaler", "instruments", "probe", "timeout", "check_every", "check_cosine", "summary"),
    "compare_weights",
]
LOCAL = [
    *("model", "optimizer", "replicas", "policy", "periods", "outer", "compressor", "level"),
    *("levels", "level_policy", "every", "record", "seed", "timeout", "instruments"),
    *("check_every", "check_cosine", "summary", "compare_weights"),
]

LEVELS = {"cast": "bf16", "sign": 1}
RECORD = {
    "instruments": {"sharpness": {}},
    "probe": (lambda model, batch: model(batch).square().mean(), torch.ones(4, 5)),
    "check_every": 2,
    "check_cosine": 0.5,
    "summary": False,
    "compare_weights": False,
}


def level_of(name: str) -> Any:
    return make_compressor({"name": name}).usual.get("high", LEVELS.get(name, 8))


def test_every_argument_of_version_0_4_is_taken() -> None:
    for function, names in ((regimes.attach, ATTACH), (regimes.local_steps, LOCAL)):
        present = inspect.signature(function).parameters
        assert {*names} - {*present} == {*EARLIER[function.__name__]} & {*names}
        assert not {*present} & {*EARLIER[function.__name__]}


def pairs() -> list[Any]:
    """(earlier arguments, present arguments)."""
    found: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    for name in REGISTRY:
        level = level_of(name)
        one = {"compressor": name, "level": level}
        several = {"compressor": name, "levels": {"low": "dense", "high": level}}
        static = {"policy": {"name": "static", "level": "high"}}
        cls = REGISTRY.load(name)
        now = {"compressor": cls(**{cls.level_word: level})}
        each = {"compressor": cls(**{cls.level_word: several["levels"]})} | static
        found += [
            (f"{name}, one", one, now),
            (f"{name}, an object", {"compressor": cls(), "level": level}, now),
            (f"{name}, several", several | static, each),
        ]
    low, high = regimes.PowerSGD(rank=2), regimes.PowerSGD(rank=1, error_feedback=False)
    own = {"low": 2, "high": {"level": 1, "error_feedback": False}}
    accordion = {"name": "accordion", "interval": 1}
    found += [
        ("as a table", {"level": 1}, {"compressor": {"name": "powersgd", "level": 1}}),
        ("no compressor", {"level": 2}, {"compressor": regimes.PowerSGD(rank=2)}),
        (
            "of a policy",
            {"levels": own, "policy": accordion},
            {"policy": regimes.Accordion(interval=1, low=low, high=high)},
        ),
        (
            "of a policy, dense",
            {"levels": {"low": "dense", "high": 1}, "policy": accordion},
            {"policy": regimes.Accordion(interval=1, low=regimes.Dense(), high=replaced(high))},
        ),
        (
            "of windows",
            {"levels": {"low": 2, "high": 1}, "policy": regimes.Windows(((0, 1),))},
            {"policy": regimes.Windows(((0, 1),), inside=low, outside=replaced(high))},
        ),
    ]
    for size in (1, 6):
        for names in itertools.combinations(RECORD, size):
            if size == 1 and names[0] in ("probe", "instruments", "check_cosine"):
                continue  # which need another one
            given = {name: RECORD[name] for name in names}
            about = {"record": regimes.RecordOptions(**given)}
            now = {"compressor": regimes.PowerSGD(rank=2), **about}
            found.append((", ".join(names), {"level": 2, **given}, now))
    return [pytest.param(old, new, id=name) for name, old, new in found]


def replaced(compressor: regimes.PowerSGD) -> regimes.PowerSGD:
    return regimes.PowerSGD(rank=compressor.rank)


def trained(given: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor], list[str]]:
    """What the job is, the weights after two units, and what was warned of."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        hook = regimes.attach(model, optimizer=optimizer, **given)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        if step % 2:
            hook.epoch_end()
    options = hook.summarizes, hook.compares_weights
    header = {k: v for k, v in hook.header.items() if k not in ("created", "code")}
    about = {"facts": hook.chosen.shared_facts(), "header": header, "options": options}
    rows = [{k: v for k, v in row.items() if k in ("layers", "statistics")} for row in hook.rows]
    hook.close()
    said = [str(one.message) for one in heard if one.category is FutureWarning]
    return {**about, "rows": rows}, [p.detach() for p in model.parameters()], said


@pytest.mark.parametrize(("earlier", "present"), pairs())
def test_both_spellings_do_the_same(earlier: dict[str, Any], present: dict[str, Any]) -> None:
    was, weights, said = trained(earlier)
    now, others, silent = trained(present)
    assert was == now
    assert all(map(torch.equal, weights, others))
    assert len(said) == 1, said
    assert silent == []
    assert "is spelled attach(model, " in said[0]


def test_what_was_left_out_by_its_default_is_left_out() -> None:
    """These were None in version 0.4 unless somebody chose."""
    usual = dict.fromkeys(("replicas", "shards", "scatter", "gather"))
    was, weights, said = trained(usual)
    now, others, _ = trained({})
    assert was == now
    assert all(map(torch.equal, weights, others))
    assert said == []


def test_the_sentence_is_the_present_spelling(tmp_path: Path) -> None:
    """What it shows can be pasted."""
    given = {"compressor": "topk", "level": 5, "summary": False, "record": tmp_path}
    *_, said = trained(given)
    assert (
        "is spelled attach(model, compressor=TopK(percent=5), record=RecordOptions(folder, "
        "summary=False)) now" in said[0]
    )


@pytest.mark.parametrize(
    ("given", "function", "arguments"),
    [
        ({"replicas": "R"}, "attach_replicas", {}),
        ({"shards": "S", "scatter": {"level": 4}}, "attach_shards", {"scatter": {"level": 4}}),
        (
            {"shards": "S", "compressor": "topk", "level": 1, "gather": {"level": 8}},
            "attach_shards",
            {"compressor": {"name": "topk", "level": 1}, "gather": {"level": 8}},
        ),
        ({"replicas": "R", "shards": "S"}, "attach_replicas", {"gather": {}}),
        (
            {"replicas": "R", "shards": "S", "scatter": {"level": 8}, "levels": {"low": 4}},
            "attach_replicas",
            {
                "scatter": {"level": 8},
                "gather": {},
                "compressor": {"name": "powersgd", "levels": {"low": 4}},
            },
        ),
    ],
)
def test_each_kind_of_model_has_its_function(
    given: dict[str, Any],
    function: str,
    arguments: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    class Made:
        class world:
            rank = 0

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return Made

    monkeypatch.setattr(attaching, function, called)
    with pytest.warns(FutureWarning, match=rf"is spelled {function}\(model, mesh"):
        regimes.attach(nn.Linear(1, 1), **given)
    ((args, kwargs),) = calls
    assert (args[1], kwargs) == (given.get("replicas", given.get("shards")), arguments)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"level": 4, "levels": {"low": 4}}, "level = 4: it is one level throughout, which no lev"),
        ({"shards": "S", "level": 4}, "level = 4: the bits of gradients are in scatter"),
        ({"scatter": {"level": 4}}, "scatter: it compresses what FSDP2 exchanges: attach_shards"),
        ({"replicas": "R", "policy": "static", "scatter": 4}, "mesh of replicas: got a str"),
    ],
)
def test_what_was_refused_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        regimes.attach(nn.Linear(1, 1), **given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"compressor": regimes.PowerSGD(rank=4), "policy": "accordion"},
            "level = 4: it is one level throughout, which no policy can change",
        ),
        (
            {"compressor": {"name": "powersgd", "rank": 4, "level": 2}},
            "compressor: it has two levels, 2 and 4",
        ),
        (
            {"compressor": "powersgd", "policy": regimes.Accordion(low=regimes.PowerSGD(rank=4))},
            "the policy's levels are compressors already",
        ),
        (
            {"policy": regimes.Accordion(low=regimes.PowerSGD(rank=4), high=regimes.TopK())},
            r"policy\.high = TopK.*: expected a compressor with one level",
        ),
        (
            {
                "policy": regimes.Accordion(
                    low=regimes.PowerSGD(rank=4), high=regimes.TopK(percent=1)
                )
            },
            r"policy\.high = TopK.*percent=1.*: the levels of a policy are of one compressor",
        ),
        (
            {"policy": regimes.Accordion(low=regimes.PowerSGD(rank=4))},
            "the policy asks for level 'high', and levels has only low",
        ),
        ({"policy": regimes.Accordion(low=4)}, "a policy's level = 4: expected a name, or"),  # type: ignore[arg-type]
    ],
)
def test_two_answers_or_none_are_refused(given: dict[str, Any], sentence: str) -> None:
    model = DistributedDataParallel(nn.Linear(5, 3))
    with pytest.raises(ConfigError, match=sentence):
        regimes.attach(model, **given)
    regimes.attach(model, compressor=regimes.PowerSGD(rank=1))


def test_a_compressor_in_a_group_of_layers_is_refused() -> None:
    inner = regimes.Accordion(low=regimes.PowerSGD(rank=4), high=regimes.PowerSGD(rank=1))
    with pytest.raises(
        ConfigError, match=r"policy\.groups\.'0\*': all groups share one compressor"
    ):
        regimes.ByLayer({"0*": inner})


def test_a_configuration_has_no_level_in_its_compressor(tmp_path: Path) -> None:
    config = regimes.override(regimes.get_preset("smoke"), ["compressor.rank=4"])
    with pytest.raises(ConfigError, match=r"compressor\.rank = 4: in a configuration levels have"):
        regimes.run(config, tmp_path / "run")


@pytest.mark.parametrize("name", REGISTRY)
def test_a_compressor_says_its_level_and_saves_none(name: str) -> None:
    cls, level = REGISTRY.load(name), level_of(name)
    one = cls(**{cls.level_word: level})
    assert f"{cls.level_word}={level!r}" in repr(one)
    assert (one.level, one.with_level(None), cls().level) == (level, cls(), None)
    assert repr(one.with_level(None)) == repr(cls())
    assert cls.level_word not in repr(cls())
    assert cls.level_word not in REGISTRY.table(cls())
    assert {one.with_level({"low": level}), one.with_level({"low": "dense"})}  # both hash


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_what_streams_leaves_workers_apart(mixing: float) -> None:
    outer = regimes.OuterConfig(mixing=mixing)
    with pytest.warns(FutureWarning, match="leaves_apart"):
        assert outer.streams == outer.leaves_apart == bool(mixing)
