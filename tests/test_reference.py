"""The generated reference: commands, keys, public names, errors, methods, tasks and studies."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import click
import numpy as np
import pytest
from PIL import Image
from reference import _backbones, _docstrings, _method_groups, _picture, methods, tasks
from reference import cli as cli_page
from reference import python as python_pages
from reference import recipe as recipe_page
from reference import studies as study_pages
from reference.markdown import prose

import adapterhub as ah
from adapterhub.cli import COMMANDS, group
from adapterhub.cli.recipe import commented_recipe
from adapterhub.config.options import options_of, to_dict
from adapterhub.config.yaml import inline_yaml
from adapterhub.data.options import DataOptions
from adapterhub.loop.engine import _out_of_memory
from adapterhub.loop.report import one_class
from adapterhub.methods import METHODS
from adapterhub.recipe.other_names import ALIASES, MEANINGS
from adapterhub.recipe.recipe import Recipe, RunOptions, TrainOptions
from adapterhub.tasks import TASKS
from adapterhub.tasks.classification import Number, Scored
from adapterhub.tasks.common.base import Generated
from adapterhub.tasks.common.distillation import TeacherOptions
from adapterhub.tasks.embedding import Embedded
from adapterhub.tasks.masked_lm import Filled
from adapterhub.tasks.multi_label import Labels
from adapterhub.tasks.multiple_choice import Choice
from adapterhub.tasks.question_answering import Answer
from adapterhub.tasks.tagging import Entity, Tags
from adapterhub.tasks.text_to_image import Picture
from tests.kit import matrix, processes, stand_ins, tiny_models
from tests.kit.selection import long_table

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


def commands(
    group: click.Command = group, names: Iterable[str] = COMMANDS, before: str = ""
) -> dict[str, click.Command]:
    """Every command by its words, with those of groups."""
    context, found = click.Context(group, **group.context_settings), {}
    for name in names:
        command = found[f"{before}{name}"] = group.get_command(context, name)
        found |= commands(command, getattr(command, "commands", ()), f"{before}{name} ")
    return found


def test_every_command_and_option_has_one_anchor_and_commands_have_usage_and_examples(
    cli: str,
) -> None:
    expected = Counter()
    for words, command in commands().items():
        anchor = words.replace(" ", "-")
        options = [p.opts[-1] for p in command.params if isinstance(p, click.Option)]
        expected.update([anchor, *(f"{anchor}{option}" for option in options)])
        assert f"```text\nadapterhub {words} " in cli, words
    assert anchors(cli) == expected
    assert len(expected) > 250
    for name, summary in COMMANDS.items():
        assert f"- [`{name}`](#{name}): {summary}\n" in cli
    assert cli.count("**Examples**") == len(COMMANDS)
    assert "\b" not in cli
    assert prose("hf:OWNER/*") == "hf:OWNER/\\*", "an asterisk is not emphasis"


def test_every_key_has_one_anchor_with_its_type_default_and_other_names(recipe: str) -> None:
    keys = {
        f"{prefix}{option.name}": option
        for prefix, cls in (
            ("", Recipe),
            ("teacher.", TeacherOptions),
            ("data.", DataOptions),
            ("train.", TrainOptions),
        )
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
    assert f"```yaml\n{commented_recipe(Recipe())}```" in recipe


def test_every_public_name_is_on_exactly_one_page(python: dict[str, str]) -> None:
    names = [name for page in python_pages.PAGES for name in python_pages.names_of(page)]
    assert {name: n for name, n in Counter(names).items() if n > 1} == {}
    errors = {f"errors.{error.__name__}" for error in ah.AdapterhubError.__subclasses__()}
    assert errors < set(python_pages.names_of("errors"))
    assert len(errors) == 13
    assert set(ah.__all__) <= set(names)
    for name in ah.__all__:
        path = python_pages._path(name)
        module, _, attribute = path.rpartition(".")
        value = getattr(__import__(module, fromlist=[attribute]), attribute)
        assert value is getattr(ah, name) or name == "adapters", name
        holding = [page for page, text in python.items() if f"::: {path}\n" in text]
        assert len(holding) == 1, name
        assert f"#{path}): " in python["reference/python/index.md"]


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
    assert one_class("no")[0].partition(";")[0] in page
    error = _out_of_memory(RunOptions(batch_size=32, max_length=512))
    assert f"error: {error.problem}" in page
    rows = page.partition("| set |")[2].partition("\n\n")[0]
    assert all(key in rows for key in re.findall(r"[a-z_.]+(?==)", error.hint))


FULL = tiny_models.FULL_MATRIX
SOME = sorted(METHODS) if FULL else ["lora"]
SOME_TASKS = (
    sorted(TASKS.keys() - {"text-to-image"}) if FULL else ["classification", "span-corruption"]
)
every_method = pytest.mark.parametrize("name", sorted(METHODS))
every_task = pytest.mark.parametrize("name", sorted(TASKS))


def test_every_method_and_task_has_a_page(monkeypatch):
    for module in (methods, tasks):
        monkeypatch.setattr(module, "page", lambda name: f"page of {name}")
        monkeypatch.setattr(module, "index", lambda: "index")
    assert len(METHODS) >= 26
    assert len(TASKS) >= 11
    assert PREDICTIONS.keys() == TASKS.keys()
    expected = ["methods/index.md", *(f"methods/{name}.md" for name in sorted(METHODS))]
    assert list(methods.pages()) == expected
    assert list(tasks.pages()) == ["tasks/index.md", *(f"tasks/{n}.md" for n in sorted(TASKS))]


def test_every_method_is_in_one_group_of_the_index_and_of_the_navigation():
    """A new method says when to take it, in scripts/reference/_method_groups.py."""
    grouped = [name for each in _method_groups.GROUPS for name in each.methods]
    assert sorted(grouped) == sorted(METHODS)
    below = [path for paths in methods.groups().values() for path in paths]
    assert below == [f"methods/{name}.md" for name in grouped]


@every_method
def test_the_docstring_and_the_options_of_a_method_are_its_page(name):
    """It has an equation, the number of parameters, and a source with the method's paper."""
    method = METHODS[name]
    doc = methods.docstring(method)
    assert _docstrings.is_shown(doc.body[0]), "the equation comes first"
    assert doc.cost, "a paragraph begins with 'Parameters: '"
    assert method.paper.rpartition(" ")[2] in doc.source
    assert not re.search(r"\w+\.py\b", doc.markdown()), "a page names no other file"
    assert "Parameters" not in doc.markdown()
    table = methods._options(name)
    rows = re.findall(r"^\| `(\w+)` \| .+<br>`.+default `(.+)` \|$", table, re.M)
    assert [row[0] for row in rows] == [f.name for f in dataclasses.fields(method)]
    defaults = {o.name: inline_yaml(to_dict({"x": o.default})["x"]) for o in options_of(method)}
    assert dict(rows) == defaults
    assert f"`{method.learning_rate:g}`" in table


def box_of(key: str) -> str:
    """Return the box that a parameter is drawn in, by its name in adapter files."""
    if key.startswith("backbone.embeddings"):
        return "embed.norm" if "LayerNorm" in key else "embed"
    return "pooler" if key.startswith("backbone.pooler") else ".".join(key.split(".")[2:4])


@long_table("name", sorted(METHODS), 6)
def test_the_picture_highlights_exactly_the_sites_that_are_used(name):
    model = tiny_models.model("bert")
    place = _picture.where(METHODS[name].example(), model)
    figure = _picture.figure(name, place)
    adapter = ah.attach(model, METHODS[name].example())
    added = {placed.site.role for placed in adapter.placed}
    trained = {box_of(changed.name) for changed in adapter.changed}
    layers = {placed.site.layer for placed in adapter.placed} - {None}
    layers |= {int(c.name.split(".")[1]) for c in adapter.changed if c.name.startswith("encoder")}
    assert set(re.findall(r'data-on="([\w.]+)"', figure)) == added | trained
    drawn = {int(n) for n in re.findall(r'class="bar on" data-layer="(\d+)"', figure)}
    assert drawn == (layers if "mix" not in added else {0, 1})
    assert len(re.findall("data-layer", figure)) == 2
    assert added or trained or name == "head"


@pytest.mark.parametrize("name", SOME)
def test_the_facts_of_a_page_come_from_the_code(name):
    """The whole page; and a method without a reason against it is said to fit."""
    page = methods.page(name)
    assert re.findall("^## (.*)", page, re.MULTILINE) == [
        "Use", "What it computes", "Where it sits", "Options", "Cost", "Merge and serve",
        "Quantized backbones", "Architectures", "Source",
    ]  # fmt: skip
    fits = [_backbones.fit(name, backbone) for backbone in _backbones.NAMED]
    merges = ["refused" if f.refused else "no" if f.merge else "yes" for f in fits]
    assert f"| merges | {' | '.join(merges)} |" in page
    assert page.count("\n- ") >= sum(bool(f.merge) for f in fits[:1])
    refused = [a for names in _backbones.refusals(name).values() for a in names]
    assert sorted(refused) == sorted(a for m, a in matrix.REFUSED if m == name)
    model = _backbones.named(_backbones.BERT)
    assert f"| {METHODS[name].example().count(_backbones.anatomy(model)):,} |" in page


# One prediction of each task, as its docstring shows it.
PREDICTIONS = {
    "classification": Scored("positive", {"negative": 0.019, "positive": 0.981}),
    "regression": Number(4.213),
    "multi-label": Labels(("insult", "threat"), {"insult": 0.912, "threat": 0.604}),
    "multiple-choice": Choice(0, "it burned.", (0.874, 0.126)),
    "tagging": Tags(("B-PER",), (Entity("PER", "Ada", 0, 3, 0.97),)),
    "question-answering": Answer("Ada", 0, 3, 5.21),
    "seq2seq": Generated("Die Katze schläft."),
    "unified-qa": Generated("the cat"),
    "causal-lm": Generated("7"),
    "masked-lm": Filled("the glacier moves slowly", ({"slowly": 0.31, "fast": 0.07},)),
    "embedding": Embedded(np.array([[0.6, -0.8]])),
    "reranking": Number(0.981),
    "preference": Generated("7"),
    "grpo": Generated("4"),
    "reward": Number(1.204),
    "span-corruption": Generated("moves slowly"),
    "denoising": Generated("the glacier moves slowly"),
    "image-text-to-text": Generated("a cat"),
    "image-classification": Scored("cat", {"cat": 0.981, "dog": 0.019}),
    "speech-recognition": Generated("the glacier moves slowly"),
    "audio-classification": Scored("dog", {"dog": 0.981, "rain": 0.019}),
    "text-to-image": Picture(Image.new("RGB", (512, 512))),
    "prompted": Scored("1", {"0": 0.019, "1": 0.981}),
}


@every_task
def test_the_page_of_a_task(name):
    page = tasks.page(name)
    task = TASKS[name]
    assert re.findall("^## (.*)", page, re.MULTILINE) == [
        "Data", "Train", "What the model learns", "Predict", "Metrics", "Options", "Backbones",
    ]  # fmt: skip
    fields = PREDICTIONS[name].as_dict()
    of_two_texts = {"similarity"}
    assert tuple(fields) == tuple(n for n in task.printed_fields if n not in of_two_texts)
    fields |= {"png": "iVBORw0KGgo..."} if "png" in fields else {}
    printed = json.dumps(fields, ensure_ascii=False)
    assert f"```text\n{PREDICTIONS[name]}\n{printed}\n```" in page
    options = page.partition("## Options")[2].partition("## Backbones")[0]
    assert re.findall(r"^\| `(\w+)` \|", options, re.MULTILINE) == [
        option.name for option in options_of(task)
    ]
    assert f"| `{task().main_metric}` |" in page
    assert all(f"`data.{option}`" in page for option in task.columns)
    assert "have such a class: `" in page


@pytest.mark.apart
def test_the_code_of_the_pages_runs(tmp_path):
    """As one page of the blocks of several."""
    rows = "".join(
        f"the film number {i} was {'good' if i % 2 else 'bad'},{i % 2}\n" for i in range(24)
    )
    data = f'```text title="train.csv"\ntext,label\n{rows}```\n'
    trained = "".join(
        "```console\n$ adapterhub train --train train.csv --method pfeiffer --output runs/"
        f"{name} --backbone google-bert/bert-base-uncased\n```\n"
        for name in ("one", "two")
    )
    parts = [data, *[trained] * FULL, *map(methods._use, SOME), *map(tasks.page, SOME_TASKS)]
    page = tmp_path / "page.md"
    page.write_text("\n".join(parts), encoding="utf-8")
    record = tmp_path / "done.json"
    stand_ins.serve()
    ended = processes.run("scripts/pages.py", page, "--quick", "--record", record, folder=ROOT)
    assert ended.returncode == 0, ended.printed
    done = json.loads(record.read_text(encoding="utf-8"))
    printed = "".join(output for block in done for output in block["outputs"])
    assert printed.count("row 1 of") == len(SOME_TASKS)


RECIPE = """\
# A study of two methods:
# which one?
#
#     cd FOLDER
#     adapterhub bench study.yaml
#
# Subsampled.
bench:
  methods: [lora, full]
"""


@pytest.fixture
def studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "other.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/report.md").write_text("# mine\n\n## sst2\n\nTake lora.\n", encoding="utf-8")
    monkeypatch.setattr(study_pages, "STUDIES", tmp_path)
    return tmp_path


def test_a_study_has_a_page_when_its_report_is_there(studies: Path) -> None:
    pages = study_pages.pages()
    assert sorted(pages) == ["studies/index.md", "studies/mine.md"]
    assert "- [mine](mine.md): A study of two methods: which one?" in pages["studies/index.md"]
    assert "- other: A study of two methods" in pages["studies/index.md"]
    page = pages["studies/mine.md"]
    assert page.startswith("# mine\n\nA study of two methods: which one?\n\n```text\ncd FOLDER\n")
    assert "Subsampled." in page
    assert page.count("# mine\n") == 1
    assert "Take lora." in page
    assert page.endswith(f"```yaml\n{RECIPE}```\n")
