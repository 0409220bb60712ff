"""The Python API: every public name on one page, in the order of what a user does."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import griffe

import adapterhub
from adapterhub import errors
from adapterhub.config.options import options_of
from adapterhub.methods.common.base import described_methods
from reference.markdown import entry, prose, sentence

FOLDER = "reference/python"
_ROOT = Path(__file__).parents[2]
LAZY: dict[str, str] = adapterhub._LAZY | {
    "METHODS": "methods.common.base", "anatomy_of": "anatomy.build", "__version__": "_version",
    "AdapterhubError": "errors", "Family": "anatomy.family", "Stack": "anatomy.family",
    "register_family": "anatomy.family_file",
}  # fmt: skip
METHOD_CLASSES = tuple(
    name
    for name, module in LAZY.items()
    if module.startswith("methods.") and ".common." not in module
)
_OPTIONS: dict[str, dict[str, Any]] = {
    "Adapter": {
        "merge_init_into_class": False,
        "members": [
            "active", "labels", "parameters", "groups", "count", "tensors", "train_mode",
            "save", "export", "manifest", "detach",
        ],
    },
    "Average": {"merge_init_into_class": True, "members": False},
    "Listing": {"merge_init_into_class": True, "members": False},
    "TrainerCallback": {"members": False},
    "Routed": {"members": ["split"]},
    "ParameterGroup": {"members": False},
    "Anatomy": {"members": ["select"]},
    "Site": {"members": False},
    "Inspection": {"members": ["facts"]},
    "Manifest": {"members": ["parameters", "nbytes"]},
    "Signature": {"members": ["signer", "is_valid"]},
    "Merge": {"members": ["difference"]},
    "Entry": {"members": False},
    "PrivateKey": {"members": ["public"]},
    "Verification": {"members": ["is_trusted"]},
    "CheckedSignature": {"members": ["is_valid"]},
}  # fmt: skip
_INTRO = """\
# Python

```python
import adapterhub as ah
```

Everything below is a name of `ah`, except the [types](types.md) and the classes of
[errors](errors.md), which are in `adapterhub.errors`. Names are imported when they are first used:
`import adapterhub` does not load torch.
"""

# Page -> title, what it is about, the names of `adapterhub` or paths in it.
PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "backbone": (
        "Load a backbone",
        "The model stays an ordinary model of `transformers`; your own way to load it works too.",
        ("load_backbone", "fingerprint", "anatomy_of", "inspect", "embed"),
    ),
    "architectures": (
        "Backbones of your own architecture",
        "Most architectures are read without a row; these are for those that are not: "
        "[the tutorial](../../tutorials/new-architecture.md).",
        ("register_family", "Family", "Stack"),
    ),
    "attach": (
        "Attach, save, load, detach",
        "An adapter is attached to a model in place. While none is attached, the model is bit for "
        "bit what it was.",
        ("attach", "load", "detach", "adapters", "Adapter"),
    ),
    "predict": (
        "Train, open and predict",
        "An adapter, its backbone, tokenizer, task and labels as one object: "
        "[predicting](../../guides/predict.md).",
        ("train", "open", "inference.open.Predictor"),
    ),
    "route": (
        "Activate, compose, route",
        "Several adapters may be attached to one model. These choose which of them apply: to all "
        "rows of a batch, or to each row its own.",
        ("activate", "disabled", "Average", "route"),
    ),
    "merge": (
        "Merge and combine",
        "Merging writes adapters into the weights of the model. Combining makes one adapter of "
        "several, and leaves the weights as they are.",
        ("merge", "unmerge", "combine", "to_lora"),
    ),
    "share": (
        "Publish, push, pull",
        "Versions of adapters in a local registry or on a hub: [the registry]"
        "(../../guides/registry.md).",
        ("publish", "push", "pull", "search", "tag", "yank", "delete", "Listing"),
    ),
    "signatures": (
        "Keys and signatures",
        "Keys are made by [`adapterhub key new`](../cli.md#key), and trusted by "
        "[`adapterhub trust`](../cli.md#trust): [signatures](../../guides/signatures.md).",
        ("sign", "verify"),
    ),
    "training": (
        "Train by your own loop",
        "An attached adapter trains in any loop: its parameters are [`adapter.parameters()`]"
        "(attach.md#adapterhub.adapters.adapter.Adapter). With `Trainer` of transformers and with "
        "trl: [other training loops](../../guides/trainers.md).",
        ("TrainerCallback", "calibrate"),
    ),
    "methods": (
        "Methods",
        "A method is a name with options: `attach(model, \"lora\", rank=16)`. These classes are "
        "the same as objects, for editors and type checkers: `attach(model, LoRA(rank=16))`.",
        ("METHODS",),
    ),
    "errors": (
        "Errors",
        "Every error that is raised on purpose. [Troubleshooting](../../troubleshooting.md) has "
        "what to do about each.",
        ("AdapterhubError",),
    ),
    "types": (
        "Types",
        "What the functions of the other pages take and return.",
        (
            "__version__", "methods.common.base.Spec", "adapters.route.Routed",
            "adapters.adapter.ParameterGroup", "anatomy.sites.Anatomy", "anatomy.sites.Site",
            "adapters.inspection.Inspection",
            "files.manifest.Manifest",
            "files.signature.Signature", "merging.merge.Merge", "registry.store.Entry",
            "files.signature.PrivateKey", "registry.pull.Verification",
            "registry.trust.CheckedSignature",
        ),
    ),
}  # fmt: skip


def pages() -> dict[str, str]:
    """Return the pages: a list of all names, then one page for each thing that a user does."""
    names = {page: names_of(page) for page in PAGES}
    index = {f"{FOLDER}/index.md": _index(names)}
    return index | {f"{FOLDER}/{page}.md": _page(page, names[page]) for page in PAGES}


def names_of(page: str) -> tuple[str, ...]:
    """Return the names on a page, with those that are found by their kind."""
    names = PAGES[page][2]
    if page == "methods":
        names += tuple(
            name
            for name, module in LAZY.items()
            if module.startswith("methods.") and name not in names
        )
    if page == "errors":
        names += tuple(f"errors.{error.__name__}" for error in error_classes())
    return names


def error_classes() -> list[type[errors.AdapterhubError]]:
    """Return the classes of errors, in the order of their file, without their base."""
    classes = (value for value in vars(errors).values() if isinstance(value, type))
    base = errors.AdapterhubError
    return [each for each in classes if issubclass(each, base) and each is not base]


def _index(names: Mapping[str, Iterable[str]]) -> str:
    """Return the page that lists all names, each with the first line of its docstring."""
    parts = [_INTRO]
    for page, (title, _, _) in PAGES.items():
        parts.append(f"**[{title}]({page}.md)**\n")
        for name in names[page]:
            docstring = _package()[_inner(name)].docstring
            summary = docstring.value.partition("\n")[0] if docstring else ""
            parts.append(f"- [`{_heading(name)}`]({page}.md#{_path(name)}): {prose(summary)}")
        parts[-1] += "\n"
    return "\n".join(parts)


def _page(page: str, names: Iterable[str]) -> str:
    """Return a page: mkdocstrings writes what each name is, and we the options of methods."""
    title, about, _ = PAGES[page]
    parts = [f"# {title}", about]
    for name in names:
        parts.append(_directive(name))
        if name in METHOD_CLASSES:
            parts += _method(name)
    return "\n\n".join(parts)


def _method(name: str) -> Iterator[str]:
    """Yield the paper, the name and the options of a method."""
    method_name = ast.literal_eval(str(_package()[_inner(name)]["name"].value))
    method = described_methods()[method_name]
    yield f"{prose(sentence(method.paper))} As a name: `{method_name}`."
    for option in options_of(method.options):
        facts = f"`{option.type}`, default `{option.default!r}`"
        yield entry(option.name, f"{name}.{option.name}", prose(sentence(option.help)), facts)


def _directive(name: str) -> str:
    """Return the lines that mkdocstrings replaces."""
    heading = _heading(name)
    options = {"heading": heading, "toc_label": heading} | _OPTIONS.get(heading, {})
    lines = "".join(f"      {key}: {json.dumps(value)}\n" for key, value in options.items())
    return f"::: {_path(name)}\n    options:\n{lines}"


@cache
def _package() -> griffe.Object:
    """Return the package as its source has it: torch is not imported."""
    package = griffe.load("adapterhub", search_paths=[str(_ROOT)])
    assert isinstance(package, griffe.Object)
    return package


def _inner(name: str) -> str:
    """Return the path of a name's definition in the package."""
    return _path(name).removeprefix("adapterhub.")


def _heading(name: str) -> str:
    return name.rpartition(".")[2]


def _path(name: str) -> str:
    """Return the path of a name's definition."""
    module, _, attribute = LAZY.get(name, "").partition(":")
    if not module:
        return f"adapterhub.{name}"
    return f"adapterhub.{module}.{attribute or name}"
