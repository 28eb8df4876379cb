"""The control experiment and the campaign (oracles: conservation of what is sent, the policy
itself)."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regimes
from analysis.campaign import campaign
from analysis.campaign.campaign import CPU, GPU, Step
from analysis.tournament import yoked
from regimes import presets
from regimes.base.config import RunConfig, from_dict, override, to_dict
from regimes.base.errors import ConfigError, RecordError
from regimes.policies import PastEpoch, Windows, make_policy
from regimes.presets.families import shorten_training
from regimes.records import Record, load_all, summary
from regimes.records.earlier import as_present

REFERENCE = Path(__file__).parents[2] / "data" / "reference"


@pytest.fixture(scope="module")
def accordion() -> Record:
    records = load_all(REFERENCE / "smoke-quantise.tar.xz")
    return next(run for run in records if run.name == "accordion")


def low_epochs(config: RunConfig, epochs: int) -> dict[str, list[int]]:
    """By asking the policy itself."""
    rule = make_policy(to_dict(config)["policy"])
    names = list(config.policy["layers"])
    past = PastEpoch(0.1, 0.1, {}, ["none"] * len(names))
    levels = [rule.decide([past] * epoch, names) for epoch in range(epochs)]
    return {
        n: [e for e in range(epochs) if levels[e][i].level == "low"] for i, n in enumerate(names)
    }


# -- controls --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["first", "last", "random"])
def test_a_control_sends_as_much_in_every_layer(accordion: Record, order: str) -> None:
    config = yoked.yoked(accordion, order)
    moved = low_epochs(config, len(accordion.rows))
    layers, rows = accordion.header["layers"], accordion.rows
    sent = {
        layer["name"]: [e for e, row in enumerate(rows) if row["layers"]["level"][i] == "low"]
        for i, layer in enumerate(layers)
        if layer["compressed"]
    }
    assert {n: len(e) for n, e in moved.items()} == {n: len(e) for n, e in sent.items()}
    assert moved != sent
    for epochs in moved.values():
        if order == "first":
            assert epochs == list(range(len(epochs)))
        if order == "last":
            assert epochs == list(range(24 - len(epochs), 24))


def test_layers_of_equal_windows_are_moved_apart() -> None:
    """Each layer is drawn by its own name: 5 windows of one epoch among 100."""
    windows = {name: [(10 * i, 10 * i + 1) for i in range(5)] for name in "abcdef"}
    moved = [yoked._moved("random", name, windows, 100, 0) for name in windows]
    assert len({str(places) for places in moved}) == len(windows)
    assert moved[0] != yoked._moved("random", "a", windows, 100, 1)
    assert moved[0] == yoked._moved("random", "a", windows, 100, 0)


def test_layers_that_were_never_low_stay_so(accordion: Record) -> None:
    """One layer was low in two epochs, the others never: that is moved; where none was, refused."""
    run = copy.deepcopy(accordion)
    for epoch, row in enumerate(run.rows):
        count = len(row["layers"]["level"])
        row["layers"]["level"] = ["high"] * count
        if epoch in (3, 9):
            row["layers"]["level"][0] = "low"
    one, *others = yoked.yoked(run, "first").policy["layers"].values()
    assert one == [(0, 2)]
    assert not any(others)
    for row in run.rows:
        row["layers"]["level"] = ["high"] * count
    with pytest.raises(RecordError, match="was never at low compression"):
        yoked.yoked(run, "first")
    run.rows.pop()
    with pytest.raises(RecordError, match="not finished"):
        yoked.yoked(run, "first")


def test_exchanged_layers_have_each_others_schedules(accordion: Record) -> None:
    own = yoked.low_windows(accordion)
    moved = yoked.yoked(accordion, "layers").policy["layers"]
    assert Counter(map(str, moved.values())) == Counter(map(str, own.values()))
    assert list(moved) == list(own)
    assert moved != own


def test_a_control_is_the_runs_own_setting_and_seed(accordion: Record) -> None:
    config = yoked.yoked(accordion, "random")
    original = from_dict(RunConfig, as_present(accordion.config))
    assert replace(config, name=original.name, policy=original.policy) == original
    assert config.name == "yoked random"
    assert config == yoked.yoked(accordion, "random")  # keyed by the seed


def test_windows_of_single_layers() -> None:
    rule = Windows(windows=((0, 1),), layers={"b": ((1, 2),)})
    assert [d.level for d in rule.decide([], ["a", "b"])] == ["low", "high"]
    with pytest.raises(ConfigError, match="no layer 'b'"):
        rule.decide([], ["a"])
    with pytest.raises(ConfigError, match=r"policy\.layers\.b"):
        Windows(layers={"b": ((2, 2),)})


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        ((), "a window starts in epoch 99, but the run ends after 2 epochs"),
        (("unit_steps=2",), r"= 99: expected a window that starts within the run's 12 units"),
    ],
)
def test_a_layers_window_beyond_the_run_is_refused(
    unit: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    layers = "policy={name='windows',windows=[[0,1]],layers={'features.0.weight'=[[99,100]]}}"
    settings = [layers, "epochs=2", "optimizer.decay_epochs=[]", *unit]
    with pytest.raises(ConfigError, match=rf"policy\.layers\.features\.0\.weight.*{message}"):
        regimes.run(override(presets.get_preset("smoke"), settings), tmp_path / "run")


# -- the campaign ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_runs_its_controls_and_then_has_nothing_left(tmp_path: Path) -> None:
    said: list[str] = []
    steps = (Step("smoke", 1, 7, schedules=("low", "accordion"), yoked=True, name="here"),)

    def again() -> list[str]:
        return campaign.run(steps, tmp_path, 1, lambda c: shorten_training(c, 0.25), said.append)

    assert again() == []
    found = {run.name: run for run in load_all(tmp_path / "here")}
    assert set(found) == {"low", "accordion", *(f"yoked {order}" for order in yoked.ORDERS)}
    floats = summary(found.values()).set_index("name")["floats"]
    for order in ("first", "last", "random"):
        assert floats[f"yoked {order}"] == floats["accordion"]
    assert "6 runs, 6 missing" in said[0]
    said.clear()
    assert again() == []
    assert len(said) == 1
    assert "6 runs, 0 missing" in said[0]


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_left_has_the_controls_of_the_same_step(
    fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Runs of 4 minutes, which take 8: 2 seeds with a control for each order, then a run of another
    step. A seed that fails has no controls, which are dropped when the step has ended. A third
    step's folder cannot be read."""
    now, finished = [0.0], set[Path]()

    def ablate(todo: Any, jobs: int, progress: Any) -> list[str]:
        failed = [str(folder) for folder, _ in todo if fails and folder.name == "seed-8"]
        for folder, _ in todo:
            now[0] += 8 * 60
            finished.update({folder} - {*map(Path, failed)})
            progress(folder, None)
        return failed

    def done(folder: Path, config: RunConfig) -> bool:
        if "broken" in str(folder):
            raise RecordError(f"{folder} holds another run")
        return folder in finished

    original = presets.get_grid("smoke")["accordion"]
    monkeypatch.setattr(campaign.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(campaign.sweep, "ablate", ablate)
    monkeypatch.setattr(campaign.sweep, "is_finished", done)
    monkeypatch.setattr(campaign, "load", lambda folder: folder)
    monkeypatch.setattr(campaign, "yoked_to", lambda _, order: replace(original, name=order))
    steps = (
        Step("smoke", 2, 7, 4.0, ("accordion",), yoked=True, name="controls"),
        Step("smoke", 1, 7, 4.0, ("low",), name="other"),
        Step("smoke", 1, 7, 4.0, ("low",), name="broken"),
    )
    said: list[str] = []
    failures = campaign.run(steps, tmp_path, 1, lambda config: config, said.append)
    assert len(failures) == 1 + fails
    assert said[0] in failures
    assert said[0].startswith("broken left out: ")
    orders = len(yoked.ORDERS)
    runs = 2 + 2 * orders + 1
    left = [*range(runs - 1, runs - 3 - orders, -1), 0] if fails else [*range(runs - 1, -1, -1)]
    assert said[1].endswith(f"{runs} missing: {4 * runs} minutes left")
    assert [words.rpartition(", ")[2] for words in said[2:]] == [
        f"{8 * n} minutes left" for n in left
    ]


@pytest.mark.parametrize("name", ["2024", "true", "1e5", "nan", "{a=1}", "a b"])
def test_a_folder_of_images_may_have_any_name(name: str) -> None:
    config = presets.get_preset("paper-resnet18-cifar10")
    wanted = override(config, ["data.name=folder", f"data.path={name!r}"])
    assert wanted.data.path == name
    assert campaign.changed(config, Path(name), 1.0) == wanted


def test_every_step_is_a_grid_with_its_schedules(tmp_path: Path) -> None:
    for step in (*CPU, *GPU):
        grid = presets.get_grid(step.grid)
        assert set(step.schedules) <= set(grid), step.folder
        cells = step.cells(tmp_path, lambda config: config)
        assert len(cells) == step.seeds * len(step.schedules or grid), step.folder


@settings(max_examples=20)
@given(st.sampled_from(sorted(presets.GRIDS)), st.floats(0.05, 1))
def test_a_shorter_training_keeps_its_order(name: str, share: float) -> None:
    for config in presets.get_grid(name).values():
        short = shorten_training(config, share)
        assert 1 <= short.epochs <= config.epochs
        decays = short.optimizer.decay_epochs
        assert list(decays) == sorted(decays)
        for first, stop in short.policy.get("windows", ()):
            assert 0 <= first < stop
    assert to_dict(shorten_training(config, 1.0)) == to_dict(config)


@pytest.mark.slow
def test_packed_records_are_a_start(tmp_path: Path) -> None:
    """Of the whole committed study; a folder of other runs is left out, the others go on."""
    archives, out = tmp_path / "archives", tmp_path / "runs"
    archives.mkdir()
    for name in ("smoke-quantise", "small"):
        shutil.copy(REFERENCE / f"{name}.tar.xz", archives)
    campaign.unpack(archives, out)
    steps = tuple(step for step in CPU if step.folder in ("smoke-quantise", "small"))
    said: list[str] = []
    images = Path("data/cache/cifar10-jpeg.tar.xz")
    assert (
        campaign.run(steps, out, 1, lambda c: campaign.changed(c, images, 1.0), said.append) == []
    )
    assert "65 runs, 0 missing" in said[-1]
    (failure,) = campaign.run(steps, out, 1, lambda c: c, said.append)
    assert failure.startswith("small left out: ")
    (archives / "smoke-quantise.tar.xz").write_bytes(b"cut")
    with pytest.raises(RecordError, match="no archive of records"):
        campaign.unpack(archives, tmp_path / "other")
    assert not (tmp_path / "other" / "smoke-quantise").exists()


def test_what_no_campaign_could_use_is_refused_before_the_first_run(tmp_path: Path) -> None:
    for words, options in (
        ("no step 'smal'", {"only": ("smal",)}),
        ("--jobs must be at least 1", {"only": ("smoke",), "jobs": 0}),
        ("nowhere does not exist", {"only": ("small",), "images": tmp_path / "nowhere"}),
    ):
        with pytest.raises(ConfigError, match=words):
            campaign.main(out=tmp_path, **options)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    (tmp_path / "small.tar.xz").write_bytes(b"")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RecordError, match=r"cannot write .*file"):
            campaign.unpack(tmp_path, out)
