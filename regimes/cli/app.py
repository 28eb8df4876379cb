"""The application of the subcommands, and what their words have in common. A field of the
configuration written as an option is refused here, with the ``--set`` to write."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import tyro
from tyro.extras import SubcommandApp

from regimes.base.config import RunConfig
from regimes.base.console.metavars import named
from regimes.base.errors import ConfigError
from regimes.cost.options import JobOptions


class _App(SubcommandApp):
    """`regimes --version` prints the version; `regimes figure NAME WORDS` passes all words to the
    figure; a field of the configuration as an option is an error with the `--set` to write.

    Attributes:
        commands: the functions of all commands by name, once all are registered.
    """

    commands: Mapping[str, Callable[..., object]] = {}

    def cli(self, **kwargs: Any) -> Any:
        check_no_empty_word(sys.argv[1:])
        match sys.argv[1:]:
            case ["--version"]:
                from regimes import __version__

                return print(f"regimes {__version__}")
            case ["figure", name, *words] if not name.startswith("-"):
                from regimes.plotting import offered

                return None if offered.begin_figure(name, words) else sys.exit(2)
            case [verb, *words] if not {"-h", "--help"} & {*words}:
                _check_options(verb, words, self.commands)
        return super().cli(**kwargs, config=(tyro.conf.DisallowNone,))  # "None" is not shown


app = _App()


Settings = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], named("KEY=VALUE")]]
Conditions = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], named("FIELD=VALUE")]]
Changes = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], named("CHANGE")]]
Patterns = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], named("PATTERNS")]]
Names = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], named("NAME")]]


def _check_options(
    verb: str, words: Sequence[str], commands: Mapping[str, Callable[..., object]]
) -> None:
    """Raise ConfigError if an option of this command is a field for `--set`."""
    known = list_options(commands[verb]) if verb in commands else set()
    if "set" not in known:
        return
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        key, _, value = word.removeprefix("--").partition("=")
        name = key.replace("-", "_")
        if word.startswith("--") and name not in known and (field := _find_field(name)):
            value = value or (following if following and not following.startswith("--") else "...")
            if field == "seed" and "first_seed" in known:
                raise ConfigError(
                    f"--seed is no option of regimes {verb}: write --seeds 1 --first-seed {value}"
                )
            setting = shlex.quote(f"{field}={value}")
            raise ConfigError(f"--{key} is no option of regimes {verb}: write --set {setting}")


def check_no_empty_word(words: Sequence[str]) -> None:
    """Raise ConfigError for an empty word, such as a shell's variable that is not set: as a path it
    would be the current folder."""
    for before, word in zip(["", *words], words, strict=False):
        if not word or (word.startswith("--") and word.endswith("=")):
            after = word.rstrip("=") or (before if before.startswith("--") else "")
            raise ConfigError(f"an empty text{f' as {after}' * bool(after)}: expected a value")


def list_options(command: Any) -> set[str]:
    """List the names of a command's parameters; ``job`` stands for the fields of `JobOptions`."""
    known = {*inspect.signature(command).parameters}
    if "job" in known:
        known |= {field.name for field in dataclasses.fields(JobOptions)} - {"job"}
    return known


def refuse_seed(settings: Sequence[str]) -> None:
    """Raise ConfigError for a seed among the settings of a grid: its runs have seeds of their
    own."""
    for text in settings:
        key, _, value = text.partition("=")
        if key.strip() == "seed":
            raise ConfigError(
                f"--set {text}: the runs of a grid have the seeds of --seeds and --first-seed: "
                f"write --seeds 1 --first-seed {value.strip()}"
            )


def _find_field(key: str) -> str:
    """The path of a field of the configuration, given the path or its last part; "" if none."""
    plain = dataclasses.asdict(RunConfig())
    if key in plain or ("." in key and isinstance(plain.get(key.partition(".")[0]), dict)):
        return key
    tables = ("optimizer", "model", "data")
    of_configuration = (f"{table}.{key}" for table in tables if key in plain[table])
    if field := next(of_configuration, ""):
        return field
    from regimes.policies import REGISTRY

    policies = (dataclasses.fields(REGISTRY.dataclass(name)) for name in REGISTRY)
    known = {field.name for fields in policies for field in fields if field.init}
    return f"policy.{key}" if key in known else ""


def welcome_plug_ins() -> None:
    """Allow package.module:Class of the current folder, after installed packages. Commands that
    only read records never call this."""
    if "" not in sys.path:
        sys.path.append("")
