"""Addresses and packages that files name: only those of works that exist and are somebody's.

A name that is free can be registered by anybody, whose code a reader would then run. The project
has no address and no name on a package index, so no file may give it one.

Oracles: the lists below, each entry checked by hand; names of packages: pyproject.toml.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = {"__pycache__", "runs", "figures", "site", "build", "dist", "cache"}  # not written by us
KINDS = {
    *(".py", ".sh", ".toml", ".yaml", ".yml", ".cff", ".txt", ".json"),
    *(".md", ".jinja", ".ipynb", ".html", ".css"),
}
FILES = ("Makefile", "run")  # run: of .ci
REPOSITORIES = {  # owner/name on github.com
    "chengyangfu/pytorch-vgg-cifar10",
    "epfml/powersgd",
    "kellerjordan/muon",
    "kuangliu/pytorch-cifar",
    "meliketoy/wide-resnet.pytorch",
    "uw-mad-dash/accordion",
    "weiaicunzai/pytorch-cifar100",
}
HOSTS = {
    *("arxiv.org", "docs.pytorch.org", "download.pytorch.org", "wikitext.smerity.com"),
    *("semver.org", "keepachangelog.com", "docs.skypilot.co", "github.com"),
    *("localhost", "127.0.0.1", "torch"),  # of the reader's own; of examples
}
INDEX = {
    *("ipykernel", "playwright", "pyarrow", "submitit", "tensorboard", "torchx", "transformers"),
    *("tyro", "uv", "wandb"),
}
URL = re.compile(r"\b(?:https?|ssh|git)://(?:[\w.-]+@)?(?P<host>[\w.-]*[\w])")
PLACE = re.compile(  # at a host of repositories, with a scheme or without
    r"\b(?:colab\.research\.google\.com/github|(?:github|gitlab|bitbucket|huggingface|codeberg)"
    r"(?:usercontent)?\.(?:com|org|co))[/:](?P<place>[\w.-]+/[\w.-]*\w)",
    re.IGNORECASE,
)
INSTALL = re.compile(
    r"\b(?:pip3?|pipx|uv pip|uv tool|conda|mamba|poetry|uv)(?:['\"],\s*['\"]|\s+)"
    r"(?:install|add)\b(?P<words>[^\n`#)]*)"
)
SENTENCE = re.compile(r",\s(?!['\"])| \(| or |[;&|]")  # goes on after a command

VALUED = {"-c", "-r", "-e", "--index-url", "--extra-index-url", "--python", "--resolution"}


def files() -> Iterator[Path]:
    """Every text file of a checkout that a reader sees, but what was made there."""
    for folder, folders, names in os.walk(ROOT):
        here = Path(folder)
        folders[:] = [
            name
            for name in folders
            if name not in MADE and (name == ".ci" or not name.startswith("."))
        ]
        for name in names:
            path = here / name
            if (path.suffix in KINDS or name in FILES) and name != Path(__file__).name:
                yield path


def written(path: Path) -> str:
    """Its text; of a notebook the cells, with what they printed."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def complaints(text: str) -> list[str]:
    """What a text names that is not on a list."""
    found = [m[0] for m in URL.finditer(text) if m["host"].lower() not in HOSTS]
    places = [m["place"].lower().removesuffix(".git") for m in PLACE.finditer(text)]
    found += [place for place in places if place not in REPOSITORIES]
    for match in INSTALL.finditer(text):
        found += [word for word in packages(match["words"]) if not known(word)]
    return found


def packages(words: str) -> Iterator[str]:
    """What an installer's command would take from an index: no options, paths or variables."""
    given = re.split(r"[\s'\",]+", SENTENCE.split(words)[0].strip())
    for before, word in zip(["", *given], given, strict=False):
        if before in VALUED or word.startswith("-") or not re.match(r"[A-Za-z]", word):
            continue
        if re.fullmatch(r"[A-Za-z][\w.-]*(\[[\w,.-]*\])?([<>=~!]=?[\w.*]+)?", word):
            yield word


def known(word: str) -> bool:
    name = re.split(r"[\[<>=~!]", word)[0].lower().rstrip(".")
    return name in INDEX | names_of_packages()


def names_of_packages() -> set[str]:
    """What pyproject.toml depends on, which is installed from an index in any case."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [word for words in project["optional-dependencies"].values() for word in words]
    found = {re.split(r"[\[<>=~!]", word)[0] for word in [*project["dependencies"], *extras]}
    return found - {project["name"]}  # an extra that has another one's packages


@pytest.mark.parametrize("suffix", [*sorted(KINDS), "other"])
def test_no_file_names_an_address_or_a_package_that_anybody_could_take(suffix: str) -> None:
    ours = [p for p in files() if (p.suffix if p.suffix in KINDS else "other") == suffix]
    named = {p.relative_to(ROOT).as_posix(): complaints(written(p)) for p in ours}
    assert {path: words for path, words in named.items() if words} == {}


def test_the_metadata_have_no_address() -> None:
    """hatchling writes those of [project.urls] into every wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "urls" not in project
    assert not re.search(r"^(url|repository\S*):", (ROOT / "CITATION.cff").read_text(), re.M)


FREE = """
pip install "regimes[text]"
pip install --upgrade regimes==0.3
uv pip install regimes
uv add regimes
conda install -c conda-forge regimes
['pip', 'install', 'regimes']
pip install -c constraints.txt torch regimes
git clone https://github.com/regimes/regimes
git clone git@github.com:regimes/regimes.git
[Open](https://colab.research.google.com/github/regimes/regimes/blob/main/a.ipynb)
see github.com/somebody/regimes
https://regimes.readthedocs.io/
https://huggingface.co/regimes/runs
pip install git+https://github.com/regimes/regimes.git
"""
KNOWN = """
pip install -e ".[text]"
pip install -c constraints.txt -e .
pip install dist/regimes-0.4.0-py3-none-any.whl
pip install --index-url https://download.pytorch.org/whl/cpu torch torchvision
pip install git+https://github.com/epfml/powersgd.git
"""


def test_a_name_that_is_free_would_be_found_and_what_is_known_is_left_alone() -> None:
    assert [line for line in FREE.strip().splitlines() if not complaints(line)] == []
    assert complaints(KNOWN) == []
