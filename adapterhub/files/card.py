"""The model card of an adapter (`README.md`), generated from the manifest.

    ---                          metadata in the Hub's format
    ...                          the author's text, preserved
    <!-- adapterhub -->          description, results, how to load it, training:
    <!-- /adapterhub -->         regenerated when the adapter is published

Text outside these comments belongs to the author, and so do metadata fields that the manifest
does not define. Quotes from the manifest in the block are always literal text or code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterhub._version import __version__
from adapterhub.config.yaml import MAX_BYTES, dump_yaml, parse_mapping
from adapterhub.errors import ConfigError, OutputError, one_line
from adapterhub.files.atomic import UnreadableError, read_file
from adapterhub.files.manifest import Manifest, heads_text, with_head
from adapterhub.files.shown_table import (
    ERRORS,
    TEST,
    ShownTable,
    TableCell,
    code_block,
    literal,
    recorded_errors,
    score_text,
)

CARD_FILE = "README.md"
MAX_CARD_BYTES = 1 << 20
_START, _END = "<!-- adapterhub -->", "<!-- /adapterhub -->"
UNPUBLISHED = "THIS FOLDER"
_MOST_LABELS = 20
_MULTI_LABEL = "multi_label_classification"  # a problem type of transformers
_SIGMOID = "the probability of each is the sigmoid of its logit."
_MOST_RECIPE = 20_000
_MOST_HEADS = 1_000  # characters in the description of several heads
_MOST_FACT = 100  # characters of a free value of the training record
# On lines of their own: the code in a block may contain the comments too.
_START_LINE, _END_LINE = (re.compile(rf"^{mark}[ \t]*$", re.M) for mark in (_START, _END))


@dataclass(frozen=True)
class InPeft:
    """Whether peft can load the published repository.

    `kind` is the task of the model to load it on (a key of TASK_MODELS); `problems` lists
    the reasons why peft cannot load it.
    """

    kind: str | None
    problems: tuple[str, ...] = ()


def card(
    manifest: Manifest, old: str = "", *, reference: str = UNPUBLISHED, peft: InPeft | None = None
) -> str:
    """Return the card of an adapter, preserving the author's text of an `old` card.

    `reference` loads the adapter; `peft` is None if unknown (before publishing).
    """
    metadata, text = split_card(old)
    before, after = _around_block(text)
    title = "" if before.strip() else f"# {literal(_name(manifest, reference))}\n\n"
    block = f"{_START}\n\n{title}{_block(manifest, reference, peft)}\n\n{_END}"
    text = f"{before.strip()}\n\n{block}{after}"
    front = metadata | _metadata(manifest, metadata.get("tags"), peft)
    return f"---\n{dump_yaml(front, for_all=True)}---\n\n{text.lstrip()}"


def own_text(text: str) -> str:
    """Return the author's text around the generated block of a card."""
    return "\n".join(part.strip() for part in _around_block(_split_front(text)[1])).strip()


def without_comments(text: str) -> str:
    """Remove HTML comments in one pass, since a hostile card may open very many."""
    first, *parts = text.split("<!--")
    for part in parts:
        comment, end, rest = part.partition("-->")
        first += rest.lstrip("\n") if end else f"<!--{comment}"
    return first


def _around_block(text: str) -> tuple[str, str]:
    """Split a card's text into the parts before and after the generated block."""
    start = _START_LINE.search(text)
    end = _END_LINE.search(text, start.end()) if start else None
    return (text[: start.start()], text[end.end() :]) if start and end else (text, "\n")


def export_card(
    name: str, methods: Sequence[str], labels: Sequence[str], problem_type: str | None = None
) -> str:
    """Return the card of an adapter exported to peft, whose format has no label names.

    The labels are in the order of the logits.
    """
    origin = f"An adapter ({', '.join(methods)}), exported by adapterhub {__version__}."
    text = f"---\nlibrary_name: peft\n---\n\n# {literal(name)}\n\n{origin}\n"
    if labels:
        lines = (f"{i}. {literal(label) or '(empty)'}\n" for i, label in enumerate(labels))
        text += "\nLabels:\n\n" + "".join(lines)
    if problem_type == _MULTI_LABEL:
        text += f"\nA text can have several labels: {_SIGMOID}\n"
    return text


def model_kind(manifest: Manifest) -> str | None:
    """Return the task of the model an adapter was trained on (a key of TASK_MODELS), or None."""
    from adapterhub.backbones.task_models import TASK_MODELS  # imports transformers models: slow

    recorded = manifest.head.kind if manifest.head else manifest.training.get("kind")
    for kind in (recorded, manifest.task):
        if isinstance(kind, str) and kind in TASK_MODELS:
            return kind
    return None


def split_card(old: str) -> tuple[dict[str, Any], str]:
    """Split a card into its metadata ({} if unreadable) and its text."""
    metadata, body = _split_front(old)
    try:
        return (parse_front_matter(metadata) if len(metadata) <= MAX_BYTES else {}), body
    except ConfigError:
        return {}, body


def parse_front_matter(text: str) -> dict[str, Any]:
    """Parse the metadata of a card.

    Raises:
        ConfigError: it is not a mapping in YAML.
    """
    return parse_mapping(text, "the card") if text.strip() else {}


def _split_front(old: str) -> tuple[str, str]:
    """Split a card into its front matter, "" if it has none, and its text."""
    text = old.replace("\r\n", "\n")
    front_matter = re.match(r"---\n(.*?\n)?---[ \t]*(?:\n|$)", text, re.DOTALL)
    if not front_matter:
        return "", text
    return front_matter[1] or "", text[front_matter.end() :]


def _name(manifest: Manifest, reference: str) -> str:
    """Return the published name, or the manifest's name before publishing."""
    return manifest.name if reference == UNPUBLISHED else reference.rpartition("/")[2]


def _metadata(manifest: Manifest, tags: object, peft: InPeft | None) -> dict[str, Any]:
    old_tags = tags if isinstance(tags, list) else []
    task = [manifest.task] if manifest.task else []
    library = ["peft"] if peft and not peft.problems else []
    all_tags = (*old_tags, "adapterhub", *library, *_methods(manifest), *task, *manifest.tags)
    on_hub = "/" in manifest.backbone.id
    fields = {
        "base_model": manifest.backbone.id if on_hub else None,
        "base_model_relation": "adapter" if on_hub else None,
        "library_name": "adapterhub",
        "license": manifest.license,
        "language": list(manifest.language),
        "tags": list(dict.fromkeys(map(str, all_tags))),
    }
    return {name: value for name, value in fields.items() if value}


def _block(manifest: Manifest, reference: str, peft: InPeft | None) -> str:
    facts = [(name, TableCell(text, markdown=text)) for name, text in _facts(manifest)]
    parts = (
        _sentence(manifest),
        ShownTable(("", ""), facts).markdown(),
        *_results(manifest),
        "## How to load it",
        _native(manifest, reference, peft),
        *([_in_peft(manifest, reference, peft)] if peft else []),
        *_training(manifest),
    )
    return "\n\n".join(parts)


def _sentence(manifest: Manifest) -> str:
    if description := literal(manifest.description or ""):
        return description
    method = " and ".join(_methods(manifest))
    task = f" for {manifest.task}" if manifest.task else ""
    return f"An adapter ({method}) of {manifest.backbone.id}{task}."


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    backbone = manifest.backbone
    at = f" at {backbone.revision}" if backbone.revision else ""
    link = f"[{backbone.id}](https://huggingface.co/{backbone.id})"
    yield "backbone", (link if "/" in backbone.id else backbone.id) + at
    yield "method", " + ".join(_methods(manifest))
    if start := started_from(manifest):
        yield "starts from", literal(start)
    if teacher := taught_by(manifest):
        yield "teacher", literal(teacher)
    if manifest.on:
        yield "on top of", literal("; ".join(f"{r}, sha256 {r.digest[:12]}" for r in manifest.on))
    if copied := built_from(manifest):
        yield "built from", literal("; ".join(copied))
    if manifest.heads:
        yield "heads", literal(_short(heads_text(manifest)))
    elif manifest.task:
        yield "task", manifest.task
    if manifest.labels:
        several = manifest.head is not None and manifest.head.problem_type == _MULTI_LABEL
        yield "labels", literal(_cut(manifest.labels)) + " (any number a text)" * several
    yield "size", f"{manifest.parameters:,} parameters, {manifest.nbytes / 1e6:.2f} MB"
    yield "licence", manifest.license or "not stated by the publisher"
    if manifest.language:
        yield "language", ", ".join(manifest.language)


def _results(manifest: Manifest) -> Iterator[str]:
    errors = recorded_errors(manifest.training.get(ERRORS))
    shown = {
        name: score_text(f"{value:.4f}", errors.get(name))
        for name, value in sorted(manifest.metrics.items())
    }
    tested = {
        name.removeprefix(TEST): shown.pop(name) for name in [*shown] if _is_test(name, manifest)
    }
    if not shown and not tested:
        return
    yield "## Results"
    titles = ["evaluation data of the recipe"] * bool(shown) + ["test data"] * bool(tested)
    columns = [each for each in (shown, tested) if each]
    names = dict.fromkeys(name for each in columns for name in each)
    rows = [(name, *(each.get(name, "") for each in columns)) for name in names]
    yield ShownTable(("metric", *titles), rows).markdown()
    if any(error.interval for error in errors.values()):
        yield "In brackets: the 95 % interval over the rows, and their number n."
    if tested:
        yield "The test data was not used to pick the epoch or an option."


def _is_test(name: str, manifest: Manifest) -> bool:
    """Return whether a metric belongs to test rows, not to a task called test."""
    return name.startswith(TEST) and TEST.rstrip("/") not in manifest.heads


def _native(manifest: Manifest, reference: str, peft: InPeft | None) -> str:
    lines = loading_lines(manifest, reference, peft.kind if peft else None)
    return f"With adapterhub:\n\n{code_block('python', lines)}"


def loading_lines(
    manifest: Manifest, reference: str, kind: str | None = None, registry: str | None = None
) -> tuple[str, ...]:
    """Return the lines of Python that load an adapter.

    `kind` is the task of its model, if not in the manifest; `registry` is the location of the
    reference, if not the reader's own registry.
    """
    head = next(iter(manifest.heads), None)
    chosen = with_head(manifest, head)
    kind = model_kind(chosen) or kind
    task = f", task={kind!r}" if kind else ""
    labels = f", labels={list(chosen.labels)!r}" if chosen.labels else ""
    which = f", head={head!r}" if head else ""
    keyword = f", registry={registry!r}" if registry else ""
    processor = "processor" if manifest.processor else "tokenizer"
    return (
        "import adapterhub as ah",
        f"model, {processor} = ah.load_backbone({manifest.backbone.location!r}{task}{labels})",
        f"ah.load(model, {reference!r}{which}{keyword})",
    )


def _in_peft(manifest: Manifest, reference: str, peft: InPeft) -> str:
    if peft.problems:
        return f"Not with peft: {literal(peft.problems[0])}."
    _, _, name = reference.rpartition("://")[2].partition("/")
    other_hub = "://" in reference  # peft downloads from the Hugging Face Hub only
    fetch = f"folder = snapshot_download({name!r}, endpoint={reference.removesuffix('/' + name)!r})"
    source = "folder" if other_hub else repr(reference.removeprefix("hf:"))
    imports, lines = peft_lines(manifest, peft.kind, source)
    if other_hub:
        imports, lines = (
            ("from huggingface_hub import snapshot_download", *imports),
            (fetch, *lines),
        )
    return f"With peft:\n\n{code_block('python', (*imports, *lines))}"


def peft_lines(
    manifest: Manifest, kind: str | None, source: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the imports and the lines that load an adapter in peft from `source`, an expression.

    `kind` is the task of the model to load it on.
    """
    auto = backbone_auto_class(manifest, kind)
    outputs = len(manifest.labels) or 1
    heads = f", num_labels={outputs}" if manifest.head and auto.endswith("Classification") else ""
    if manifest.head and manifest.head.problem_type == _MULTI_LABEL:
        heads += f", problem_type={_MULTI_LABEL!r}"
    return (
        ("from peft import PeftModel", f"from transformers import {auto}"),
        (
            f"backbone = {auto}.from_pretrained({manifest.backbone.location!r}{heads})",
            f"model = PeftModel.from_pretrained(backbone, {source})",
        ),
    )


def backbone_auto_class(manifest: Manifest, kind: str | None) -> str:
    """Name the class of transformers that loads an adapter's backbone for a kind of model."""
    from adapterhub.backbones.task_models import TASK_MODELS

    row = TASK_MODELS[kind] if kind else None
    return row.auto_of_type(manifest.backbone.model_type) if row else "AutoModel"


def _training(manifest: Manifest) -> Iterator[str]:
    recipe = manifest.training.get("recipe")
    if not isinstance(recipe, dict) or not recipe:
        return
    text = dump_yaml({"backbone": manifest.backbone.location, **recipe}, for_all=True)
    data, tools = manifest.training.get("data"), manifest.versions.items()
    yield "## Training"
    facts = [f"{name} {_fact(manifest.training, name)}" for name in ("seed", "steps")]
    if isinstance(data, dict):
        counts = f"{_fact(data, 'train')} training and {_fact(data, 'eval')} evaluation examples"
        if "test" in data:
            counts += f", {_fact(data, 'test')} test examples"
        facts += [counts, f"data sha256 {_fact(data, 'sha256', 12)}"]
    yield f"{'; '.join(facts)}; {literal(', '.join(' '.join(tool) for tool in tools))}."
    if sources := sources_of(manifest.training):
        yield "Sources: " + literal("; ".join(str(each) for each in sources)) + "."
    if changes := stretches_of(manifest.training):
        yield "The run was resumed with other settings: " + literal("; ".join(changes)) + "."
    if len(text) <= _MOST_RECIPE:
        code = code_block("yaml", text.removesuffix("\n").split("\n"))
        yield f"<details><summary>The recipe, without data paths</summary>\n\n{code}"
        yield "</details>"


@dataclass(frozen=True)
class RecordedSource:
    """One of several sources of the training rows, as recorded; unknown numbers are 0."""

    name: str
    train: int
    evaluation: int
    share: float

    def __str__(self) -> str:
        rows = f"{self.train:,} rows, " if self.train else ""
        return f"{self.name}: {rows}{self.share:.1%} of the training"


def sources_of(training: Mapping[str, Any]) -> list[RecordedSource]:
    """Return the sources of the training rows, if they had several; malformed ones are skipped."""
    data = training.get("data")
    recorded = data.get("sources") if isinstance(data, Mapping) else None
    sources = []
    for each in recorded if isinstance(recorded, list) else ():
        if isinstance(each, Mapping) and isinstance(each.get("name"), str):
            numbers = [each.get(name, 0) for name in ("train", "eval", "share")]
            known = [n if isinstance(n, int | float) and n == n else 0 for n in numbers]
            train, evaluation = (int(min(max(n, 0), 1 << 62)) for n in known[:2])
            sources.append(
                RecordedSource(one_line(each["name"], 40), train, evaluation, float(known[2]))
            )
    return sources


def stretches_of(training: Mapping[str, Any]) -> list[str]:
    """List the steps where a resumed run changed settings, with both values of each setting.

    Malformed records, by strangers, are skipped.
    """
    recorded, lines = training.get("stretches"), []
    for each in recorded if isinstance(recorded, list) else ():
        changed = each.get("changed") if isinstance(each, dict) else None
        for name, values in changed.items() if isinstance(changed, dict) else ():
            if isinstance(values, list) and len(values) == 2:
                before, now = (one_line(str(value), 20) for value in values)
                step = _fact(each, "step")
                lines.append(f"{one_line(name, 60)} {now} in place of {before} after step {step}")
    return lines


def started_from(manifest: Manifest) -> str:
    """Describe the adapter that the training started from; "" for a normal start."""
    return _origin_text(manifest.training.get("from"))


def taught_by(manifest: Manifest) -> str:
    """Describe the teacher of the training, an adapter or a model; "" without one."""
    teacher = manifest.training.get("teacher")
    if isinstance(teacher, dict) and not teacher.get("digest"):
        return f"{str(teacher.get('name'))[:_MOST_FACT]}, {str(teacher.get('fingerprint'))[:24]}"
    return _origin_text(teacher)


def built_from(manifest: Manifest) -> list[str]:
    """List the adapters that were copied into one, such as a fusion."""
    copied = manifest.training.get("on")
    return list(filter(None, map(_origin_text, copied if isinstance(copied, list) else [])))


def _origin_text(start: object) -> str:
    """Format a record of another adapter, possibly from a stranger; "" if it is malformed."""
    if not isinstance(start, dict):
        return ""
    name, version, digest = (
        str(start.get(field) or "")[:_MOST_FACT] for field in ("name", "version", "digest")
    )
    return f"{name}{'@' * bool(version)}{version}, sha256 {digest[:12]}"


def _fact(record: dict[str, Any], name: str, most: int = _MOST_FACT) -> str:
    return literal(str(record.get(name))[:most])


def _short(text: str) -> str:
    return text if len(text) <= _MOST_HEADS else f"{text[:_MOST_HEADS]}..."


def _methods(manifest: Manifest) -> tuple[str, ...]:
    return tuple(name for spec in manifest.methods for name in spec)


def _cut(labels: Sequence[str]) -> str:
    more = len(labels) - _MOST_LABELS
    return ", ".join(labels[:_MOST_LABELS]) + (f" and {more} more" if more > 0 else "")


def read_card(folder: Path) -> str:
    """Read the card of the adapter in `folder`; "" if it is missing or not a regular file."""
    try:
        data = read_file(folder / CARD_FILE, 1, MAX_CARD_BYTES, None)
    except UnreadableError:  # a card is optional
        return ""
    return data.decode("utf-8", "replace")


def card_bytes(card: str) -> bytes:
    """Encode a card as UTF-8 with Unix line ends.

    Raises:
        OutputError: the card is too large.
    """
    text = card.replace("\r\n", "\n").rstrip("\n") + "\n"
    data = text.encode("utf-8", errors="replace")
    if len(data) <= MAX_CARD_BYTES:
        return data
    raise OutputError(
        f"the card has {len(data)} bytes",
        expected=f"at most {MAX_CARD_BYTES} bytes",
        hint="link to long tables instead of pasting them",
    )
