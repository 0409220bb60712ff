"""`adapterhub show`."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import bytes_text, print_json, say, say_text, shown_score
from adapterhub.cli._options import backbone_option, registry_option, require_signature_option
from adapterhub.cli.list import main_metric
from adapterhub.errors import AdapterhubError, one_line
from adapterhub.files.shown_table import ERRORS, recorded_errors

if TYPE_CHECKING:
    from adapterhub.files.manifest import Manifest
    from adapterhub.files.native import Saved
    from adapterhub.registry.store import Entry, Reference

_WIDTH = 12  # characters of the names of facts
_WIDEST = 100  # characters of a line, also on a wide terminal
_MOST_VERSIONS = 8
_MOST_LABELS = 10
_MOST_OPTION = 60  # characters of an option of a method
_MOST_CARD = 8  # lines of the author's text
_MOST_CHARACTERS = 20_000  # bytes of a card; only its beginning is shown


@click.command("show")
@click.argument("reference")
@click.option("--card", "whole_card", is_flag=True, help="Print the whole card.")
@backbone_option
@registry_option
@require_signature_option
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def command(
    reference: str, whole_card: bool, backbone: str | None, registry: str | None, as_json: bool
) -> None:
    """Show an adapter on one screen: description, scores, versions and usage.

    REFERENCE is a run folder, an adapter folder or a published name.
    """
    from adapterhub.files.card import built_from, read_card, started_from, taught_by
    from adapterhub.files.manifest import heads_text, to_json
    from adapterhub.files.native import chain_text
    from adapterhub.registry.local import store_of
    from adapterhub.registry.pull import pull_verified, read_reference
    from adapterhub.registry.version_files import name_to_publish

    parsed = read_reference(reference, registry)
    fetched = pull_verified(parsed, backbone=backbone, registry=registry)
    saved, folder = fetched.own(), fetched.folder
    manifest = saved.manifest
    if as_json:
        print_json(json.loads(to_json(manifest)), indent=2)
        return
    if whole_card:
        _print_card(read_card(folder))
        return
    entry, versions = None, ()  # type: tuple[Entry | None, Sequence[Entry]]
    if parsed.kind != "folder":
        store = store_of(parsed, registry)
        entry = store.resolve(parsed.name, parsed.version, backbone=backbone)
        versions = store.versions(parsed.name, backbone=backbone)
    say(_title(entry) if entry else f"{name_to_publish(saved)}, in {folder}")
    facts = {
        "versions": _versions_text(versions),
        "about": manifest.description or "",
        "task": "" if manifest.heads else _task_text(manifest),
        "heads": heads_text(manifest),
        "method": methods_text(manifest.methods),
        "starts from": started_from(manifest),
        "teacher": taught_by(manifest),
        "on top of": chain_text(saved.on),
        "built from": "; ".join(built_from(manifest)),
        "backbone": _backbone_text(manifest),
        "scores": _scores_text(manifest),
        "trained on": _training_text(manifest),
        "size": _size_text(manifest, entry),
        "signed": _signed_text(parsed, saved, entry),
        "licence": manifest.license or "",
        "topics": ", ".join((*manifest.language, *manifest.tags)),
    }
    for name, text in facts.items():
        _print_fact(name, text)
    head = next(iter(manifest.heads), None)
    for number, line in enumerate(_uses(reference, registry, head, _typed(manifest))):
        say(f"{'' if number else 'use it':{_WIDTH}}{line}")
    _print_own_text(read_card(folder), entry.name if entry else manifest.name, reference)


def _line_width() -> int:
    return max(min(shutil.get_terminal_size().columns, _WIDEST), 40)


def _print_fact(name: str, text: str) -> None:
    """Print a fact, wrapped after its name; nothing if its text is empty."""
    width = _line_width() - _WIDTH
    lines = textwrap.wrap(one_line(text), width, break_on_hyphens=False) if text else []
    for number, line in enumerate(lines):
        say(f"{'' if number else name:{_WIDTH}}{line}")


def _title(entry: Entry) -> str:
    date = f", published {entry.published[:10]}" if entry.published else ""
    return entry.reference + date + (f", yanked: {entry.yanked}" if entry.yanked else "")


def _versions_text(versions: Sequence[Entry]) -> str:
    """List the versions, newest first, each with its tags."""
    texts = []
    for entry in versions[::-1][:_MOST_VERSIONS]:
        yanked = ["yanked"] if entry.yanked is not None else []
        notes = [*entry.tags, *yanked, *([entry.published[:10]] if entry.published else [])]
        texts.append(f"{entry.version} ({', '.join(notes)})" if notes else entry.version)
    more = len(versions) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more else "")


def _task_text(manifest: Manifest) -> str:
    labels = manifest.labels
    more = f" and {len(labels) - _MOST_LABELS:,} more" if len(labels) > _MOST_LABELS else ""
    names = f": {', '.join(labels[:_MOST_LABELS])}{more}" if labels else ""
    return f"{manifest.task or 'none recorded'}{names}"


def methods_text(methods: Iterable[Mapping[str, Any]]) -> str:
    """Format the methods as typed, without default options and options without effect."""
    from adapterhub.config.options import is_neutral, options_of, to_dict
    from adapterhub.methods.common.base import described_methods

    known = described_methods()
    texts = []
    for name, options in (pair for spec in methods for pair in spec.items()):
        own = options_of(known[name].options) if name in known else ()
        usual = to_dict({option.name: option.default for option in own})
        shown = {k: v for k, v in options.items() if not is_neutral(v) and v != usual.get(k)}
        inner = ", ".join(f"{option}={_option_text(value)}" for option, value in shown.items())
        texts.append(f"{name}({inner})" if inner else name)
    return " + ".join(texts)


def _option_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        text = f"[{', '.join(map(str, value))}]"
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MOST_OPTION else f"{text[:_MOST_OPTION]}..."


def _backbone_text(manifest: Manifest) -> str:
    backbone = manifest.backbone
    revision = f" at {backbone.revision[:12]}" if backbone.revision else ""
    loaded = backbone.quantization or (backbone.dtype if backbone.dtype != "fp32" else None)
    return f"{backbone.id}{revision}" + (f", trained in {loaded}" if loaded else "")


def _scores_text(manifest: Manifest) -> str:
    """List the metrics, the main one of the task first."""
    main = "mean" if manifest.heads else main_metric(manifest.task)
    names = sorted(manifest.metrics, key=lambda name: (name != main, name))
    errors = recorded_errors(manifest.training.get(ERRORS))
    return ", ".join(
        f"{name} {shown_score(manifest.metrics[name], errors.get(name), digits=3)}"
        for name in names
    )


def _training_text(manifest: Manifest) -> str:
    record = manifest.training
    data, recipe = _mapping(record, "data"), _mapping(record, "recipe")
    epochs = _mapping(recipe, "train").get("epochs")
    facts = (
        f"{_count(data.get('train'))} examples" if data.get("train") else "",
        f"evaluated on {_count(data.get('eval'))}" if data.get("eval") else "",
        f"{epochs} epoch{'s' * (epochs != 1)}" if epochs else "",
        f"{_count(record.get('steps'))} steps" if record.get("steps") else "",
        f"seed {record['seed']}" if "seed" in record else "",
    )
    return ", ".join(filter(None, facts))


def _mapping(parent: dict[str, Any], name: str) -> dict[str, Any]:
    value = parent.get(name)
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _size_text(manifest: Manifest, entry: Entry | None) -> str:
    size = entry.size if entry else manifest.nbytes  # as `list` shows it
    return f"{bytes_text(size)}, {manifest.parameters:,} parameters"


def _signed_text(parsed: Reference, saved: Saved, entry: Entry | None) -> str:
    """Describe who signed an adapter, from the signatures next to it."""
    from adapterhub.registry.trust import signatures_beside

    if entry is not None and not entry.fingerprint:
        return "cannot be signed: another library's adapter"
    try:
        return "; ".join(map(str, signatures_beside(parsed, saved, entry))) or "no"
    except AdapterhubError as error:
        return f"not checked: {error.problem}"


def _typed(manifest: Manifest) -> str:
    """Return the arguments to type after `adapterhub predict ADAPTER`."""
    from adapterhub.tasks import TASKS, Task

    task = TASKS.get(manifest.task or "", Task)
    return task.typed_input()


def _uses(reference: str, registry: str | None, head: str | None, typed: str) -> Iterator[str]:
    """Yield lines of code that use an adapter; `typed` is an input to predict on."""
    option = f" --registry {registry}" * bool(registry) + f" --head {head}" * bool(head)
    argument = f', registry="{registry}"' * bool(registry) + f', head="{head}"' * bool(head)
    yield f"adapterhub predict {reference}{option} {typed}"
    yield f"adapterhub eval {reference}{option} --data FILE"
    yield f'ah.load(model, "{reference}"{argument})'


def _print_own_text(card: str, name: str, reference: str) -> None:
    """Print the beginning of the author's additions to the generated card."""
    from adapterhub.files.card import own_text, without_comments

    width = _line_width() - 2
    lines = [
        line
        for paragraph in _paragraphs(without_comments(own_text(card)[:_MOST_CHARACTERS]))
        for line in textwrap.wrap(one_line(paragraph), width, break_on_hyphens=False)
    ]
    if lines and lines[0].casefold() == f"# {name}".casefold():
        lines = lines[1:]
    if lines:
        say("")
        _print_indented(lines[:_MOST_CARD])
    if len(lines) > _MOST_CARD:
        say(f"and {len(lines) - _MOST_CARD} more lines: adapterhub show {reference} --card")


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a Markdown text; lists, tables and the like line by line."""
    for block in re.split(r"\n\s*\n", text):
        lines = block.split("\n")
        is_plain = all(line[:1].isalpha() for line in lines)
        yield from [" ".join(lines)] if is_plain else lines


def _print_card(card: str) -> None:
    from adapterhub.files.card import split_card, without_comments

    _, text = split_card(card)
    _print_indented(without_comments(text).strip().split("\n"))


def _print_indented(lines: Sequence[str]) -> None:
    # Prevents lines of an untrusted card from looking like output of this program.
    say_text("\n".join(f"  {line}" for line in lines))
