"""The record: what a run leaves on disk, enough to redraw every figure and replay every policy.

A run is a folder:

- ``run.json``: schema, resolved configuration, code version, machine, the layer table.
- ``epochs.jsonl``: one line per epoch, append-only: row i is epoch i. Holds nothing that a clock
  decides, so that the same configuration and code give the same bytes, interrupted or not.
- ``seconds.jsonl``: per epoch, where the time went. A crash may leave it one epoch ahead.
- ``instruments.jsonl``: what instruments found beyond the statistics of ``epochs.jsonl``; in the
  order of epochs, at most one line per epoch and instrument. A crash may leave it ahead as well.
- ``events.jsonl``: starts, resumes, ends, and why a run stopped.
- ``superseded.jsonl``: lines that a resume from an earlier checkpoint trained again. A resume that
  was killed may have set a line aside twice.
- ``chain.jsonl``: what each of these has come to, so that an edit is noticed; see `chain`.

A crash at any byte leaves a readable record: a torn last line is not a line. Lines that are
doubled, missing or out of order are damage, and so is what `schema` does not allow: every reader
says so. No torch here.

`files` replaces files and appends to them, `writer` writes records, `lines` reads their files, by
the table in `schema` and its `kinds`, `reader` makes a `Record` of them, `frames` tables; `extent`
says how far a run is, `said` what a user's own training does not say, `archive` packs many runs.
`experiment` decides which runs are seeds of the same experiment, and `selection` which of them a
command reads.
"""

from regimes.records.archive import load_all, opened, pack
from regimes.records.chain import edited
from regimes.records.experiment import (
    apart_from,
    check_one,
    differing,
    identity,
    mixed,
    notes,
    separate,
    variants,
)
from regimes.records.extent import (
    complete,
    count_units,
    ended,
    length,
    progress,
    share_of_low,
    unit_name,
    units,
)
from regimes.records.files import check_output, write_atomically, write_output, write_table
from regimes.records.lines import check_together, read_header, read_lines
from regimes.records.reader import (
    FREE_ON_RESUME,
    Record,
    check_same,
    find,
    load,
    summary,
)
from regimes.records.reporting import check_reporters, reporters
from regimes.records.said import NOT_SAID, OWN, not_said
from regimes.records.schema import SCHEMA
from regimes.records.selection import gathered, reading, select
from regimes.records.writer import RecordWriter

__all__ = [
    "FREE_ON_RESUME",
    "NOT_SAID",
    "OWN",
    "SCHEMA",
    "Record",
    "RecordWriter",
    "apart_from",
    "check_one",
    "check_output",
    "check_reporters",
    "check_same",
    "check_together",
    "complete",
    "count_units",
    "differing",
    "edited",
    "ended",
    "find",
    "gathered",
    "identity",
    "length",
    "load",
    "load_all",
    "mixed",
    "not_said",
    "notes",
    "opened",
    "pack",
    "progress",
    "read_header",
    "read_lines",
    "reading",
    "reporters",
    "select",
    "separate",
    "share_of_low",
    "summary",
    "unit_name",
    "units",
    "variants",
    "write_atomically",
    "write_output",
    "write_table",
]
