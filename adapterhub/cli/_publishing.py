"""Options and output shared by the registry commands."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click

from adapterhub.cli._format import print_json, say
from adapterhub.files.manifest import LOWER_IS_BETTER

if TYPE_CHECKING:
    from adapterhub.files.signature import PrivateKey
    from adapterhub.registry.store import Entry

Function = TypeVar("Function", bound=Callable[..., Any])

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
registry_option = click.option(
    "--registry", help="Registry folder (default: $ADAPTERHUB_REGISTRY, or your own registry)."
)
allow_finding_option = click.option(
    "--allow-finding",
    "allow_findings",
    multiple=True,
    metavar="CODE",
    help="Publish a text that looks private and is not.",
)
backbone_option = click.option("--backbone", help="Only for this backbone: its id or fingerprint.")

task_option = click.option("--task", metavar="TASK", help="The task, if the adapter records none.")
head_option = click.option("--head", metavar="NAME", help="Which head, of an adapter with several.")


def _require(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from adapterhub.registry.trust import requiring_signatures

        context.with_resource(requiring_signatures())


require_signature_option = click.option(
    "--require-signature",
    is_flag=True,
    expose_value=False,
    callback=_require,
    help="Refuse adapters that no trusted key has signed.",
)
sign_option = click.option("--sign", "key", metavar="KEY", help="Sign it with this private key.")


def private_key(path: str | None) -> PrivateKey | None:
    """Read a private key, and ask for its passphrase if it has one; None if there is no path."""
    from adapterhub.files.signature import read_private_key

    def ask() -> str:
        return str(click.prompt(f"Passphrase of {path}", hide_input=True, err=True))

    interactive = sys.stdin.isatty()
    return None if path is None else read_private_key(path, ask if interactive else None)


def publication_options(function: Function) -> Function:
    """Add the options that describe an adapter to publish."""
    for option in (
        click.option("--topic", "topics", multiple=True, help="A subject: german, medical."),
        click.option("--language", multiple=True, help="A language of the data: en, de."),
        click.option("--license", help="Licence of the adapter: apache-2.0, cc-by-4.0."),
        click.option("--description", help="One sentence for the card and the listing."),
    ):
        function = option(function)
    return function


def score_text(entry: Entry, metric: str | None = None) -> str:
    """Format the score of a version: `metric`, the main metric of its task, or its first one.

    Args:
        entry: the version.
        metric: the metric, if the version has it.
    """
    others = (name for name in sorted(entry.metrics) if name not in LOWER_IS_BETTER)
    for name in (metric, main_metric(entry.task), *others):
        if name in entry.metrics:
            return f"{name} {entry.metrics[name]:.3f}"
    return ""


@functools.lru_cache
def main_metric(task: str | None) -> str | None:
    """Return the metric that a task is judged by; None for an unknown task."""
    from adapterhub.tasks import TASKS

    return TASKS[task]().main_metric if task in TASKS else None


def short_backbone(backbone: str) -> str:
    """Shorten the id of a backbone for a table: without its owner, or the local name's digits."""
    name = backbone.rpartition("/")[2]
    return re.sub(r"(?<=.)--[0-9a-f]{12}$", "", name)


def print_entry(entry: Entry, as_json: bool, done: str) -> None:
    """Print a published version, as one line or as JSON.

    Args:
        entry: the version.
        as_json: print its fields as one JSON object.
        done: what was done with it, in the past tense: "published".
    """
    if as_json:
        print_json(asdict(entry))
    else:
        say(f"{done} {entry.reference} for {entry.backbone}, sha256 {entry.digest[:12]}")
