"""The options that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from adapterhub.errors import ConfigError

if TYPE_CHECKING:
    from adapterhub.files.signature import PrivateKey

Function = TypeVar("Function", bound=Callable[..., Any])
Option: TypeAlias = Callable[[Function], Function]


def several_options(*options: Option[Any]) -> Option[Any]:
    """Return a decorator that adds options in their order in the help text."""

    def add(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def _require(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from adapterhub.registry.trust import requiring_signatures

        context.with_resource(requiring_signatures())


as_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
quiet_option = click.option("--quiet", is_flag=True, help="Print no progress.")
# The adapter.
registry_option = click.option(
    "--registry",
    help="Folder, bucket or https URL (default: $ADAPTERHUB_REGISTRY, or your own registry).",
)
backbone_option = click.option("--backbone", help="Only for this backbone: its id or fingerprint.")
head_option = click.option(
    "--head", metavar="NAME", help="Head to use, if the adapter has several."
)
task_option = click.option(
    "--task", metavar="TASK", help="The task, if the adapter does not record one."
)
max_length_option = click.option(
    "--max-length",
    type=click.IntRange(1),
    metavar="N",
    help="Truncate inputs to N tokens.  [default: the backbone's limit]",
)
lock_file_option = click.option(
    "--file", default="adapterhub.lock", show_default=True, help="Lock file."
)
require_signature_option = click.option(
    "--require-signature",
    is_flag=True,
    expose_value=False,
    callback=_require,
    help="Refuse adapters that no trusted key has signed.",
)
# The model that the adapter is loaded into.
backbone_place_option = click.option(
    "--backbone", help="Load the backbone from this Hub id or folder."
)
revision_option = click.option("--revision", help="Branch, tag or commit of a Hub backbone.")
kind_option = click.option("--task", help="Kind of model, such as causal-lm, if not recorded.")
# The form of a data file, detected by default: data.delimiter, data.encoding and so on.
text_column_option = click.option("--text", help="Text column.  [default: as in training]")
data_form_options = several_options(
    click.option("--delimiter", help="Field separator.  [default: detected]"),
    click.option("--encoding", help="Encoding of the file.  [default: detected]"),
    click.option(
        "--header/--no-header", default=None, help="The first line has column names, or not."
    ),
    click.option("--quoted/--no-quoted", default=None, help="Quotes enclose fields, or not."),
)
allow_option = click.option(
    "--allow-finding",
    "allow_findings",
    multiple=True,
    metavar="CODE",
    help="Publish a text that looks private and is not.",
)
# The description and signature of an adapter that is published or pushed.
publication_options = several_options(
    click.option("--description", help="One sentence for the card and the listing."),
    click.option("--license", help="Licence of the adapter: apache-2.0, cc-by-4.0."),
    click.option("--language", multiple=True, help="A language of the data: en, de."),
    click.option("--topic", "topics", multiple=True, help="A subject: german, medical."),
    click.option("--sign", "key", metavar="KEY", help="Sign it with this private key."),
    allow_option,
)
# Publication with files that plain peft loads.
peft_options = several_options(
    click.option(
        "--peft/--no-peft",
        default=None,
        help="Make peft's two files, or leave them out.  [default: those in DIR, if any]",
    ),
    click.option("--backbone", help="Folder of the backbone, for --peft, if it is not on the Hub."),
)


def private_key(path: str | None) -> PrivateKey | None:
    """Read a private key, prompting for a passphrase if it has one; None without a path."""
    from adapterhub.files.signature import read_private_key

    def ask() -> str:
        return str(click.prompt(f"Passphrase of {path}", hide_input=True, err=True))

    interactive = sys.stdin.isatty()
    return None if path is None else read_private_key(path, ask if interactive else None)


def check_engine(engine: str, workers: int | None, address: str | None) -> None:
    """Reject options of Ray for other engines, and Ray if it is not installed.

    Raises:
        ConfigError: the options conflict, or Ray is missing.
    """
    flags = {"--workers": workers, "--ray-address": address}
    if engine == "local" and (of_ray := [n for n, v in flags.items() if v is not None]):
        raise ConfigError(f"{' and '.join(of_ray)} without Ray", hint="--engine ray")
    if engine == "ray":
        from adapterhub.ray_cluster import import_ray

        import_ray()  # before reading anything
