"""Hostile training records, run folders, chat templates and bytes that are not text.

None sets a path or runs code, and each is one clear error.
"""

import io
import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import regex
from forge import bomb, forge, harmless_text, limited

from adapterhub.errors import AdapterhubError, BackboneError, ConfigError, FileError
from adapterhub.inference.open import open_adapter
from adapterhub.inference.record import read_training_record
from adapterhub.tasks import parse_task
from adapterhub.tasks.common.chat_template import chat_text
from tests.kit.data import word_tokenizer
from tests.kit.selection import long_table
from tests.kit.session import refused


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def record(folder: Path, **training: Any) -> None:
    """Replace the training record of a run's adapter."""
    forge(folder / "adapter", lambda tree: tree.update(training=training))


def recipe(**data: Any) -> dict[str, Any]:
    return {"recipe": {"data": data}}


RECORDS: dict[str, dict[str, Any]] = {
    "recipe: a list": {"recipe": [1]},
    "data: a list": {"recipe": {"data": [1]}},
    "data: code": recipe(trust_remote_code=True),
    "data: format": recipe(format="pickle"),
    "data: column": recipe(text=["a"]),
    "data: header": recipe(header="no"),
    "train: a number": {"recipe": {"train": 3}},
    "length: zero": {"recipe": {"train": {"max_length": 0}}},
    "length: text": {"recipe": {"train": {"max_length": "9" * 5000}}},
    "length: a fraction": {"recipe": {"train": {"max_length": 1.5}}},
    "seed: text": {"seed": "abc"},
    "seed: negative": {"seed": -1},
    "task: unknown": {"recipe": {"task": "os.system"}},
    "task: a list": {"recipe": {"task": ["classification", "tagging"]}},
    "task: two": {"recipe": {"task": {"classification": {}, "tagging": {}}}},
    "task: code": {"recipe": {"task": "classification(x=__import__('os').system('id'))"}},
    "task: deep": {"recipe": {"task": "(" * 3000}},
    "task: deep operators": {"recipe": {"task": "a(x=" + "-" * 3500 + "1)"}},
    "task: deep sums": {"recipe": {"task": "a(x=" + "1+" * 1900 + "1)"}},
    "task: deep attributes": {"recipe": {"task": "a(x=a" + ".a" * 1900 + ")"}},
    "task: a megabyte": {"recipe": {"task": "a" * 900_000}},
    "task: option": {"recipe": {"task": {"seq2seq": {"trust_remote_code": True}}}},
    "task: beams": {"recipe": {"task": {"seq2seq": {"beams": 10**12}}}},
    "task: tokens": {"recipe": {"task": {"causal-lm": {"new_tokens": 10**12}}}},
    "task: template": {"recipe": {"task": {"seq2seq": {"template": "{text.__class__}"}}}},
    "task: pattern": {"recipe": {"task": {"causal-lm": {"answer": "(" * 900}}}},
    "task: long pattern": {"recipe": {"task": {"causal-lm": {"answer": "(a)" + "b" * 5000}}}},
    "task: nested pattern": {"recipe": {"task": {"causal-lm": {"answer": "(a{9999999999})"}}}},
}


@long_table("attack", RECORDS)
def test_a_hostile_record_is_refused(copy, attack) -> None:
    record(copy, **RECORDS[attack])
    with pytest.raises(FileError) as error, limited():
        read_training_record(copy)
    assert harmless_text(str(error.value))
    assert len(str(error.value)) < 20_000


def test_an_exponential_answer_pattern_is_stopped(monkeypatch) -> None:
    search = regex.search
    monkeypatch.setattr(regex, "search", lambda *a, timeout: search(*a, timeout=timeout / 20))
    task: Any = parse_task({"causal-lm": {"answer": "((?:a|aa)+)$"}})
    with pytest.raises(ConfigError, match="too long"), limited():
        task._answer("a" * 40 + "b")


FOREIGN: dict[str, str] = {
    "python": "backbone: !!python/object/apply:os.system ['touch canary']\n",
    "an alias": "a: &a [1]\nbackbone: *a\n",
    "deep": "backbone: " + "[" * 20_000 + "]" * 20_000,
    "large": "backbone: " + "a" * (1 << 20),
    "a broken escape": 'backbone: "\\UFFFFFFFF"\n',
    "not a mapping": "- backbone\n",
    "NUL": "backbone: a\0b\n",
}


@long_table("attack", FOREIGN, parts=3)
def test_a_hostile_recipe_next_to_an_adapter_is_refused(copy, attack, monkeypatch) -> None:
    monkeypatch.chdir(copy)
    (copy / "recipe.yaml").write_text(FOREIGN[attack], encoding="utf-8")
    with pytest.raises(AdapterhubError) as error:
        open_adapter(copy)
    assert harmless_text(str(error.value))
    assert not (copy / "canary").exists()


@pytest.mark.parametrize(
    "place", ["\\\\evil\\share", "//evil/share", '"a\\0b"', "nowhere", "[1]", "a link"]
)
def test_a_recipe_with_no_local_backbone_is_ignored(copy, tmp_path, place) -> None:
    recipe = copy / "recipe.yaml"
    if place == "a link":
        recipe.rename(tmp_path / "recipe.yaml")
        recipe.symlink_to(tmp_path / "recipe.yaml")
    else:
        recipe.write_text(f"backbone: {place}\n", encoding="utf-8")
    with pytest.raises(BackboneError, match="the backbone 'tiny-bert' was not found"):
        open_adapter(copy)
    (copy / "adapter").rename(tmp_path / "elsewhere")
    (copy / "adapter").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match="has no adapter"):
        read_training_record(copy)


def test_custom_code_of_a_backbone_never_runs(copy, canary, backbone, tmp_path) -> None:
    """The code neither runs, nor does a prompt ask whether it may."""
    evil = Path(shutil.copytree(backbone, tmp_path / "evil"))
    code = f"import pathlib; pathlib.Path({str(canary)!r}).touch()\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py"):
        (evil / name).write_text(code + "class Evil: ...\n", encoding="utf-8")
    config = json.loads((evil / "config.json").read_text())
    autos = ("AutoModelForSequenceClassification", "AutoModel", "AutoConfig")
    config["auto_map"] = {auto: "modeling_evil.Evil" for auto in autos}
    (evil / "config.json").write_text(json.dumps(config))
    (copy / "recipe.yaml").write_text(f"backbone: {evil}\n", encoding="utf-8")
    open_adapter(copy)  # transformers has this model type, so its own class is used
    config["model_type"] = "evil"
    (evil / "config.json").write_text(json.dumps(config))
    with pytest.raises(BackboneError, match="cannot be loaded"):
        open_adapter(copy)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickled_backbone_is_never_loaded(copy, canary, backbone, tmp_path) -> None:
    evil = Path(shutil.copytree(backbone, tmp_path / "evil"))
    (evil / "model.safetensors").unlink()
    (evil / "pytorch_model.bin").write_bytes(bomb(canary))
    (copy / "recipe.yaml").write_text(f"backbone: {evil}\n", encoding="utf-8")
    with pytest.raises(BackboneError, match="cannot be loaded"):
        open_adapter(copy)


# Chat templates run in transformers' sandbox, and print nothing that they like.
TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " a <b> 'c'\n\u00e9 \U0001f600"},
    {"role": "assistant", "content": "<think>x</think>yes"},
    {"role": "user", "content": "why"},
]
TEMPLATES = {
    "an attribute": "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "an import": "{% import 'x' as y %}",
    "an include": "{% include '/etc/passwd' %}",
    "a message of its own": "{{ raise_exception('\x1b[2J\u202e[bold]' ~ '\n$ sudo') }}",
    "a syntax error": "{% \x1b[2J %}",
    "a mutation": "{{ messages.append(1) }}",
    "an unknown filter": "{{ 1|\u0435xit }}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_is_refused(name) -> None:
    made = word_tokenizer("<s>", "</s>")
    made.chat_template = TEMPLATES[name]
    with pytest.raises(ConfigError, match="the chat template of") as error:
        chat_text(made, TURNS, generation_prompt=True)
    assert harmless_text(str(error.value))
    assert not [line for line in str(error.value).splitlines()[1:] if not line.startswith("  ")]


# Bytes that are not text, on standard input, in files and on the command line

BYTES = {
    **{code: "a good movie\n".encode(code) for code in ("utf-16", "utf-16-le", "utf-32")},
    "latin-1": b"a good movie\nna\xefve\n",
    "NUL": b"a good\0movie\n",
    "half a character": b"a good movie \xe2\x82",
    "a surrogate": b"a good \xed\xa0\x80 movie\n",
    "binary": bytes(range(256)) * 9,
}


def stdin(monkeypatch, data: bytes, encoding: str = "utf-8") -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding=encoding))


@long_table(("kind", "words"), itertools.product(BYTES, [(), ("--data", "-")]), parts=4)
def test_standard_input_that_is_not_utf8(run, adapterhub, monkeypatch, kind, words) -> None:
    stdin(monkeypatch, BYTES[kind])
    refused(adapterhub("predict", run, *words), "standard input", "UTF-8", "iconv -f")


def test_standard_input_is_utf8_in_every_locale(run, adapterhub, monkeypatch) -> None:
    outputs = set()
    for encoding in ("utf-8", "ascii", "latin-1"):
        stdin(monkeypatch, b"\xef\xbb\xbfna\xc3\xafve \xe2\x80\xa8 movie\r\nb\n", encoding)
        code, out, err = adapterhub("predict", run, "--json")
        assert code == 0, err
        assert len(out.splitlines()) == 2
        outputs.add(out)
    assert len(outputs) == 1


@long_table(
    ("kind", "name"),
    itertools.product(BYTES, ["data.txt", "data.tsv", "data.csv", "data.jsonl", "data.conll"]),
)
def test_a_file_that_is_not_utf8_is_refused_or_how_it_is_read_is_said(
    run, adapterhub, tmp_path, kind, name
) -> None:
    (tmp_path / name).write_bytes(BYTES[kind])
    code, out, err = adapterhub("predict", run, "--data", tmp_path / name)
    assert name in err
    assert harmless_text(out + err)
    if code == 0:
        assert any(said in err for said in ("UTF-16", "UTF-32", "data.encoding=NAME"))
    else:
        assert code == 2
        assert "error: " in err


@long_table(
    "words",
    [
        ("predict", "run", "a \udcff movie"), ("list", "\udcff"), ("show", "\udcff"),
        ("yank", "a@v1", "--reason", "\udcff"), ("publish", "run", "--description", "\udcff"),
        ("train", "backbone=\udcff"), ("\udcff",),
    ],
    parts=3,
    ids=ascii,
)  # fmt: skip
def test_an_argument_that_is_not_utf8(adapterhub, words) -> None:
    place = next(n for n, word in enumerate(words, 1) if "\udcff" in word)
    refused(adapterhub(*words), f"argument {place} is not", "byte 0xff", "iconv")
