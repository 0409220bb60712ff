"""Words of the command line: help pages without those of YAML, and names in any case."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from transformers import BertModel

import adapterhub as ah
from adapterhub.cli import ALIASES, COMMANDS, HEADINGS, OTHER_FLAGS, OTHER_WORDS, group
from adapterhub.errors import ConfigError
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import spec_options
from adapterhub.recipe.recipe import NAMES
from adapterhub.tasks import TASKS, parse_task
from tests.kit.data import sentences, write_tsv
from tests.kit.session import refused, succeeded

YAML = re.compile(
    r"\bnull\b|mapping of|\banything\b|\b(str|int|bool|float) [|,]|list of (str|int)|\(s\)"
)


def pages(command: click.Command, words: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the words of the help page of a command, and of those below it."""
    inner = command.commands if isinstance(command, click.Group) else {}
    return [
        words,
        *(page for name, below in inner.items() for page in pages(below, (*words, name))),
    ]


def all_pages() -> list[tuple[str, ...]]:
    context = click.Context(group, **group.context_settings)
    found: list[tuple[str, ...]] = [("--help",), ("--help", "--all"), ("options",)]
    for name in COMMANDS:
        command = group.get_command(context, name)
        assert command is not None
        found += [(*page, "--help") for page in pages(command, (name,))]
    return found + [("options", name) for name in (*METHODS, *TASKS)]


def test_no_page_of_help_has_words_of_yaml(adapterhub, subtests):
    for words in all_pages():
        with subtests.test(" ".join(words)):
            out = succeeded(adapterhub(*words))
            assert not YAML.search(out), YAML.findall(out)


def test_the_first_page_is_short_and_names_every_command(adapterhub):
    _, first, _ = adapterhub("--help")
    _, whole, _ = adapterhub("--help", "--all")
    assert len(first.splitlines()) <= 2 / 3 * len(whole.splitlines())
    for name, said in COMMANDS.items():
        assert re.search(rf"\b{name}\b", first)
        assert re.search(rf"^  {name} +{re.escape(said)}$", whole, re.MULTILINE)
    assert all(f"{title}:" in whole for title in HEADINGS)
    assert adapterhub("--all")[1] == whole == adapterhub("--all", "-h")[1]


@pytest.mark.parametrize("name", ["LoRA", "Lora", "LORA"])
def test_lora_in_any_case_is_lora(name, adapterhub):
    assert spec_options(name) == spec_options([name]) == spec_options({name: {}})
    assert spec_options(f"BitFit, {name}(Rank=4)") == spec_options(["bitfit", "lora(rank=4)"])
    assert adapterhub("methods", name) == adapterhub("options", "lora")
    assert adapterhub("recipe", name, "Seq2Seq")[0] == 0


@pytest.mark.parametrize("name", sorted([*METHODS, *TASKS]))
def test_names_are_found_in_capitals_and_with_underscores(name, adapterhub):
    expected = adapterhub("options", name)
    command = "methods" if name in METHODS else "tasks"
    assert adapterhub("options", name.upper()) == expected
    assert adapterhub(command, name.replace("-", "_").title()) == expected


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("LR", "train.learning_rate"),
        ("Train.LR", "train.learning_rate"),
        ("learning-rate", "train.learning_rate"),
        ("Train.Max-Steps", "train.max_steps"),
        ("Data.Text", "data.text"),
        ("METHOD", "method"),
    ],
)
def test_options_of_a_recipe_are_found_in_any_case(word, option, adapterhub):
    assert NAMES.own_name(word) == option
    assert adapterhub("options", word) == adapterhub("options", option)
    section, _, inner = word.rpartition(".")
    *above, name = option.split(".")
    expected = {above[0]: {name: 3}} if above else {name: 3}
    assert NAMES.normal_form({section: {inner: 3}} if section else {word: 3}) == expected


def test_options_of_methods_and_tasks_are_found_in_any_case():
    assert spec_options("LoRA(RANK=3)") == spec_options({"lora": {"rank": 3}})
    task = parse_task("Classification(Class-Weights=balanced)")
    assert task == parse_task({"classification": {"class_weights": "balanced"}})
    with pytest.raises(ConfigError, match="given twice"):
        spec_options("lora(rank=3, Rank=4)")


def test_python_attaches_methods_in_any_case(backbone: Path):
    model = BertModel.from_pretrained(backbone)
    for spec in ("LoRA", ["LoRA"], {"LoRA": {"Rank": 2}}, "LoRA(rank=2), BitFit"):
        assert ah.attach(model, spec).methods[0].name == "lora"
        ah.detach(model)


@pytest.mark.parametrize(("flag", "own"), [("--LR", "--lr"), ("--Epochs", "--epochs")])
def test_a_flag_in_another_case_has_a_hint(flag, own, adapterhub, tmp_path):
    write_tsv(tmp_path / "data.tsv", sentences(8))
    refused(adapterhub("train", str(tmp_path / "data.tsv"), flag, "1"), own)


def test_words_of_other_programs_name_a_command_or_its_absence(adapterhub, subtests):
    assert not OTHER_WORDS.keys() & {*COMMANDS, *ALIASES}
    for word, meant in OTHER_WORDS.items():
        with subtests.test(word):
            refused(adapterhub(word), meant)
            named = re.findall(r"adapterhub ([a-z]+)", meant)
            assert set(named) <= COMMANDS.keys()
            assert named or meant == "adapterhub --version" or meant == "adapterhub --help --all"


@pytest.mark.parametrize("command", ["predict", "serve", "merge", "eval", "pull", "train"])
def test_flags_of_other_programs_have_a_hint(adapterhub, subtests, command):
    own = group.get_command(click.Context(group), command)
    flags = {name for option in own.params for name in option.opts}
    for flag, meant in OTHER_FLAGS.items():
        fits = not meant.startswith("--") or meant.split()[0] in flags
        if len(flag) > 1 and f"--{flag}" not in flags and fits and command != "train":
            with subtests.test(flag):
                code, _, err = adapterhub(command, "x", f"--{flag}", "1")
                assert code == 2
                assert meant in " ".join(err.split())
    refused(adapterhub(command, "x", "--gpu", "0"), "CUDA_VISIBLE_DEVICES")
