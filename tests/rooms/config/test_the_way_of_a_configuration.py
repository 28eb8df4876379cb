"""From `regimes run smoke` to the first step: few files, downwards.

A reader opens a file that the whole configuration is handed to, or that makes or checks it. What
is made of a part of it (a compressor of its table, a network of its name) ends there. A preset is
found by its name; all else by "go to definition".
"""

from __future__ import annotations

import definitions
import pytest

from benchmarks import house

WAY = """
cli/train.py run
    _presets.read_configuration: presets/__init__.py read_configuration
    train: cli/train.py train
presets/__init__.py read_configuration
    get_preset: presets/__init__.py get_preset
    override: base/config/toml.py override
presets/__init__.py get_preset
    PRESETS.find: base/config/registry.py Registry.find
presets/cpu.py smoke
    RunConfig: base/config/run.py RunConfig
base/config/run.py RunConfig.__post_init__
    super().__post_init__: base/config/bounds.py Bounded.__post_init__
base/config/toml.py override
    _change_and_check: base/config/toml.py _change_and_check
base/config/toml.py _change_and_check
    _change_fields: base/config/toml.py _change_fields
base/config/toml.py _change_fields
    from_dict: base/config/convert.py from_dict
cli/train.py train
    loop.run: training/loop.py run
training/loop.py run
    _run_phase: training/loop.py _run_phase
training/loop.py _run_phase
    prepare_run: training/build.py prepare_run
    _advance_unit: training/loop.py _advance_unit
training/build.py prepare_run
    PlugIns.from_config: training/plug_ins.py PlugIns.from_config
    Run: training/build.py Run
training/plug_ins.py PlugIns.from_config
    made.check: training/plug_ins.py PlugIns.check
training/plug_ins.py PlugIns.check
    capabilities.check: base/capabilities.py check
training/build.py Run.__init__
    load_task: data/__init__.py load_task
    Units.from_config: training/units.py Units.from_config
data/__init__.py load_task
    ImageTask: data/classification.py ImageTask
training/loop.py _advance_unit
    _train_unit: training/loop.py _train_unit
training/loop.py _train_unit
    _train_steps: training/loop.py _train_steps
training/loop.py _train_steps
    _step_together: training/loop.py _step_together
"""
HOPS = definitions.hops(WAY)
FILES = {word for hop in HOPS for word in hop.split() if word.endswith(".py")}
# of the checks of arguments, which a decorator makes around a function
DECORATOR = "base/config/arguments.py"


@pytest.mark.parametrize("hop", HOPS)
def test_go_to_definition_leads_down(hop: str) -> None:
    definitions.check_hop(hop)
    height = house.heights(definitions.HOME.parent)
    file, *_, target, _ = hop.split()
    assert height[house.room_of(target)] <= height[house.room_of(file)]


def test_few_files_are_opened_and_no_other_has_the_configuration() -> None:
    assert len(FILES) <= 15
    way = house.in_tree(definitions.HOME.parent, house.CONFIGURATION)
    assert {*way["handed to"]} - {DECORATOR} <= FILES
    assert way["names"]
    # A decorator calls its function, a class is made by its name, and a plug-in says what it needs.
    assert len(way["climbs"]) <= 8
    assert all(climb.startswith("base/") for climb in way["climbs"])
