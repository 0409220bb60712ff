"""`adapterhub report`."""

from __future__ import annotations

from pathlib import Path

import click

from adapterhub.cli._format import examples, say
from adapterhub.cli._open import open_page


@click.command(
    "report",
    epilog=examples("adapterhub report runs/sst2 --open"),
)
@click.argument("run", metavar="RUN")
@click.option("--output", help="File to write.  [default: report.html in RUN]")
@click.option("--open", "show", is_flag=True, help="Open the page in the browser.")
def command(run: str, output: str | None, show: bool) -> None:
    """Write the page of a run anew: curves, scores and mistakes in one HTML file.

    RUN is the output folder of adapterhub train. The page contains texts of the evaluation data.
    """
    from adapterhub.pages.page import write_page

    page = write_page(Path(run), Path(output) if output else None)
    say(f"report       {page}")
    if show:
        open_page(page)
