"""What is written behind an answer stops generation: in predictions, loaded, merged, exported."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Trainer,
    TrainingArguments,
)

import adapterhub as ah
from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.end_tokens import with_stops
from adapterhub.data.examples import Example
from adapterhub.files.native import Saved
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.batches import IGNORED
from tests.kit import tiny_models
from tests.kit.data import CHAT_TEMPLATE, word_tokenizer, write_json_lines
from tests.kit.selection import long_table

MARK = "<extra_id_0>"  # ends a turn, and is not the end token of the tokenizer
TEMPLATES = {
    "own token": CHAT_TEMPLATE.replace("</s>", MARK),
    "the tokenizer's": CHAT_TEMPLATE,
    "a text": CHAT_TEMPLATE.replace("</s>", ":"),
    "nothing": CHAT_TEMPLATE.replace(" </s> ", " "),
}
FORMS = {
    "pairs": {"prompt": "the film was", "completion": "good"},
    "chat": {
        "messages": [
            {"role": "user", "content": "the film was"}, {"role": "assistant", "content": "good"},
        ]
    },
    "preference": {"prompt": "the film was", "chosen": "good", "rejected": "bad"},
}  # fmt: skip


@pytest.fixture
def trained(backbones: Any, adapterhub: Any, tmp_path: Path) -> Any:
    """Train on rows of a form with a chat template; return the folder and what was printed."""

    def run(template: str, form: str = "pairs", steps: int = 1) -> tuple[Path, str]:
        folder = Path(shutil.copytree(backbones("llama"), tmp_path / "backbone"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = TEMPLATES[template]
        tokenizer.save_pretrained(folder)
        data = write_json_lines(tmp_path / "rows.jsonl", [FORMS[form]] * 8)
        task = "preference" if form == "preference" else "causal-lm"
        code, _, err = adapterhub(
            "train", "--backbone", folder, "--task", f"{task}(new_tokens=8)", "--train", data,
            "--eval", data, "--output", tmp_path / "run", "--lr", "1e-2", "--method", "lora",
            f"train.max_steps={steps}", "train.report=false", "train.tensorboard=false",
        )  # fmt: skip
        assert code == 0, err
        return tmp_path / "run", err

    return run


@long_table(("template", "form"), list(itertools.product(TEMPLATES, FORMS)), 3, nightly=2)
def test_what_ends_an_answer_is_kept_or_missed_aloud(
    template: str, form: str, trained: Any
) -> None:
    folder, printed = trained(template, form)
    stop = word_tokenizer().convert_tokens_to_ids(MARK)
    recorded = Saved.at(folder / "adapter").manifest.training.get("stops")
    assert recorded == ([stop] if template == "own token" else None)
    endless = template in ("a text", "nothing")
    assert ("no token ends an answer" in printed) == endless


def test_a_learned_answer_ends_everywhere(trained: Any, adapterhub: Any, tmp_path: Path) -> None:
    folder, _ = trained("own token", steps=60)
    more = folder.parent / "more"
    words = ("--from", folder, "--output", more, "train.max_steps=1")
    code, _, err = adapterhub("train", folder / "recipe.yaml", *words)
    assert code == 0, err
    stops = [Saved.at(f / "adapter").manifest.training["stops"] for f in (folder, more)]
    assert stops[0] == stops[1], "a continued run keeps them"
    code, out, err = adapterhub("predict", folder, "the film was")
    assert (code, out.split("\t")[0]) == (0, "good"), err
    tokenizer = word_tokenizer()
    stop = tokenizer.convert_tokens_to_ids(MARK)
    model, tokenizer = ah.load_backbone(str(tmp_path / "backbone"), task="causal-lm")
    own = Backbone.of(model).stops
    adapter = ah.load(model, folder, tokenizer=tokenizer)
    chat = [{"role": "user", "content": "the film was"}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")

    def written(model: Any) -> list[int]:
        ids = model.generate(**asked, max_new_tokens=8, do_sample=False)[0]
        return list(ids[asked["input_ids"].shape[1] :].tolist())

    answer = written(model)
    assert answer[-1] == stop
    assert len(answer) == 2
    with ah.disabled(model):
        assert Backbone.of(model).stops == own
    adapter.export(tmp_path / "peft")
    assert GenerationConfig.from_pretrained(tmp_path / "peft").eos_token_id == with_stops(
        own, [stop]
    )
    code, _, err = adapterhub("merge", folder, "--output", tmp_path / "merged")
    assert code == 0, err
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert written(merged) == answer
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == TEMPLATES["own token"]
    )
    ah.merge(model)
    assert written(model) == answer
    ah.unmerge(model)
    assert written(model) == answer
    ah.detach(model)
    assert Backbone.of(model).stops == own


@pytest.mark.filterwarnings("ignore:save_pretrained wrote the backbone without")
@long_table(
    ("way", "form"),
    list(itertools.product(("own loop", "known tokenizer", "Trainer"), ("own token", "a text"))),
    2,
)
def test_without_a_run_the_tokenizer_says_where_answers_end(
    way: str, form: str, backbones: Any, tmp_path: Path
) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATES[form]
    stops = [tokenizer.convert_tokens_to_ids(MARK)] if form == "own token" else []
    if way == "own loop":
        model, loaded = ah.load_backbone(str(backbones("llama")), task="causal-lm")
        loaded.chat_template = TEMPLATES[form]
        adapter = ah.attach(model, "lora", name="mine")
    else:
        model = AutoModelForCausalLM.from_pretrained(backbones("llama"))
        given = tokenizer if way == "known tokenizer" else None
        adapter = ah.attach(model, "lora", name="mine", tokenizer=given)
    own = Backbone.of(model).stops
    if way == "Trainer":
        _train_in_a_trainer(model, tokenizer, tmp_path)
        folder = tmp_path / "adapters" / "mine"
    else:
        folder = tmp_path / "mine"
        adapter.save(folder)
    manifest = Saved.at(folder).manifest
    assert (manifest.training.get("stops") or []) == stops
    assert manifest.chat_template == TEMPLATES[form]
    adapter.export(tmp_path / "peft")
    if stops:
        exported = GenerationConfig.from_pretrained(tmp_path / "peft").eos_token_id
        assert exported == with_stops(own, stops)
    ah.merge(model)
    assert Backbone.of(model).stops == (with_stops(own, stops) if stops else own)
    ah.unmerge(model)
    ah.detach(model)
    assert Backbone.of(model).stops == own
    ah.load(model, folder, tokenizer=tokenizer)
    assert Backbone.of(model).stops == (with_stops(own, stops) if stops else own)


def _train_in_a_trainer(model: Any, tokenizer: Any, folder: Path) -> None:
    ids = tokenizer("user : the film was </s>", return_tensors="pt")["input_ids"][0]
    arguments = TrainingArguments(
        str(folder), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_steps=5,
        dataloader_pin_memory=False,
    )  # fmt: skip
    rows: Any = [{"input_ids": ids, "labels": ids}] * 4
    callbacks: Any = [ah.TrainerCallback()]
    Trainer(
        model, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks
    ).train()


@pytest.mark.parametrize("end", ["", "</s>"])
@pytest.mark.parametrize("limit", [1, 2, 8])
def test_a_target_ends_once(end: str, limit: int) -> None:
    tokenizer = word_tokenizer("", end)
    task = parse_task(f"seq2seq(max_target={limit})")
    examples = [Example("the film", None, text) for text in ("good", "good </s>")]
    rows = task.encode(examples, Setting(tokenizer, 32), labelled=True).rows
    expected = [tokenizer.convert_tokens_to_ids("good")] * (limit > 1)
    for row in rows:
        assert row["labels"] == [*expected, tokenizer.eos_token_id]


GENERATING = ["causal-lm", "seq2seq", "unified-qa", "span-corruption", "denoising", "preference"]


@pytest.mark.parametrize("name", GENERATING)
def test_each_task_that_writes_says_where_it_ends(name: str) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = None
    setting = Setting(tokenizer, 32)
    task: Any = parse_task(name)
    assert task.stops(setting) == [tokenizer.eos_token_id]
    assert task.endless_note(setting) == ()
    tokenizer.eos_token = None
    assert task.stops(setting) == []
    assert "no token ends" in " ".join(task.endless_note(setting))


def test_a_strangers_stops_are_tokens() -> None:
    adapter = ah.attach(tiny_models.model("llama", "causal-lm"), "lora")
    for stops in ("x", [True], [-1], [1 << 40], list(range(99)), {"a": 1}, None):
        adapter.metadata.training["stops"] = stops
        assert adapter.stops == ()


def test_special_tokens_are_written_once() -> None:
    tokenizer = word_tokenizer("<s>", "</s>")
    for template, response in (("{text}", "good"), ("<s>{text}", "good </s>")):
        task = parse_task({"causal-lm": {"template": template}})
        examples = [Example("the film was", None, response)]
        (row,) = task.encode(examples, Setting(tokenizer, 32), labelled=True).rows
        assert tokenizer.decode(row["input_ids"]) == "<s> the film was good </s>"
        assert [i for i in row["labels"] if i != IGNORED] == row["input_ids"][-2:]
    task = parse_task("causal-lm(data=text)")
    for text in ("the film", "<s> the film </s>"):
        (row,) = task.encode([Example(text)], Setting(tokenizer, 32), labelled=True).rows
        assert tokenizer.decode(row["input_ids"]) == "<s> the film </s>"


def test_a_model_that_writes_nothing_has_no_end() -> None:
    silent = Backbone.of(torch.nn.Linear(2, 2))
    silent.stops = 1
    assert silent.stops is None
    assert with_stops(None, [3]) == with_stops(3, [3]) == [3]
