"""Every key of a recipe, from the dataclasses that read it, and a recipe with all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from adapterhub.cli.recipe import commented_recipe
from adapterhub.cli.train import SECTIONS
from adapterhub.config.options import options_of, to_dict
from adapterhub.config.yaml import inline_yaml
from adapterhub.data.options import DataOptions
from adapterhub.methods.common import base as method_names
from adapterhub.methods.common.base import described_methods
from adapterhub.recipe.other_names import ALIASES, MEANINGS
from adapterhub.recipe.recipe import REQUIRED, Recipe, TrainOptions, read_draft
from adapterhub.tasks.common.distillation import TeacherOptions
from reference.markdown import code, codes, entry, prose, sentence

PAGE = "reference/recipe.md"
GROUPS: dict[str, tuple[str, type]] = {
    "Backbone, method and run": ("", Recipe),
    "Teacher": ("teacher.", TeacherOptions),
    "Data": ("data.", DataOptions),
    "Training": ("train.", TrainOptions),
}
_INTRO = """\
# Recipe

A recipe is a YAML file with everything that determines a training run. `adapterhub recipe` prints
[one with every key](#the-whole-recipe). Only `backbone`, `data.train` and `output` are required.

A key is set in the file, or on the command line:

```sh
adapterhub train recipe.yaml train.epochs=10
```

The most used keys have a flag, such as `--epochs 10`. `adapterhub options train.epochs` prints what
a key means.

`null` is the default of many keys: the value then follows from the data, the method or the task.
A key that is unknown is an error, which says what to type instead.
"""
_REFUSED = """\
## Names from elsewhere

The names that keys have in `transformers`, `peft` and common scripts are listed above, where they
mean the same. These are refused, because their values mean something else here, or because they
belong to a method or to the command; the error says what to type.
"""
_OF_METHODS = """\
These are accepted as options of each method that has the option beside them:
`lora(r=4)` is `lora(rank=4)`.
"""
_NOT_OF_METHODS = "These are refused as options of a method:\n"
_METHODS = "And these are refused as names of a method:\n"


def pages() -> dict[str, str]:
    """Return the page."""
    return {PAGE: "\n".join(_page())}


def _page() -> Iterator[str]:
    yield _INTRO
    for title, (prefix, cls) in GROUPS.items():
        yield f"## {title}\n"
        yield from _keys(prefix, cls)
    yield f"{_REFUSED}\n{_table('type instead', MEANINGS)}"
    aliases = {name: code(option) for name, option in method_names.ALIASES.items()}
    yield f"{_OF_METHODS}\n{_table('option', aliases)}"
    yield f"{_NOT_OF_METHODS}\n{_table('type instead', _method_meanings())}"
    yield f"{_METHODS}\n{_table('here', method_names.METHOD_MEANINGS)}"
    yield "## The whole recipe\n\nAs `adapterhub recipe` prints it; with names of a method and a"
    yield "task, such as `adapterhub recipe prefix seq2seq`, it has their options.\n"
    yield f"```yaml\n{commented_recipe(read_draft())}```\n"


def _keys(prefix: str, cls: type) -> Iterator[str]:
    """Yield an entry for each option of a dataclass."""
    flags = {
        path: f"--{flag} {value}" for of in SECTIONS.values() for flag, (path, value) in of.items()
    }
    for option in options_of(cls):
        if dataclasses.is_dataclass(option.default):
            continue
        key = prefix + option.name
        default = inline_yaml(to_dict({"default": option.default})["default"])
        required = key in REQUIRED
        facts = [code(option.type), "required" if required else f"default {code(default)}"]
        if key in flags:
            facts.append(f"flag {code(flags[key])}")
        if names := [name for name, path in ALIASES.items() if path == key]:
            facts.append(f"also called {codes(names)}")
        yield entry(key, key, prose(sentence(option.help), PAGE), ", ".join(facts))


def _method_meanings() -> dict[str, str]:
    """Return what to type instead of options of methods, with the sites of the most used ones."""
    found: dict[str, str] = {}
    for name in ("lora", "pfeiffer", *described_methods()):
        found = method_names.option_names(described_methods()[name].options).meanings | found
    return found


def _table(title: str, rows: Mapping[str, str]) -> str:
    """Return a table of names."""
    lines = [
        f"| {code(name)} | {text if '`' in text else prose(text, PAGE)} |"
        for name, text in rows.items()
    ]
    return "\n".join([f"| name | {title} |", "|---|---|", *lines, ""])
