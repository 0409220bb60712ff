"""The reference has every command, key, public name and class of errors, once."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import Counter
from pathlib import Path

import click
import pytest
from reference import cli as cli_page
from reference import python as python_pages
from reference import recipe as recipe_page
from reference.markdown import prose

import adapterhub as ah
from adapterhub.cli import COMMANDS, group
from adapterhub.cli.recipe import commented_recipe
from adapterhub.config.options import options_of
from adapterhub.data.options import DataOptions
from adapterhub.loop.engine import _out_of_memory
from adapterhub.loop.report import one_class
from adapterhub.methods import METHODS
from adapterhub.recipe.other_names import ALIASES, MEANINGS
from adapterhub.recipe.recipe import Recipe, RunOptions, TrainOptions

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cli() -> str:
    return cli_page.pages()["reference/cli.md"]


@pytest.fixture(scope="module")
def recipe() -> str:
    return recipe_page.pages()["reference/recipe.md"]


@pytest.fixture(scope="module")
def python() -> dict[str, str]:
    return python_pages.pages()


def anchors(page: str) -> Counter[str]:
    return Counter(re.findall(r"\{: #(\S+) \}$", page, re.MULTILINE))


def commands() -> dict[str, click.Command]:
    """Every command by its words, with those of groups."""
    context, found = click.Context(group, **group.context_settings), {}
    for name in COMMANDS:
        command = found[name] = group.get_command(context, name)
        found |= below(name, command)
    return found


def below(words: str, command: click.Command) -> dict[str, click.Command]:
    """The commands of a group, and of groups in it."""
    found: dict[str, click.Command] = {}
    for name, each in getattr(command, "commands", {}).items():
        found |= {f"{words} {name}": each, **below(f"{words} {name}", each)}
    return found


def test_every_command_and_option_has_one_anchor(cli: str) -> None:
    expected = Counter()
    for words, command in commands().items():
        anchor = words.replace(" ", "-")
        options = [p.opts[-1] for p in command.params if isinstance(p, click.Option)]
        expected.update([anchor, *(f"{anchor}{option}" for option in options)])
    assert anchors(cli) == expected
    assert len(expected) > 250
    for name, summary in COMMANDS.items():
        assert f"- [`{name}`](#{name}): {summary}\n" in cli


def test_the_page_of_commands_has_their_usage_and_examples(cli: str) -> None:
    for words in commands():
        assert f"```text\nadapterhub {words} " in cli, words
    assert cli.count("**Examples**") == len(COMMANDS)
    assert "\b" not in cli
    assert prose("hf:OWNER/*") == "hf:OWNER/\\*", "an asterisk is not emphasis"


def test_every_key_has_one_anchor_with_its_type_default_and_other_names(recipe: str) -> None:
    keys = {
        f"{prefix}{option.name}": option
        for prefix, cls in (("", Recipe), ("data.", DataOptions), ("train.", TrainOptions))
        for option in options_of(cls)
        if not dataclasses.is_dataclass(option.default)
    }
    assert "data.train" in keys
    assert anchors(recipe) == Counter(keys.keys())
    entries = dict(re.findall(r"\{: #(\S+) \}\n\n:   (.*)\n", recipe))
    for key, option in keys.items():
        assert f"`{option.type}`" in entries[key]
        assert ("default " in entries[key]) != ("required" in entries[key])
    for alias, key in ALIASES.items():
        assert f"`{alias}`" in entries[key]
    for name in MEANINGS:
        assert f"| `{name}` | " in recipe
    assert "flag `--lr RATE`" in entries["train.learning_rate"]
    assert "(../guides/defaults.md)" in entries["train.epochs"]


def test_the_whole_recipe_is_what_the_command_prints(recipe: str) -> None:
    assert f"```yaml\n{commented_recipe(Recipe())}```" in recipe


def test_every_public_name_is_on_exactly_one_page(python: dict[str, str]) -> None:
    names = [name for page in python_pages.PAGES for name in python_pages.names_of(page)]
    assert {name: n for name, n in Counter(names).items() if n > 1} == {}
    assert set(ah.__all__) <= set(names)
    for name in ah.__all__:
        path = python_pages._path(name)
        holding = [page for page, text in python.items() if f"::: {path}\n" in text]
        assert len(holding) == 1, name
        assert f"#{path}): " in python["reference/python/index.md"]


def test_each_path_is_the_name_that_users_import() -> None:
    for page in python_pages.PAGES:
        for name in python_pages.names_of(page):
            module, _, attribute = python_pages._path(name).rpartition(".")
            value = getattr(__import__(module, fromlist=[attribute]), attribute)
            if name in ah.__all__ and name != "adapters":
                assert value is getattr(ah, name), name
            if inspect.isclass(value) or inspect.isfunction(value):
                assert value.__module__ == module, name


def test_every_class_of_errors_is_on_the_page_of_errors() -> None:
    names = {f"errors.{error.__name__}" for error in ah.AdapterhubError.__subclasses__()}
    assert names < set(python_pages.names_of("errors"))
    assert len(names) == 13


def test_every_option_of_a_method_class_is_listed(python: dict[str, str]) -> None:
    page = python["reference/python/methods.md"]
    expected = Counter(f"{m.__name__}.{o.name}" for m in METHODS.values() for o in options_of(m))
    assert anchors(page) == expected
    assert len(expected) > 80


def test_troubleshooting_has_every_class_of_errors_with_a_message_that_was_printed() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    sections = re.split(r"^### ", page.partition("## By error class")[2], flags=re.MULTILINE)[1:]
    by_name = {section.partition("\n")[0]: section for section in sections}
    assert list(by_name) == [error.__name__ for error in python_pages.error_classes()]
    for name, section in by_name.items():
        assert '```text title="output"\n' in section, name
        assert "\nerror: " in section, name
    assert page.count("\n### ") >= len(by_name) + 10, "symptoms without an error"


def test_troubleshooting_quotes_what_the_program_says() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert one_class("no")[0].partition(";")[0] in page
    options = RunOptions(batch_size=32, max_length=512)
    error = _out_of_memory(options)
    assert f"error: {error.problem}" in page
    rows = page.partition("| set |")[2].partition("\n\n")[0]
    for key in re.findall(r"[a-z_.]+(?==)", error.hint):
        assert key in rows, key
