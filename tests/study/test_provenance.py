"""Which commit a record's code is, that a campaign starts from one, and which blocks of seeds are
pooled (oracles: git itself, `code_digest` over files that git has written, scipy on the committed
records, records that differ in one thing)."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from synthetic import make

from analysis.campaign import begin, campaign
from analysis.findings import pools
from analysis.findings import provenance as study
from analysis.findings.effects import minus
from regimes.base.errors import ConfigError, RecordError
from regimes.records import Record, load_all, provenance

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "data" / "reference"


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, check=True)
    return done.stdout.decode().strip()


def commit(folder: Path, **files: str | None) -> str:
    """Write files of the package (None: delete), commit all, return the commit."""
    for name, content in files.items():
        path = folder / "regimes" / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink() if content is None else path.write_text(content)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "x", "--allow-empty")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a small package, which is the one that runs."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / ".gitignore").write_text("*ignored*\n")
    init = folder / "regimes" / "__init__.py"
    init.parent.mkdir()
    init.write_text("")
    monkeypatch.setattr(provenance, "PACKAGE", folder / "regimes")
    monkeypatch.setattr(provenance, "code_digest", provenance.code_digest.__wrapped__)
    return folder


def test_a_digest_is_found_in_the_history(checkout: Path) -> None:
    """Of every state of the sources, by the digest of the files as they lay there; a state that
    came back keeps its first commit, and other files change nothing."""
    digests = []
    first = commit(checkout, a_py="1", b__c_py="2", b_py="3", **{"notes.txt": "4"})
    digests.append(provenance.code_digest())
    second = commit(checkout, a_py="5", b__c_py=None)
    digests.append(provenance.code_digest())
    commit(checkout, **{"notes.txt": "6"})
    commit(checkout, a_py="1", b__c_py="2")
    found = study.commits(checkout)
    assert [found[digest] for digest in digests] == [first, second]
    assert len(found) == 2
    (checkout / "regimes" / "a.py").write_text("never committed")
    assert provenance.code_digest() not in found


def test_a_side_branch_is_history_once_it_is_merged(checkout: Path) -> None:
    commit(checkout, a_py="1")
    home = git(checkout, "branch", "--show-current")
    git(checkout, "checkout", "-qb", "side")
    side = commit(checkout, a_py="2")
    digest = provenance.code_digest()
    git(checkout, "checkout", "-q", home)
    assert digest not in study.commits(checkout)
    git(checkout, "merge", "-q", "--no-ff", "-s", "ours", "-m", "m", "side")
    assert study.commits(checkout)[digest] == side


def test_the_head_of_this_checkout_is_found(checkout: Path) -> None:
    """Oracle: the digest of the files of `git archive`. They are committed alone, because the whole
    history takes seconds; `test_the_committed_records` reads that."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout")
    words = ["git", "-C", str(ROOT), "archive", "HEAD", "regimes"]
    packed = subprocess.run(words, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(checkout, filter="data")
    head = commit(checkout)
    assert study.commits(checkout) == {provenance.code_digest(): head}
    assert git(checkout, "rev-parse", f"{head}:regimes") == git(ROOT, "rev-parse", "HEAD:regimes")


def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no checkout with regimes/"):
        study.commits(tmp_path)
    with pytest.raises(RecordError, match="no records are named"):
        study.main(())


def test_where_records_lie(tmp_path: Path) -> None:
    for run in ("runs/small/low/seed-0", "runs/small/high/seed-0", "runs/smoke/low/seed-0"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "run.json").write_text("{}")
    runs = tmp_path / "runs"
    assert study.places(runs) == [runs / "small", runs / "smoke"]
    assert study.places(runs / "small") == [runs / "small"]
    assert len(study.places(REFERENCE)) == len([*REFERENCE.glob("*.tar.xz")])


@pytest.mark.slow
def test_the_committed_records(capsys: pytest.CaptureFixture[str]) -> None:
    """The headline grid as it was first run has no commit; since, and the control experiment, one
    each."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout")
    archives = tuple(
        REFERENCE / f"{name}.tar.xz" for name in ("small-before", "small", "smoke-controls")
    )
    rows = study.main(archives)
    assert "45 of 146 runs are of code that matches no commit" in capsys.readouterr().out
    assert set(rows.loc[rows["archive"] == "small-before", "commit"]) == {""}
    for archive, commit_ in (("smoke-controls", "ef53b5e"), ("small", "646801b")):
        (found,) = rows.loc[rows["archive"] == archive, "commit"]
        assert git(ROOT, "rev-parse", "--short", found) == commit_
    assert "| small-before | 40 | a93ccb7d595b | no commit |" in study.as_text(rows).markdown()
    with pytest.raises(SystemExit, match="1"):
        study.main(archives, strict=True)


# -- campaigns -------------------------------------------------------------------------------


def test_a_campaign_starts_from_a_commit(checkout: Path, tmp_path: Path) -> None:
    """Every kind of change is seen, other files are not; what is allowed is written down."""
    head = commit(checkout, a_py="1", **{"page.html": "2"})
    package, out = checkout / "regimes", tmp_path / "out"
    (checkout / "README").write_text("no part of the package")
    (package / "notes.txt").write_text("no source")
    assert provenance.find_changes() == []
    (package / "new.py").write_text("")
    (package / "ignored.py").write_text("")
    (package / "page.html").write_text("3")
    (package / "a.py").unlink()
    assert provenance.find_changes() == ["a.py", "ignored.py", "new.py", "page.html"]
    with pytest.raises(ConfigError, match=r"a\.py, ignored\.py, new\.py and 1 more.*--allow-dirty"):
        campaign.main(only=("smoke",), out=out)
    assert not out.exists()
    line = begin.checked(allow_dirty=True)
    begin.write_down(out, line)
    begin.write_down(out, line)
    first, second = map(json.loads, (out / begin.LOG).read_text().splitlines())
    assert first == second == line
    assert line["allow_dirty"]
    assert line["changed"] == provenance.find_changes()
    assert line["commit"].startswith(head[:12])
    assert line["digest"] == provenance.code_digest()


def test_an_installed_package_goes_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside a checkout, and inside one that does not have it: a virtual environment."""
    git(tmp_path, "init", "-q")
    package = tmp_path / ".venv" / "regimes"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(provenance, "PACKAGE", package)
    assert provenance.find_changes() is None
    line = begin.checked(allow_dirty=False)
    assert line["commit"] is None
    assert line["version"]


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / begin.LOG).mkdir()
    with pytest.raises(RecordError, match=r"cannot write .*campaign\.jsonl: it is a folder"):
        begin.write_down(tmp_path, {})


# -- blocks of seeds -----------------------------------------------------------------------

REFERENCE = Path(__file__).parents[2] / "data" / "reference"


def records(source: str, *names: str) -> list[Record]:
    found = load_all(REFERENCE / f"{source}.tar.xz")
    return [run for run in found if not names or run.name in names]


@pytest.mark.slow
def test_blocks_of_one_code_are_one() -> None:
    blocks = {name: records(name) for name in ("smoke-long", "smoke-long-controls")}
    runs = pools.pool(blocks, ("low", "accordion"))
    assert len(runs) == 2 * 16
    found = minus("accordion", "low")(runs)
    ends = stats.t.interval(0.95, 15, np.mean(found), stats.sem(found))
    assert [round(x, 1) for x in (np.mean(found), *ends)] == [-1.5, -2.7, -0.2]


def test_codes_are_equal_within_one_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = (frozenset(("a" * 12, "b" * 12)), frozenset(("c" * 12, "d" * 12)))
    monkeypatch.setattr(pools, "BIT_EQUAL", declared)
    assert pools.same_code(["a" * 64, "b" * 64])
    assert pools.same_code(["d" * 64, "c" * 64])
    assert pools.same_code(["e" * 64, "e" * 64])
    assert not pools.same_code(["a" * 64, "c" * 64])
    assert not pools.same_code(["a" * 64, "e" * 64])


@pytest.mark.slow
def test_a_block_of_unknown_code_is_refused() -> None:
    blocks = {name: records(name) for name in ("small", "small-controls")}
    why = r"low of seed \d+ was run by code 555ad41a92c8 and e8150785b942, which are not known"
    with pytest.raises(RecordError, match=f"small and small-controls cannot be pooled: {why}"):
        pools.pool(blocks, ("low",))


@pytest.mark.slow
def test_declared_codes_trained_the_same_in_the_records_too() -> None:
    """Two of them have runs of one configuration and seed: their epochs are equal, line by line."""
    ours, theirs = (
        {(run.name, run.seed): run for run in records(source, "low", "high")}
        for source in ("small-adaqs", "small-budget")
    )
    pairs = [(ours[key], theirs[key]) for key in ours.keys() & theirs.keys()]
    codes = [[str(run.header["code"]["digest"]) for run in pair] for pair in pairs]
    assert sum(a != b for a, b in codes) > 0
    for (a, b), digests in zip(pairs, codes, strict=True):
        if pools.same_code(digests):
            assert [row["statistics"] for row in a.rows] == [row["statistics"] for row in b.rows]


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (("config", "workers"), 3, "has another workers"),
        (("config", "optimizer", "lr"), 9.0, "has another optimizer"),
        (("data", "digest"), "x", "has another data.digest"),
        (("code", "digest"), "x" * 64, "which are not known to train the same"),
        (("config", "seed"), 0, "more than one has low of seed 0, which would count twice"),
    ],
    ids=str,
)
def test_what_is_another_experiment_is_refused(
    tmp_path: Path, place: tuple[str, ...], value: Any, why: str
) -> None:
    common = {"code": {"digest": "y" * 64}, "data": {"digest": "z"}}
    headers = {}
    for name, seed in (("a", 0), ("b", 1)):
        file = make(tmp_path / name, "low", seed) / "run.json"
        headers[file] = json.loads(file.read_text()) | common
        file.write_text(json.dumps(headers[file]))
    assert len(pools.pool({name: load_all(tmp_path / name) for name in "ab"}, ("low",))) == 2
    table = headers[file]
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    file.write_text(json.dumps(headers[file]))
    with pytest.raises(RecordError, match=f"a and b cannot be pooled: .*{why}"):
        pools.pool({name: load_all(tmp_path / name) for name in "ab"}, ("low",))
