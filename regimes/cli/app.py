"""What the subcommands share: the application, and a configuration from a user's words."""

from __future__ import annotations

import sys
from typing import Any

import tyro
from tyro.extras import SubcommandApp

from regimes import presets
from regimes.config import RunConfig, load_toml, override


class _App(SubcommandApp):
    """`regimes figure NAME WORDS` leaves the words to the figure, options among them."""

    def cli(self, **kwargs: Any) -> Any:
        match sys.argv[1:]:
            case ["figure", name, *words] if not name.startswith("-"):
                from regimes.plotting import offered

                return offered.begin(name, words)
        return super().cli(**kwargs)


app = _App()
Settings = tyro.conf.UseAppendAction[tuple[str, ...]]


def welcome_plug_ins() -> None:
    """Let a user's words name a class in the current folder (package.module:Class). Installed
    packages come first, and commands that only read never ask for this."""
    if "" not in sys.path:
        sys.path.append("")


def configuration(preset: str, settings: tuple[str, ...]) -> RunConfig:
    """That of a preset or a TOML file, with settings."""
    welcome_plug_ins()
    known = load_toml(preset) if preset.endswith(".toml") else presets.get_preset(preset)
    return override(known, list(settings))
