"""``regimes report``: one self-contained HTML page of a run or an ablation, to mail to a colleague.

Styles and pictures are in the page, which loads nothing. The same records give the same bytes. No
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regimes.base.errors import RecordError
from regimes.base.inputs import track_inputs
from regimes.cli.html_report import content, pictures
from regimes.cost.network import Network
from regimes.records import select_while_loading, unpack_records, write_notes, write_output


@track_inputs()
def write_report(
    records: Path,
    network: str,
    out: Path,
    baseline: str | None = None,
    where: Sequence[str] = (),
) -> None:
    """Write the page of the records in a folder or archive.

    Args:
        records: the folder or archive.
        network: of which seconds are predicted, as `Network.parse` reads it.
        out: the file to write.
        baseline, where: see `plotting.schedules.compare`.
    """
    if not out.name or out.is_dir():
        raise RecordError(f"cannot write {out}: it is a folder, expected a file, e.g. report.html")
    write_output(out, render_page(records, network, baseline, where))


def render_page(
    records: Path, network: str, baseline: str | None = None, where: Sequence[str] = ()
) -> str:
    import jinja2

    link = Network.parse(network)
    with select_while_loading(where), unpack_records(records) as root:
        study = content.read_study(root, records)
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("regimes.cli.html_report", "."),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        return environment.get_template("page.html").render(
            unit=content.name_unit,
            study=study,
            notes=write_notes(study.runs),
            table=content.tabulate_results(study),
            differences=content.tabulate_differences(study, baseline),
            seconds=content.tabulate_seconds(study),
            cost=content.tabulate_cost(study, link),
            others=content.other_methods(study, link),
            configuration=content.write_configuration(study),
            provenance=content.tabulate_provenance(study),
            redraw=content.redraw_commands(study, network, baseline, where),
            pictures=pictures.draw_pictures(study),
        )
