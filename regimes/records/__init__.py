"""The record: what a run leaves on disk, enough to redraw every figure and replay every policy.

This room uses base alone. ``docs/how-to/record.md`` lists the files of a record. A crash at any
byte leaves it readable: a torn last line is ignored, and ``seconds.jsonl`` or ``instruments.jsonl``
may be one epoch ahead.
Lines that are doubled, missing, out of order or not as `schema` allows are damage, which every
reader reports. No torch.

A branch has rows of its own units alone; readers put its trunk's before them (`branches`).

`writer` writes records by `files`, `lines` reads them by `schema`, `reader` makes a `Record`.
`same_experiment` decides which runs are seeds of the same experiment, by their `fields`, and
`selection` which of them a command reads.
"""

# ruff: noqa: F401 -- the names of the room

from regimes.records.archive import load_all, pack_records, unpack_records
from regimes.records.branches import (
    changed_fields,
    first_unit,
    in_force,
    list_phases,
    locate_trunk,
    read_rows,
    splice_phases,
    trunk_of,
    trunk_reference,
    trunk_table,
)
from regimes.records.chain import find_edit
from regimes.records.extent import (
    Sent,
    count_exchanges,
    count_units,
    format_progress,
    has_ended,
    is_complete,
    low_floats,
    number_of_units,
    run_length,
    run_name,
    share_of_low,
    sum_sent,
    unit_name,
)
from regimes.records.fields import SAVING, differing_fields, resolve_config
from regimes.records.files import check_output, write_atomically, write_output, write_table
from regimes.records.hook_fields import NOT_RECORDED, OWN, unknown_fields
from regimes.records.lines import read_events, read_header, read_lines
from regimes.records.reader import Record, find_runs, load
from regimes.records.reporting import check_reporters, make_reporters
from regimes.records.same_experiment import (
    check_same,
    check_same_experiment,
    identify_experiment,
    list_variants,
    mixed_circumstances,
    separate_experiments,
    sibling_difference,
    write_notes,
)
from regimes.records.schema import Event, Header, Row
from regimes.records.selection import (
    last_metric,
    select_and_separate,
    select_runs,
    select_while_loading,
    summary,
)
from regimes.records.uncompressed_layers import (
    describe_uncompressed_layers,
    list_uncompressed_layers,
)
from regimes.records.writer import RecordWriter
