"""Start of a campaign: packed records are unpacked, and the commit of the code is written down."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from regimes.base.errors import ConfigError, RecordError
from regimes.records import provenance, unpack_records
from regimes.records.files import check_regular

LOG = "campaign.jsonl"


def checked(allow_dirty: bool) -> dict[str, Any]:
    """What a campaign is about to run: version, commit, digest, and the files of the package that
    are not as committed. An installed package has no commit and goes by its version.

    Raises:
        ConfigError: there are such files, and they are not allowed.
    """
    changed = provenance.find_changes()
    if changed and not allow_dirty:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ConfigError(
            f"regimes/ is not as committed ({', '.join(changed[:3])}{more}), so that no commit "
            "would have the code of these records: commit first, or --allow-dirty"
        )
    code = provenance.describe_code()
    if changed is None:
        code["commit"] = None
    return {"event": "start", **code, "changed": changed or [], "allow_dirty": allow_dirty}


def write_down(out: Path, line: dict[str, Any]) -> None:
    """Append a start to the campaign's log in ``out``.

    Raises:
        RecordError: it cannot be written.
    """
    path = out / LOG
    try:
        out.mkdir(parents=True, exist_ok=True)
        check_regular(path)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}") from None


def unpack(archives: Path, out: Path) -> None:
    """Begin with packed records: each archive becomes the folder of its step.

    Raises:
        RecordError: no archives there, or a damaged one; ``out`` cannot be written.
    """
    paths = sorted(archives.glob("*.tar.xz"))
    if not paths:
        raise RecordError(f"no archive of records in {archives}: expected files *.tar.xz")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in paths:
            folder = out / path.name.removesuffix(".tar.xz")
            if not folder.exists():
                with (
                    unpack_records(path) as scratch,
                    tempfile.TemporaryDirectory(dir=out) as unfinished,
                ):
                    shutil.copytree(scratch, Path(unfinished, "whole"))
                    Path(unfinished, "whole").rename(folder)
    except OSError as error:
        raise RecordError(f"cannot write {out}: {error.strerror or error}") from None
