"""`adapterhub report`."""

from __future__ import annotations

from pathlib import Path

import click

from adapterhub.cli._format import open_page, say
from adapterhub.config.user_folders import is_file
from adapterhub.errors import ConfigError

_STUDY = "study.yaml"


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--output",
    help="File to write.  [default: report.html in RUN, or runs.html next to several RUNs]",
)
@click.option("--open", "show", is_flag=True, help="Open the page in the browser.")
def command(runs: tuple[str, ...], output: str | None, show: bool) -> None:
    """Rewrite the page of a run: curves, scores and mistakes in one HTML file.

    RUN is the output folder of adapterhub train or adapterhub bench. Several runs are shown on one
    page, overlaid. The page of one run contains texts of the evaluation data.
    """
    folders = list(map(Path, dict.fromkeys(runs)))
    if len(folders) > 1:  # runs/* also matches the page that this command writes there
        folders = [folder for folder in folders if not is_file(folder)] or folders
    page = _write(folders, Path(output) if output else None)
    say(f"report       {page}")
    if show:
        open_page(page)


def _write(folders: list[Path], output: Path | None) -> Path:
    """Write the page for the runs or the study in the folders."""
    studies = [folder for folder in folders if is_file(folder / _STUDY)]
    if studies and len(folders) > 1:
        raise ConfigError(
            f"{studies[0]} is a study, which has a separate page",
            expected="one study, or runs of adapterhub train",
        )
    if studies:
        from adapterhub.cli._study import report_study

        return report_study(studies[0], output)
    if len(folders) > 1:
        from adapterhub.pages.comparison import write_runs_page

        return write_runs_page(folders, output)
    from adapterhub.pages.page import write_page

    return write_page(folders[0], output)
