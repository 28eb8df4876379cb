"""The record: what a run leaves on disk, enough to redraw every figure and replay every policy.

``docs/how-to/record.md`` lists the files of a record. A crash at any byte leaves it readable: a
torn last line is ignored, and ``seconds.jsonl`` or ``instruments.jsonl`` may be one epoch ahead.
Lines that are doubled, missing, out of order or not as `schema` allows are damage, which every
reader reports. No torch.

A branch has rows of its own units alone; readers put those of its trunk before them (`branches`).

`writer` writes records by `files`, `lines` reads them by `schema`, `reader` makes a `Record`.
`experiment` decides which runs are seeds of the same experiment, by their `fields`, and
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
    Sent,
    complete,
    count_units,
    ended,
    length,
    low_floats,
    progress,
    sent,
    share_of_low,
    unit_name,
    units,
)
from regimes.records.fields import SAVING, differing, resolved
from regimes.records.files import check_output, write_atomically, write_output, write_table
from regimes.records.hooked import NOT_RECORDED, OWN, unknown_fields
from regimes.records.lines import read_events, read_header, read_lines
from regimes.records.reader import Record, find, load
from regimes.records.reporting import check_reporters, reporters
from regimes.records.schema import Event, Header, Row
from regimes.records.selection import select, select_and_separate, selecting, summary
from regimes.records.writer import RecordWriter
