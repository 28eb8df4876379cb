"""Which runs are averaged (oracle: a header edited in one field, each field in turn)."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import hashlib
import importlib
import io
import json
import random
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from archives import DRAWABLE
from configs import smoke_static

import regimes
from regimes.base.errors import ConfigError, RecordError, RegimesError
from regimes.plotting import offered, style
from regimes.plotting.groups import group_runs
from regimes.plotting.schedules import differences_between, pairs_of, tabulate_schedules
from regimes.records import (
    Record,
    find_runs,
    load_all,
    provenance,
    read_header,
    select_runs,
    select_while_loading,
    separate_experiments,
    summary,
    unpack_records,
    write_notes,
)
from regimes.records.fields import STORAGE, is_circumstance
from regimes.records.same_experiment import identify_experiment, sibling_difference

REFERENCE = Path(__file__).parents[3] / "data" / "reference"
FEW = 2  # seeds of each schedule that are kept

# -- records to edit -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> list[Record]:
    """Two seeds of one experiment."""
    return [run for run in load_all(REFERENCE / "small-joint.tar.xz") if run.name == "low"][:2]


def leaves(table: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*prefix, key))
        else:
            yield (*prefix, key)


def edited(header: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """With another value in one place, of the same type where there is one."""
    found = copy.deepcopy(header)
    *tables, last = path
    table = found
    for key in tables:
        table = table[key]
    old = table[last]
    if isinstance(old, bool):
        table[last] = not old
    elif isinstance(old, int | float):
        table[last] = old + 3
    elif isinstance(old, str):
        table[last] = f"{old}x"
    elif isinstance(old, list):
        table[last] = [*old, *(old[-1:] or [1])]
    else:
        table[last] = {"x": 1} if isinstance(old, dict) else 1
    return found


def dotted(path: tuple[str, ...]) -> str:
    return ".".join(path[1:] if path[0] == "config" else path)


# -- every field of a header -----------------------------------------------------------------


def test_every_field_of_a_header_is_another_experiment_or_is_said(pair: list[Record]) -> None:
    one, other = pair
    paths = list(leaves(other.header))
    assert len(paths) > 70
    kinds = collections.Counter[str]()
    for path in paths:
        name = dotted(path)
        changed = replace(other, header=edited(other.header, path))
        runs = separate_experiments([one, changed])
        apart = runs[0].name != runs[1].name
        if name in ("seed", "name") or any(name == x or x.startswith(f"{name}.") for x in STORAGE):
            kinds["free"] += 1
        elif is_circumstance(name):
            kinds["said"] += 1
            assert not apart, name
            same_code = name in ("code.commit", "code.version")
            assert same_code or any(name in said for said in write_notes(runs)), name
        else:
            kinds["apart"] += 1
            assert apart, name
            assert name in runs[0].variant, name
            assert any(name in said for said in write_notes(runs)), name
            assert len(groups_or_none(runs) or {1, 2}) == 2
    assert min(kinds["said"], kinds["apart"]) >= 10
    assert kinds["free"] <= len(STORAGE) + 2


def groups_or_none(runs: list[Record]) -> dict[str, list[Record]] | None:
    """One row for each; none if the two cannot even be compared."""
    try:
        return group_runs(runs, unfinished=True)
    except RecordError:
        return None


def test_fields_of_an_older_version_are_as_they_are_by_default(pair: list[Record]) -> None:
    config = {k: v for k, v in pair[1].config.items() if k not in ("compile", "outer")}
    old = replace(pair[1], header={**pair[1].header, "config": {**config, "instruments": []}})
    assert {run.name for run in separate_experiments([pair[0], old])} == {"low"}


def test_what_is_drawn_for_each_seed_is_no_other_experiment(pair: list[Record]) -> None:
    runs = []
    for run, window in zip(pair, ([[0, 3]], [[0, 5]]), strict=True):
        policy = {"name": "windows", "layers": {"head.weight": window}}
        config = {**run.config, "policy": policy}
        runs.append(replace(run, header={**run.header, "config": config}))
    assert [run.variant for run in separate_experiments(runs)] == [
        "policy.layers.head.weight=[[0, 3]]",
        "policy.layers.head.weight=[[0, 5]]",
    ]
    for key, value in (("drawn_per_seed", ["policy.layers"]), ("name", "yoked first")):
        same = [replace(r, header={**r.header, "config": {**r.config, key: value}}) for r in runs]
        assert not any(run.variant for run in separate_experiments(same))


def test_a_name_says_what_is_not_as_in_most_runs(pair: list[Record]) -> None:
    def run(seed: int, **optimizer: Any) -> Record:
        config = copy.deepcopy(pair[0].config) | {"seed": seed}
        config["optimizer"] |= optimizer
        return replace(pair[0], header={**pair[0].header, "config": config})

    runs = separate_experiments(
        [run(0), run(1), run(2, lr=9.0), run(3, lr=9.0), run(4, momentum=0.5)]
    )
    usual = f"low (optimizer.lr={pair[0].config['optimizer']['lr']}, optimizer.momentum=0.9)"
    assert [r.name for r in runs] == [
        usual,
        usual,
        *["low (optimizer.lr=9.0)"] * 2,
        "low (optimizer.momentum=0.5)",
    ]
    assert [r.name for r in separate_experiments(runs)] == [r.name for r in runs]  # once is enough
    with pytest.raises(RecordError, match=r"low \(optimizer.lr=9.0\).*choose one with --where"):
        group_runs(runs, ["low"])


def test_a_text_is_no_number_and_a_name_is_made_once(pair: list[Record]) -> None:
    def run(seed: int, name: str, eta: Any) -> Record:
        policy = {"name": "accordion", "eta": eta}
        config = pair[0].config | {"seed": seed, "name": name, "policy": policy}
        return replace(pair[0], header={**pair[0].header, "config": config})

    for a, b in ((4, "4"), (True, "true"), ("none", None)):
        runs = separate_experiments([run(0, "low", a), run(1, "low", b)])
        assert runs[0].name != runs[1].name, (a, b)
    runs = separate_experiments(
        [run(0, "a", 1), run(1, "a", 1), run(2, "a", 2), run(3, "a (policy.eta=2)", 3)]
    )
    assert len({r.name for r in runs}) == 3
    assert select_runs(runs, [f"name={runs[0].name}"]) == runs[:2]
    assert len(summary(pair)) == 2
    with pytest.raises(RecordError, match="would count twice"):
        summary([pair[0], pair[0]])
    changed = replace(pair[1], header={**pair[1].header, "metric": "loss"})
    assert summary([pair[0], changed])["name"].nunique() == 2


def test_rates_of_a_hooks_record_are_those_of_its_rows(pair: list[Record]) -> None:
    runs = [replace(run, header={**run.header, "written_by": "hook"}) for run in pair]
    assert not any(run.variant for run in separate_experiments(runs))
    rows = [{**row, "lr": 50 * row["lr"]} for row in runs[1].rows]
    apart = separate_experiments([runs[0], replace(runs[1], rows=rows)])
    assert "rates." in apart[0].variant


def test_a_seed_that_chose_the_rate_is_marked(pair: list[Record]) -> None:
    seeds = [run.seed for run in pair]
    runs = [
        replace(r, header={**r.header, "config": {**r.config, "tuned_on": seeds[:1]}}) for r in pair
    ]
    assert any(f"seed {seeds[0]} chose this configuration" in said for said in write_notes(runs))
    assert not any("chose" in said for said in write_notes(pair))


def test_old_schedules_are_one_experiment_each() -> None:
    """Among them yoked controls, and records of different code."""
    for name in ("small-controls", "small-budget"):
        runs = load_all(REFERENCE / f"{name}.tar.xz")
        assert not any(run.variant for run in runs), name
    assert any("differ in code." in said for said in write_notes(runs))


@pytest.mark.slow
def test_all_committed_schedules_are_one_experiment_each() -> None:
    for archive in REFERENCE.glob("*.tar.xz"):
        for run in load_all(archive):
            assert not run.variant, archive.name
            assert not run.hooked
            assert run.config["optimizer"].get("name") != "muon"


# -- selecting -------------------------------------------------------------------------------


def test_reading_prints_what_averages_mix_only_if_told_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for say in (False, True):
        with select_while_loading((), print_notes=say) if say else select_while_loading():
            load_all(REFERENCE / "small-batch.tar.xz")
        assert ("note: " in capsys.readouterr().out) == say


def test_where_selects_by_what_the_header_says() -> None:
    archive = REFERENCE / "lstm-small.tar.xz"
    runs = load_all(archive)
    assert {r.name for r in select_runs(runs, ["name=low"])} == {"low"}
    assert {r.seed for r in select_runs(runs, [f"seed={runs[0].seed}"])} == {runs[0].seed}
    digest = runs[0].header["data"]["digest"][:6]
    assert len(select_runs(runs, [f"data.digest={digest}"])) == len(runs)
    with select_while_loading(["name=high"]) as said:
        assert {r.name for r in load_all(archive)} == {"high"}
    assert not said
    with pytest.raises(RecordError, match=r"no run says .optimizer\.rate.; did you mean"):
        select_runs(runs, ["optimizer.rate=1"])
    with pytest.raises(RecordError, match=r"no run has it; optimizer\.lr is"):
        select_runs(runs, ["optimizer.lr=77"])
    for text in ("optimizer.lr", "=3", "lr="):
        with pytest.raises(ConfigError, match="expected FIELD=VALUE"):
            select_runs(runs, [text])


def test_one_condition_is_a_text_and_true_is_no_number(pair: list[Record]) -> None:
    assert select_runs(pair, "name=" + pair[0].name)
    runs = []
    for value in (True, 1):
        config = {**pair[0].config, "data": {**pair[0].config["data"], "augment": value}}
        runs.append(replace(pair[0], header={**pair[0].header, "config": config}))
    for text, chosen in (("1", runs[1]), ("true", runs[0])):
        (found,) = select_runs(runs, [f"data.augment={text}"])
        assert found is chosen


@pytest.mark.parametrize("given", [5, ["runs"], None])
def test_what_is_no_folder_is_named(given: object) -> None:
    with pytest.raises(RecordError, match="is neither a folder of runs nor an archive"):
        load_all(given)  # type: ignore[arg-type]
    if not isinstance(given, list):
        with pytest.raises(RecordError, match="is neither a folder of runs nor an archive"):
            regimes.compare(given)  # type: ignore[arg-type]


def test_runs_without_a_metric_do_not_count_in_n(pair: list[Record]) -> None:
    runs = []
    for seed in range(3):
        config = {**pair[0].config, "seed": seed}
        rows = [{**row, "metric": None if seed == 1 else 0.5} for row in pair[0].rows]
        runs.append(replace(pair[0], header={**pair[0].header, "config": config}, rows=rows))
    table = tabulate_schedules(runs).table(("n", "metric", "of_base"))
    assert table.heads == ("schedule", "n", "accuracy %", "of low")
    assert {row[0]: row[1] for row in table.rows}[pair[0].name] == "2 of 3"


# -- differences -----------------------------------------------------------------------------


def test_differences_of_schedules_of_any_name(pair: list[Record]) -> None:
    runs, values = [], {"mine": (0.5, 0.6, 0.9), "theirs": (0.4, 0.4, 0.6), "third": (0.1, 0.2)}
    for name, reached in values.items():
        for seed, value in enumerate(reached):
            config = {**pair[0].config, "name": name, "seed": seed}
            rows = [{**row, "metric": value} for row in pair[0].rows]
            runs.append(replace(pair[0], header={**pair[0].header, "config": config}, rows=rows))
    rows = regimes.compare(runs).set_index("comparison")
    assert list(rows.index) == ["mine - theirs", "mine - third", "theirs - third"]
    row = rows.loc["mine - theirs"]
    # differences of 10, 20 and 30 points: mean 20, sd 10, t(0.975, 2) = 4.303
    assert (row["n"], row["positive"], row["traffic_ratio"]) == (3, 3, 1.0)
    assert row["difference"] == pytest.approx(20)
    assert row["ci_low"] == pytest.approx(20 - 4.30265 * 10 / 3**0.5, abs=0.005)
    assert rows.loc["mine - third", "n"] == 2
    assert pd.isna(rows.loc["mine - third", "ci_low"])
    against = regimes.compare(runs, baseline="third")
    assert list(against["comparison"]) == ["mine - third", "theirs - third"]
    with pytest.raises(RecordError, match="baseline low: no such schedule; found mine"):
        regimes.compare(runs, baseline="low")
    table = differences_between(runs)
    assert table is not None
    assert table.rows[0][:4] == ["mine - theirs", "3", "+20.0", "[-4.8, +44.8]"]
    assert differences_between([run for run in runs if run.name == "mine"]) is None


def test_of_many_schedules_each_is_compared_with_the_usual_baseline() -> None:
    names = [f"arm {i}" for i in range(7)]
    assert pairs_of(names) == []
    assert len(pairs_of(names[:6])) == 15
    assert pairs_of([*names, "low"]) == [(name, "low") for name in names]
    assert pairs_of(names, "arm 3")[3] == ("arm 4", "arm 3")


# -- before a run starts, and after an ablation ----------------------------------------------


def test_another_configuration_beside_a_run_of_its_name_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with unpack_records(REFERENCE / "small-joint.tar.xz") as root:
        source = next(
            path for path in find_runs(root) if read_header(path)["config"]["name"] == "low"
        )
        shutil.copytree(source, tmp_path / "low" / "seed-1")
    config = read_header(tmp_path / "low" / "seed-1")["config"]
    assert sibling_difference({**config, "seed": 2}, tmp_path / "low" / "seed-2") == ""
    other = copy.deepcopy(config)
    other["optimizer"]["lr"] = 9.0
    said = sibling_difference(other, tmp_path / "low" / "seed-2")
    assert "differs in optimizer.lr" in said
    assert "9.0" in said
    assert sibling_difference({**other, "name": "mine"}, tmp_path / "low" / "seed-2") == ""


def test_the_table_of_an_ablation_has_a_row_for_each_experiment(pair: list[Record]) -> None:
    config = {**pair[1].config, "batch_size": 99}
    other = replace(pair[1], header={**pair[1].header, "config": config})
    assert len(tabulate_schedules([pair[0], other]).frame) == 2
    metric = replace(pair[1], header={**pair[1].header, "metric": "perplexity"})
    with pytest.raises(RecordError, match="differ in metric"):
        tabulate_schedules([pair[0], metric])


# -- every command that averages -------------------------------------------------------------

NO_MEAN = {  # read no records of ours, or draw one run
    "campaign",
    "paper_times",
    "provenance",
    "published",
    "quadratic",
    "signals",
    "lasso",  # of a network: `analysis.lasso.numbers.network`, through `group_runs`
    "tables",  # of runs at the paper's scale: `test_tables`
    "14",
    "15",  # of a grid without committed records; as 12 and 13
    "predictions",  # a verdict for each; of several archives: `test_predictions`
}
QUICK = ("controls", "curves", "detectors", "figure3", "figure4a", "levels", "rivals")
Begin = Callable[[Path, Path], object]


def commands() -> dict[str, tuple[str, Begin]]:
    """By name, the archive and how the command begins: records, and a folder for its files."""
    found: dict[str, tuple[str, Begin]] = {}
    for name, offer in offered.find_figures().items():
        grids = [g for g in offer.grids if (REFERENCE / f"{g}.tar.xz").exists()]
        archive = DRAWABLE.get(name) or next(iter(grids), None)
        if name in NO_MEAN:
            continue
        assert archive, f"{name}: which records can it draw?"
        found[name] = (
            archive,
            lambda records, out, name=name: offered.begin_figure(
                name,
                [
                    str(records.parent if name == "claims" else records),
                    "--out",
                    str(out / "claims.md" if name == "claims" else out),
                ],
            ),
        )
    found["regimes report"] = "lstm-small", _command("report", "report.html")
    found["regimes detect"] = "lstm-small", _command("detect")
    found["regimes cost"] = "lstm-small", _command("cost")
    found["regimes.compare"] = "small-joint", lambda records, out: print(regimes.compare(records))
    return found


def _command(verb: str, file: str = "") -> Begin:
    def begin(records: Path, out: Path) -> None:
        words = ["regimes", verb, str(records), *(["--out", str(out / file)] if file else [])]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words)
            from regimes.cli import app

            app.cli(prog="regimes")
        if file:
            print((out / file).read_text(encoding="utf-8"))

    return begin


@pytest.fixture(scope="module")
def subsets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An archive's name to a folder of few seeds of each of its schedules."""
    made: dict[str, Path] = {}

    def subset(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("records") / name
            counts = collections.Counter[str]()
            with unpack_records(REFERENCE / f"{name}.tar.xz") as root:
                for path in find_runs(root):
                    schedule = read_header(path)["config"]["name"]
                    counts[schedule] += 1
                    if counts[schedule] <= FEW:
                        shutil.copytree(path, made[name] / path.relative_to(root))
        return made[name]

    return subset


def check_not_silent(name: str, subset: Path, begin: Begin, where: Path) -> None:
    """Edit one field in the second seed of each schedule: one of those that make another
    experiment, and one that is only said; each drawn by the command's name."""
    draw = random.Random(name)
    header = read_header(find_runs(subset)[0])
    paths = [p for p in leaves(header) if p[:2] != ("config", "name") and "." not in p[-1]]
    known = {kind: [p for p in paths if wanted(p, kind)] for kind in ("apart", "said")}
    for kind, choices in known.items():
        path = draw.choice(choices)
        records = where / kind / subset.name
        shutil.copytree(subset, records)
        seen: set[str] = set()
        for folder in find_runs(records):
            now = read_header(folder)
            if now["config"]["name"] in seen:
                with contextlib.suppress(KeyError):
                    text = json.dumps(edited(now, path))
                    (folder / "run.json").write_text(text)
            seen.add(now["config"]["name"])
        printed = io.StringIO()
        refused = ""
        try:
            with contextlib.redirect_stdout(printed):
                begin(records, where / kind)
        except RegimesError as error:
            refused = str(error)
        assert kind == "apart" or not refused, (name, path, refused)
        text = printed.getvalue() + refused
        assert dotted(path) in text, (name, path, text[-2000:])


def wanted(path: tuple[str, ...], kind: str) -> bool:
    """Fields of the optimiser, data, steps and code: what a schema allows in any command."""
    if kind == "said":
        return path in (("code", "digest"), ("machine", "processor"), ("machine", "torch"))
    return path[:2] == ("config", "optimizer") and path[-1] in (
        "momentum",
        "weight_decay",
        "nesterov",
        "warmup_from",
        "scale_with_batch",
    )


def test_every_offered_command_is_tried_or_averages_nothing() -> None:
    assert {*offered.find_figures()} - NO_MEAN <= {*commands()}
    assert {*QUICK} <= {*commands()}


def tried(names: list[str]) -> Any:
    return pytest.mark.parametrize("name", names)


@tried([*QUICK, "regimes report", "regimes detect", "regimes cost", "regimes.compare"])
def test_nothing_is_averaged_in_silence(
    name: str, subsets: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(style, "save", lambda *args, **options: [])  # numbers, not pictures
    archive, begin = commands()[name]
    if name == "regimes.compare":
        begin = lambda records, out: (  # noqa: E731  # a function says nothing; its rows do
            print(regimes.compare(records), *write_notes(load_all(records)), sep="\n")
        )
    check_not_silent(name, subsets(archive), begin, tmp_path)


@pytest.mark.slow
@tried(sorted({*offered.find_figures()} - NO_MEAN - {*QUICK}))
def test_no_figure_is_averaged_in_silence(
    name: str, subsets: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(style, "save", lambda *args, **options: [])
    archive, begin = commands()[name]
    check_not_silent(name, subsets(archive), begin, tmp_path)


def test_identity_and_circumstances_are_all_that_is_said(pair: list[Record]) -> None:
    own = identify_experiment(pair[0])
    assert {*own} | {k for k in pair[0].fields if is_circumstance(k)} | {"seed"} == {
        *pair[0].fields
    }


MINE = """
from dataclasses import dataclass
from regimes import Decision

@dataclass(frozen=True)
class Half:
    needs, names = (), ("low", "high")
    def decide(self, history, layers):
        return [Decision("low", None)] * len(layers)
"""


def test_runs_of_own_code_that_was_edited_are_averaged_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As runs of other code of this package are. A comment is another digest, too."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    digests = []
    for seed, text in enumerate([MINE, MINE, MINE + "# edited\n"]):
        (tmp_path / "mine_edited.py").write_text(text)
        sys.modules.pop("mine_edited", None)
        importlib.invalidate_caches()
        policy = {"name": "mine_edited:Half"}
        c = replace(smoke_static("epochs=1"), seed=seed, policy=policy)
        regimes.run(c, tmp_path / "runs" / str(seed))
        code = read_header(tmp_path / "runs" / str(seed))["code"]
        assert code["mine_edited.digest"] == hashlib.sha256(text.encode()).hexdigest()
        digests.append(code["mine_edited.digest"][:8])
    sys.modules.pop("mine_edited", None)
    runs = load_all(tmp_path / "runs")
    assert {run.name for run in runs} == {runs[0].name}  # one experiment
    said = f"averaged over runs that differ in code.mine_edited.digest ({digests[0]}, {digests[2]})"
    assert [note for note in write_notes(runs) if said in note]
    assert not write_notes(runs[:2])


def test_all_own_classes_and_functions_of_a_run_have_a_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever names them: a table at any depth, an instrument, an object, a base class."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_a", "own_b", "own_c", "own_d"):
        text = "class Part: pass\ndef function(): pass\n"
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "own_e.py").write_text("import own_d\nclass Child(own_d.Part): pass\n")
    modules = {name: importlib.import_module(f"own_{name}") for name in "abcde"}
    config = {
        "name": "own_x:y",
        "policy": {"name": "detected", "detector": {"name": "own_a:Part"}},
        "instruments": {"own_b:Part": {}, "norms": {}},
        "compressor": {"name": "powersgd"},
    }
    unknown = types.new_class("Typed", exec_body=lambda space: space.update(__module__="gone"))
    found = provenance.own_code(
        config, [functools.partial(modules["c"].function), modules["e"].Child, unknown, dict]
    )
    digests = [f"own_{name}.digest" for name in "abcde"]
    assert found.keys() == {*digests, "gone"}
    assert found["gone"] == "source unreadable"
    assert found["own_a.digest"] == hashlib.sha256(text.encode()).hexdigest()
    for name in "abcde":
        sys.modules.pop(f"own_{name}")
