"""Output of the commands: lines, JSON, numbers, tables and web pages.

All output goes through this module: names, reasons, labels and cards may be untrusted. Control
characters are escaped, and rich's markup and emoji codes are not interpreted.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import shutil
import sys
import textwrap
import webbrowser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from adapterhub.errors import RegistryError, counted, one_line, printable
from adapterhub.files.shown_table import EN_DASH, ScoreError, ShownTable, score_text

if TYPE_CHECKING:
    from adapterhub.registry.copying import CopyReport
    from adapterhub.registry.store import Entry

_PIPE_WIDTH = 140  # characters per line of a table that is not printed on a terminal
_BLOCKS = "▁▂▃▄▅▆▇█"
_UNLIMITED = 1000  # characters per line in which no table wraps
_MOST_SAID = 10_000  # characters of a line: twenty of the longest labels, a screen or two
_MOST_IN_A_CELL = 200  # characters: longer ones push the other columns off the screen


def say(text: str, *, err: bool = False) -> None:
    """Print one line; line ends in it are escaped. `err` prints it to standard error."""
    click.echo(one_line(text, _MOST_SAID), err=err)


def say_wrapped(text: str, *, err: bool = False) -> None:
    """Print a paragraph, wrapped to the terminal; `err` prints it to standard error."""
    width = max(shutil.get_terminal_size().columns - 1, 40)
    line = one_line(text, _MOST_SAID).replace(" %", "\0%")  # a number stays with its unit
    click.echo(textwrap.fill(line, width, break_on_hyphens=False).replace("\0", " "), err=err)


def say_text(text: str, *, err: bool = False) -> None:
    """Print a text of several lines. `err` prints it to standard error."""
    click.echo(printable(text), err=err)


def print_json(value: object, *, indent: int | None = None) -> None:
    """Print a value as JSON, on one line unless `indent` gives the spaces per level.

    Characters that some output stream cannot encode are escaped.
    """
    ascii_only = not str(sys.stdout.encoding).lower().startswith("utf")
    click.echo(printable(json.dumps(value, indent=indent, ensure_ascii=ascii_only)))


def print_result(text: str, facts: object, *, as_json: bool) -> None:
    """Print the result of a command: one line, or its facts as JSON."""
    print_json(facts) if as_json else say(text)


def print_copied(report: CopyReport, source: str, target: str, *, as_json: bool) -> None:
    """Report the versions copied from a registry to another.

    Raises:
        RegistryError: some versions were not copied.
    """
    if as_json:
        print_json(vars(report))
    if report.refused:
        raise RegistryError(
            f"{counted(len(report.refused), 'version')} of {source} not copied",
            offenders=[f"{reference}: {reason}" for reference, reason in report.refused.items()],
        )
    if not as_json:
        changed = f", {len(report.changed)} tagged, signed or yanked" if report.changed else ""
        copied = counted(len(report.copied), "version")
        say(f"{target}: {copied} copied{changed}, {report.unchanged:,} were there")


def print_published(entry: Entry, done: str, *, as_json: bool) -> None:
    """Print a published version; `done` is the action in the past tense."""
    text = f"{done} {entry.reference} for {entry.backbone}, sha256 {entry.digest[:12]}"
    print_result(text, asdict(entry), as_json=as_json)


def print_next(entry: Entry, registry: str | None = None) -> None:
    """Print the next commands to type after an adapter was published."""
    from adapterhub.tasks import TASKS, Task

    typed = TASKS.get(entry.task or "", Task).typed_input()
    option = f" --registry {shlex.quote(registry)}" if registry else ""
    say(f"next: adapterhub predict {entry.reference}{option} {typed}", err=True)


def console(**options: Any) -> Console:
    """Return a console that prints texts unchanged, without markup, emoji codes or colours."""
    return Console(**options, markup=False, emoji=False, highlight=False)


def bytes_text(size: float) -> str:
    """Format a number of bytes in a unit that leaves two to four digits: "1.5 MB" (10^6 bytes)."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            if unit == "GB" and size < 10:
                return f"{size:.2f} GB"
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def seconds_text(seconds: float) -> str:
    """Format a duration: 75.2 as "1 min 15 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw values as a line of blocks, from ▁ for the least to █ for the greatest.

    More values than `width` are averaged. If the terminal's encoding lacks blocks, digits from 0 to
    7 are used.
    """
    count = min(width, len(values))
    bounds = [i * len(values) // count for i in range(count + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    blocks = _BLOCKS if _can_print(_BLOCKS) else "01234567"
    steps = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((mean - low) * steps)] for mean in means)


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def shown_score(value: float, error: ScoreError | None, digits: int = 4) -> str:
    """Format a score with its error, in characters that the terminal supports."""
    text = score_text(f"{value:.{digits}f}", error)
    return text if _can_print(text) else text.replace(EN_DASH, "-")


def print_facts(facts: Mapping[str, str], width: int) -> None:
    """Print one `name value` line per fact, with the names padded to `width` columns."""
    for name, text in facts.items():
        say(f"{name:{width}} {text}")


def print_table(
    table: ShownTable,
    optional: Sequence[str] = (),
    elsewhere: str = "use --json",
    unbroken: Sequence[str] = (),
) -> None:
    """Print a table: framed on a terminal, plain and wide to a file or pipe.

    On a narrow terminal, the `optional` columns are dropped in order, and listed below the table
    with the place where they are shown. Words in the first column and in the `unbroken` columns are
    not broken.
    """
    output = console()
    if not output.is_terminal:
        output = console(width=_PIPE_WIDTH)
        output.print(_rich_table(table, (), unbroken, framed=False))
        return
    unlimited = output.options.update(width=_UNLIMITED)
    for count in range(len(optional) + 1):
        left_out = optional[:count]
        drawn = _rich_table(table, left_out, unbroken, framed=True)
        if Measurement.get(output, unlimited, drawn).maximum <= output.width:
            break
    if left_out:
        drawn.caption = f"not shown: {', '.join(left_out)} ({elsewhere})"
    output.print(drawn)


def _rich_table(
    table: ShownTable, left_out: Sequence[str], unbroken: Sequence[str], *, framed: bool
) -> Table:
    """Return a table for rich: cells of one line each, unchanged, without markup."""
    box = HEAVY_HEAD if framed else SIMPLE_HEAD
    columns, cells = list[Column](), list[Iterable[Text]]()
    for i, title in enumerate(table.columns):
        if title in left_out:
            continue
        texts = [one_line(row[i], _MOST_IN_A_CELL) for row in table.texts()]
        whole = title in unbroken
        column = Column(
            Text(one_line(title)),
            justify="right" if table.numbers and i else "left",
            overflow="fold",
            no_wrap=i == 0 or (whole and not framed),
            width=_longest_word([title, *texts]) if whole and framed else None,
        )
        columns.append(column)
        cells.append(map(Text, texts))
    drawn = Table(*columns, title=table.title or None, title_justify="left", box=box)
    for row in zip(*cells, strict=True):
        drawn.add_row(*row)
    return drawn


def _longest_word(texts: Iterable[str]) -> int:
    return max((cell_len(word) for text in texts for word in text.split()), default=1)


def open_page(page: Path) -> None:
    """Open a page in the browser; print a note on a remote machine or without a display."""
    if not has_display(os.environ, sys.platform):
        say("no browser here: copy the file to your machine and open it there", err=True)
    elif not webbrowser.open(page.resolve().as_uri()):
        say("no browser was found: open the file yourself", err=True)


def has_display(environment: Mapping[str, str], platform: str) -> bool:
    """Return whether a browser would show up in front of the user."""
    if "SSH_CONNECTION" in environment or "SSH_TTY" in environment:
        return False
    return platform in ("win32", "darwin") or bool(
        environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY")
    )
