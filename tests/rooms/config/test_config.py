"""Configurations: round trips, and one clear sentence for each way to get one wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regimes.base.config import (
    Budget,
    ModelConfig,
    Registry,
    RunConfig,
    from_dict,
    load_toml,
    override,
    override_fields,
    override_table,
    to_dict,
    to_toml,
)
from regimes.base.errors import ConfigError, RegimesError
from regimes.policies import check_levels, make_policy
from regimes.presets import (
    GRIDS,
    PRESETS,
    check_common,
    get_grid,
    get_preset,
    list_groups,
    select_schedules,
)
from regimes.presets.own import read_grid
from regimes.records.provenance import own_code


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_toml(name: str, tmp_path: Path) -> None:
    config = get_preset(name)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config))
    assert load_toml(path) == from_dict(RunConfig, to_dict(config))
    assert load_toml(path).digest() == config.digest()


def test_every_cell_of_every_grid_is_sound() -> None:
    for name in GRIDS:
        for schedule, config in get_grid(name).items():
            assert config.name == schedule, name
            check_levels(make_policy(config.policy), config.levels)
        assert get_preset(f"{name}/{schedule}") == config


@given(st.integers(0, 10**9), st.floats(1e-6, 10), st.lists(st.integers(1, 500), max_size=4))
def test_override_reads_back_the_settings_it_is_given(
    seed: int, lr: float, decays: list[int]
) -> None:
    config = override(
        get_preset("smoke"),
        [f"seed={seed}", f"optimizer.lr={lr!r}", f"optimizer.decay_epochs={decays}"],
    )
    assert (config.seed, config.optimizer.lr) == (seed, lr)
    assert config.optimizer.decay_epochs == tuple(decays)


def test_overriding_a_plug_in_forgets_the_old_ones_fields() -> None:
    config = override(get_preset("smoke"), ["policy=static", "policy.level=high"])
    assert config.policy == {"name": "static", "level": "high"}
    config = override(get_preset("smoke"), ["policy.interval=5"])
    assert config.policy["name"] == "accordion"
    config = override(get_preset("smoke"), ["levels.low=dense", "data.path=none"])
    assert config.levels == {"low": "dense", "high": 1}
    assert config.data.path is None
    assert override(get_preset("smoke"), ["budget.epochs=3"]).budget == Budget(epochs=3)
    for table, one, field, two in (
        ("batch_policy", "accordion", "interval", "static"),
        ("deficit", "blur", "factor", "flip"),
    ):
        config = override(get_preset("smoke"), [f"{table}={one}", f"{table}.{field}=3"])
        assert getattr(config, table) == {"name": one, field: 3}
        config = override(config, [f"{table}.name={two}"])
        assert getattr(config, table) == {"name": two}


def test_a_table_that_is_passed_stays_as_it_is() -> None:
    detector: dict[str, object] = {"name": "norm-change"}
    pairs = {"policy": "detected", "policy.detector": detector, "policy.detector.eta": 0.1}
    config = override_fields(RunConfig(), pairs)
    assert config.policy["detector"] == {"name": "norm-change", "eta": 0.1}
    assert detector == {"name": "norm-change"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_of_ones_own_takes_no_choice_of_a_presets_network(name: str) -> None:
    base = get_preset(name)
    mine = override(base, ["model.name=mine:Net"])
    assert mine.model == ModelConfig(name="mine:Net")
    assert override(mine, ["model.name=mine:Net", "model.width=2"]).model.width == 2
    assert override_table(base, {"model": {"width": 2, "name": "mine:Net"}}).model.width == 2
    assert override(base, ["model.name=vgg7"]).model == replace(base.model, name="vgg7")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("epoch=3", "unknown key 'epoch': did you mean 'epochs'"),
        ("optimizer.learning=3", "unknown key 'optimizer.learning'"),
        ("optimiser.lr=3", "unknown key 'optimiser.lr': did you mean 'optimizer'"),
        ("epochs=1.5", "epochs = 1.5: expected a whole number"),
        ("optimizer.nesterov=1", "optimizer.nesterov = 1: expected true or false"),
        ("optimizer.decay_epochs=12", "optimizer.decay_epochs = 12: expected a list of whole"),
        ("signal=updates", "did you mean 'update'"),
        ("epochs", "needs the form key=value"),
        ("data=digits", "data = 'digits': expected a table"),
        (f"epochs={2**63}", "epochs = 9223372036854775808: expected a whole number of at most 63"),
        ("epochs=" + "1" * 5000, "expected a whole number"),
        ("epochs=0", "epochs = 0: expected at least 1, up to"),
        ("optimizer.momentum=1", "optimizer.momentum = 1.0: expected from 0 up and below 1"),
        ("optimizer.decay_epochs=[3, 0]", "optimizer.decay_epochs = [3, 0]: expected at least 1"),
        ("sync_levels.low=0", "sync_levels.low = 0: expected at least 1"),
        ("budget.epochs=0", "budget.epochs = 0: expected at least 1"),
        ("branch.at=-1", "branch.at = -1: expected a number from 0 up"),
        ("optimizer.decay_steps=[3]", 'set optimizer.per = "step"'),
        ("outer.nesterov=true", "outer.nesterov = True: expected false, or a momentum above 0"),
        ("batch_levels.high=12", "batch_levels.high = 12: expected a multiple of batch_size = 8"),
        ("levels.dense=3", 'levels.dense is always "dense": give the level another name'),
        ("budget.level=mid", "budget.level = 'mid': expected one of low, high, dense"),
    ],
)
def test_bad_settings(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        override(get_preset("smoke"), [setting])
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"name": "acordion"}, "did you mean 'accordion'"),
        ({"name": "accordion", "etta": 1}, "did you mean 'eta'"),
        ({"name": "accordion", "needs": []}, "unknown key 'policy.needs'"),
        ({"name": "windows", "windows": [[3, 3]]}, "is no window"),
        ({"name": "windows", "windows": [[3]]}, "policy.windows[0] = [3]: expected"),
        ({"name": "nowhere.to.be:Found"}, "cannot import the policy"),
        ({}, "policy.name is missing"),
    ],
)
def test_bad_policies(table: dict, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_policy(table)
    assert sentence in str(error.value)


class Kept:
    @dataclass(frozen=True)
    class Within:
        size: int = 3


def test_the_table_of_a_class_within_a_class_makes_it_again() -> None:
    name = f"{__name__}:Kept.Within"
    plain = Registry("shape")
    assert plain.table(Kept.Within(4)) == {"name": name, "size": 4}
    assert plain.make(plain.table(Kept.Within(4))) == Kept.Within(4)
    named = Registry("shape", {"within": name})
    assert named.table(Kept.Within(4)) == {"name": "within", "size": 4}
    assert [*own_code({"policy": {"name": name}})] == [f"{__name__}.digest"]


def test_a_policy_may_only_ask_for_levels_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"asks for level 'medium'.*add levels.medium"):
        check_levels(make_policy({"name": "static", "level": "medium"}), {"low": 4, "high": 1})
    check_levels(make_policy({"name": "static", "level": "dense"}), {})


def test_names_are_checked_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'smok': did you mean 'smoke'"):
        get_preset("smok")
    with pytest.raises(ConfigError, match="unknown grid"):
        get_grid("figure2")
    with pytest.raises(ConfigError, match="has no schedule 'hihg': did you mean 'high'"):
        get_preset("smoke/hihg")


def test_a_grids_schedules_stay_apart() -> None:
    cells = get_grid("smoke")
    check_common(cells, ("optimizer.lr=0.2", "data.train_size=100"))
    for setting in ("epochs=4", "optimizer.decay_epochs=[3]", "policy.interval=4"):
        with pytest.raises(
            ConfigError, match="choose with --schedules those to which the setting applies"
        ):
            check_common(cells, (setting,))
    check_common({"accordion": cells["accordion"]}, ("policy.interval=4",))


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        (("bucket_mb=1", "bucket_mb=2"), "bucket_mb=3"),
        (
            ('policy.layers."blocks.0.out"=[[0, 1]]', 'policy.layers."blocks.0.out"=[[0, 2]]'),
            'policy.layers."blocks.0.out"=[[0, 3]]',
        ),
    ],
)
def test_schedules_that_differ_are_seen_however_the_field_is_written(
    fields: tuple[str, str], setting: str
) -> None:
    base = override(get_preset("smoke"), ["policy=windows"])
    grid = {str(i): override(base, [field]) for i, field in enumerate(fields)}
    with pytest.raises(ConfigError, match="the schedules 0, 1 differ in"):
        check_common(grid, [setting])


def test_a_field_that_no_chosen_schedule_has_is_refused_before_any_run() -> None:
    """Low and high alike lack it, so that they do not differ in it."""
    with pytest.raises(ConfigError, match=r"unknown key 'policy\.interval'"):
        select_schedules("smoke", ["low", "high"], ["policy.interval=2"])
    (chosen,) = select_schedules("smoke", ["accordion"], ["policy.interval=2"]).values()
    assert chosen.policy["interval"] == 2


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(RegimesError, match="cannot read the configuration"):
        load_toml(tmp_path / "none.toml")
    for text in ("epochs = = 3", "epochs = " + "1" * 5000, "tuned_on = " + "[" * 10**5, "\ud800"):
        (tmp_path / "bad.toml").write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(RegimesError, match="cannot read the configuration"):
            load_toml(tmp_path / "bad.toml")


@pytest.mark.parametrize("read", [load_toml, lambda path: read_grid(str(path), get_preset)])
def test_a_pipe_is_no_configuration(read: Callable[[Path], object], tmp_path: Path) -> None:
    """Nobody writes to it; a device would be read for ever."""
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "link.toml").symlink_to("/dev/zero")
    for name in ("pipe.toml", "link.toml"):
        with pytest.raises(ConfigError, match=rf"cannot read the .*{name}: it is no regular file"):
            read(tmp_path / name)


def test_presets_are_listed_in_groups_and_found_by_words() -> None:
    everything = list_groups()
    listed = {(group.kind, name) for group in everything for name, _ in group.rows}
    assert listed == {("preset", name) for name in PRESETS} | {("grid", name) for name in GRIDS}
    assert len({(group.kind, group.about) for group in everything}) == len(everything) == 16
    assert all(group.about and said for group in everything for _, said in group.rows)
    found = {name for group in list_groups(["TopK", "figure", "grid"]) for name, _ in group.rows}
    assert "small-topk" in found
    assert "small" not in found
    with pytest.raises(ConfigError, match="about 'smocke': did you mean 'smoke'"):
        list_groups(["smocke"])
