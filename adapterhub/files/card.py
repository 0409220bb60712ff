"""The model card of an adapter (`README.md`), for people: made from the manifest.

    ---                          metadata, as the Hub reads them
    ...                          the writer's own text, which is kept
    <!-- adapterhub -->          what it is, its results, how to load it, how it was trained:
    <!-- /adapterhub -->         written anew when the adapter is published

Text outside of the two comments is its writer's, and so are metadata that the manifest says nothing
about.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from adapterhub._version import __version__
from adapterhub.config.yaml import MAX_BYTES, dump_yaml, parse_mapping
from adapterhub.errors import ConfigError
from adapterhub.files.manifest import Manifest

_START, _END = "<!-- adapterhub -->", "<!-- /adapterhub -->"
UNPUBLISHED = "THIS FOLDER"
_MOST_LABELS = 20
_MOST_RECIPE = 20_000


@dataclass(frozen=True)
class InPeft:
    """Whether peft loads the repository that the card is for: `problems` tell why not. `kind` is
    the kind of model that it is loaded on."""

    kind: str | None
    problems: tuple[str, ...] = ()


def card(
    manifest: Manifest, old: str = "", *, reference: str = UNPUBLISHED, peft: InPeft | None = None
) -> str:
    """The card of an adapter; of an `old` one the writer's own text stays. `reference` is what
    loads the adapter; `peft` is known when it is pushed."""
    metadata, text = split_card(old)
    start, end = text.find(_START), text.find(_END)
    before, after = (text[:start], text[end + len(_END) :]) if 0 <= start < end else (text, "\n")
    title = "" if before.strip() else f"# {_name(manifest, reference)}\n\n"
    block = f"{_START}\n\n{title}{_block(manifest, reference, peft)}\n\n{_END}"
    text = f"{before.strip()}\n\n{block}{after}"
    front = metadata | _metadata(manifest, metadata.get("tags"), peft)
    return f"---\n{dump_yaml(front)}---\n\n{text.lstrip()}"


def export_card(name: str, methods: Sequence[str], labels: Sequence[str]) -> str:
    """The card beside an adapter in the format of peft alone, which has no names of labels."""
    rows = "".join(f"{i}. {label}\n" for i, label in enumerate(labels))
    made = f"An adapter ({', '.join(methods)}), exported by adapterhub {__version__}."
    return f"---\nlibrary_name: peft\n---\n\n# {name}\n\n{made}\n" + (
        rows and f"\nLabels:\n\n{rows}"
    )


def model_kind(manifest: Manifest) -> str | None:
    """The kind of model that an adapter was trained on, a key of TASK_MODELS, where it says so."""
    from adapterhub.backbones.task_models import TASK_MODELS  # its models are slow to import

    recorded = manifest.head.kind if manifest.head else manifest.training.get("kind")
    for kind in (recorded, manifest.task):
        if isinstance(kind, str) and kind in TASK_MODELS:
            return kind
    return None


def split_card(old: str) -> tuple[dict[str, Any], str]:
    """The metadata of a card, none where they cannot be read, and its text."""
    text = old.replace("\r\n", "\n")
    found = re.match(r"---\n(.*?\n)?---[ \t]*(?:\n|$)", text, re.DOTALL)
    if not found:
        return {}, text
    metadata, rest = found[1] or "", text[found.end() :]
    try:
        return (parse_mapping(metadata, "the card") if len(metadata) <= MAX_BYTES else {}), rest
    except ConfigError:
        return {}, rest


def _name(manifest: Manifest, reference: str) -> str:
    """What it is called: where it is published, by that name."""
    return manifest.name if reference == UNPUBLISHED else reference.rpartition("/")[2]


def _metadata(manifest: Manifest, tags: object, peft: InPeft | None) -> dict[str, Any]:
    own = tags if isinstance(tags, list) else []
    task = [manifest.task] if manifest.task else []
    library = ["peft"] if peft and not peft.problems else []
    all_tags = (*own, "adapterhub", *library, *_methods(manifest), *task, *manifest.tags)
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
    parts = (
        _sentence(manifest),
        _table(("", ""), _facts(manifest)),
        *_results(manifest),
        "## How to load it",
        _native(manifest, reference, peft),
        *([_in_peft(manifest, reference, peft)] if peft else []),
        *_training(manifest),
    )
    return "\n\n".join(parts)


def _sentence(manifest: Manifest) -> str:
    if manifest.description:
        return manifest.description
    method = " and ".join(_methods(manifest))
    task = f" for {manifest.task}" if manifest.task else ""
    return f"An adapter ({method}) of {manifest.backbone.id}{task}."


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    backbone, infos = manifest.backbone, manifest.tensors.values()
    at = f" at {backbone.revision}" if backbone.revision else ""
    link = f"[{backbone.id}](https://huggingface.co/{backbone.id})"
    yield "backbone", (link if "/" in backbone.id else backbone.id) + at
    yield "method", " + ".join(_methods(manifest))
    if manifest.task:
        yield "task", manifest.task
    if manifest.labels:
        yield "labels", _cut(manifest.labels)
    numbers = sum(math.prod(info.shape) for info in infos)
    yield "size", f"{numbers:,} numbers, {sum(info.nbytes for info in infos) / 1e6:.2f} MB"
    yield "licence", manifest.license or "not stated by its publisher"
    if manifest.language:
        yield "language", ", ".join(manifest.language)


def _results(manifest: Manifest) -> Iterator[str]:
    if manifest.metrics:
        yield "## Results"
        rows = ((name, f"{value:.4f}") for name, value in sorted(manifest.metrics.items()))
        yield _table(("metric", "evaluation data of the recipe"), rows)


def _native(manifest: Manifest, reference: str, peft: InPeft | None) -> str:
    kind = model_kind(manifest) or (peft.kind if peft else None)
    task = f", task={kind!r}" if kind else ""
    labels = f", labels={list(manifest.labels)!r}" if manifest.labels else ""
    lines = (
        "import adapterhub as ah",
        f"model, tokenizer = ah.load_backbone({manifest.backbone.id!r}{task}{labels})",
        f"ah.load(model, {reference!r})",
    )
    return f"With adapterhub:\n\n{_code('python', lines)}"


def _in_peft(manifest: Manifest, reference: str, peft: InPeft) -> str:
    if peft.problems:
        return f"Not with peft: {peft.problems[0]}."
    from adapterhub.backbones.task_models import TASK_MODELS

    auto = TASK_MODELS[peft.kind].auto if peft.kind else "AutoModel"
    outputs = len(manifest.labels) or 1
    heads = f", num_labels={outputs}" if manifest.head and auto.endswith("Classification") else ""
    _, _, name = reference.rpartition("://")[2].partition("/")
    own = "://" in reference  # a hub that peft does not look on by itself
    fetch = f"folder = snapshot_download({name!r}, endpoint={reference.removesuffix('/' + name)!r})"
    place = "folder" if own else repr(reference.removeprefix("hf:"))
    lines = (
        *(["from huggingface_hub import snapshot_download"] if own else []),
        "from peft import PeftModel",
        f"from transformers import {auto}",
        *([fetch] if own else []),
        f"backbone = {auto}.from_pretrained({manifest.backbone.id!r}{heads})",
        f"model = PeftModel.from_pretrained(backbone, {place})",
    )
    return f"With peft:\n\n{_code('python', lines)}"


def _training(manifest: Manifest) -> Iterator[str]:
    recipe = manifest.training.get("recipe")
    if not isinstance(recipe, dict) or not recipe:
        return
    text = dump_yaml({"backbone": manifest.backbone.id, **recipe})
    data, tools = manifest.training.get("data"), manifest.versions.items()
    yield "## Training"
    said = [f"seed {manifest.training.get('seed')}", f"steps {manifest.training.get('steps')}"]
    if isinstance(data, dict):
        said += [f"{data.get('train')} examples to train and {data.get('eval')} to evaluate"]
        said += [f"data sha256 {str(data.get('sha256'))[:12]}"]
    yield f"{'; '.join(said)}; {', '.join(f'{name} {version}' for name, version in tools)}."
    if len(text) <= _MOST_RECIPE:
        code = _code("yaml", text.splitlines())
        yield f"<details><summary>The recipe, without the places of the data</summary>\n\n{code}"
        yield "</details>"


def _methods(manifest: Manifest) -> tuple[str, ...]:
    return tuple(name for spec in manifest.methods for name in spec)


def _cut(labels: Sequence[str]) -> str:
    more = len(labels) - _MOST_LABELS
    return ", ".join(labels[:_MOST_LABELS]) + (f" and {more} more" if more > 0 else "")


def _table(columns: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = (columns, ("---", "---"), *((name, _cell(value)) for name, value in rows))
    return "\n".join(f"| {name} | {value} |" for name, value in lines)


def _cell(value: str) -> str:
    """A text that cannot end its cell."""
    return " ".join(value.split()).replace("|", "\\|")


def _code(language: str, lines: Iterable[str]) -> str:
    return "\n".join((f"```{language}", *lines, "```"))
