"""The record: what a run leaves on disk, enough to redraw every figure and replay every policy.

A run is a folder:

- ``run.json``: schema, resolved configuration, code version, machine, the layer table.
- ``epochs.jsonl``: one line per epoch, append-only: row i is epoch i. Nothing in it depends on a
  clock: the same configuration and code give the same bytes, interrupted or not.
- ``seconds.jsonl``: per epoch, where the time went. A crash may leave it one epoch ahead.
- ``instruments.jsonl``: measurements beyond the statistics of ``epochs.jsonl``, at most one line
  per epoch and instrument, in the order of epochs. A crash may leave it ahead as well.
- ``events.jsonl``: starts, resumes, ends, and why a run stopped.
- ``superseded.jsonl``: lines that a resume from an earlier checkpoint trained again. A killed
  resume may have copied a line twice.
- ``chain.jsonl``: digests of all of these, by which an edit is noticed; see `chain`.

A branch has rows of its own units alone; readers put those of its trunk before them (`branches`).

A crash at any byte leaves a readable record: a torn last line is ignored. Lines that are doubled,
missing, out of order or not as `schema` allows are damage, which every reader reports. No torch.

`files` replaces files and appends to them, `writer` writes records, `lines` reads their files by
the types of `schema` and the checks of `kinds`, `reader` makes a `Record` of them, `frames` tables;
`extent` says how far a run is, `hooked` what a user's own training does not know, `archive` packs
many runs. `experiment` decides which runs are seeds of the same experiment, by their `fields`, and
`selection` which of them a command reads.
"""

# ruff: noqa: F401 -- the names of the room

from regimes.records.archive import load_all, pack, unpacked
from regimes.records.branches import (
    changes,
    first_unit,
    in_force,
    located,
    phases,
    read_rows,
    reference,
    spliced,
    trunk_of,
    trunk_table,
)
from regimes.records.chain import find_edit
from regimes.records.experiment import (
    check_same,
    check_same_experiment,
    identity,
    mixed_circumstances,
    notes,
    separate,
    sibling_difference,
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
from regimes.records.fields import SAVING, differing, resolved
from regimes.records.files import check_output, write_atomically, write_output, write_table
from regimes.records.hooked import NOT_SAID, OWN, unknown_fields
from regimes.records.lines import read_header, read_lines
from regimes.records.reader import Record, find, load
from regimes.records.reporting import check_reporters, reporters
from regimes.records.schema import Header, Row
from regimes.records.selection import select, select_and_separate, selecting, summary
from regimes.records.writer import RecordWriter
