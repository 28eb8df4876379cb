"""What the callbacks save of a hook under FSDP2, and load again (oracle: each process's state)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regimes.base.errors import ConfigError
from regimes.integrations import shared


class Group:
    """A world whose processes speak in turn, the first one last."""

    def __init__(self, processes: int) -> None:
        self.processes, self.said = processes, dict[int, Any]()

    def hook(self, rank: int, mesh: Any = "shards") -> Any:
        def gather(value: Any) -> Any:
            self.said[rank] = value
            return None if rank else [self.said[i] for i in range(self.processes)]

        hook = SimpleNamespace(source=SimpleNamespace(mesh=mesh), loaded=[])
        hook.world = SimpleNamespace(
            rank=rank,
            processes=self.processes,
            gather_to_first=gather,
            gather_object=lambda value: [value] * self.processes,
        )
        hook.state_dict = lambda: {"parts": [rank, "a state"]}
        hook.load_state_dict = hook.loaded.append
        hook.sharded_state = lambda saved=None: ("sharded", rank, saved)
        hook.full_state_dict = lambda: {"whole": True}
        hook.load_full_state_dict = hook.loaded.append
        return hook


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_lightnings_checkpoint_has_the_state_of_each_process(processes: int) -> None:
    group = Group(processes)
    states = [shared.collect_states(group.hook(rank)) for rank in reversed(range(processes))]
    assert states[:-1] == [None] * (processes - 1)
    saved = states[-1]
    assert saved is not None
    for rank in range(processes):
        hook = group.hook(rank)
        shared.load_collected(hook, saved)
        assert hook.loaded == [{"parts": [rank, "a state"]}]
    with pytest.raises(ConfigError, match=f"saved on {processes} processes, this job has 4"):
        shared.load_collected(Group(4).hook(0), saved)
    with pytest.raises(ConfigError, match="saved under FSDP2, this job is one of DDP"):
        shared.load_collected(group.hook(0, mesh=None), saved)


def test_a_checkpoint_folder_has_the_sharded_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[Path, Any] = {}

    def save(parts: Any, folder: Path) -> None:
        folder.mkdir()
        kept[folder] = parts

    monkeypatch.setattr(shared, "save_parts", save)
    monkeypatch.setattr(shared, "load_parts", lambda parts, folder: kept.update(loaded=parts))
    hook = Group(2).hook(1)
    shared.save_hook(hook, tmp_path)
    (folder,) = kept
    assert folder.parent == tmp_path
    assert kept[folder] == {"hook": ("sharded", 1, None)}
    shared.load_hook(hook, tmp_path)
    assert kept["loaded"] == {"hook": ("sharded", 1, folder)}  # type: ignore[index]
    with pytest.raises(ConfigError, match="saved without the hook"):
        shared.load_hook(Group(2).hook(1, mesh=None), tmp_path)
