"""Which commit a record's code is, and that a campaign starts from one (oracles: git itself, and
`code_digest` over files that git has written)."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from analysis.campaign import begin, campaign
from analysis.findings import provenance as study
from regimes.base.errors import ConfigError, RecordError
from regimes.records import provenance

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
