"""The plan of a run, and its first rows as text: what it counts is what the run then has."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from adapterhub.loop.trainee import HEAD_LEARNING_RATE
from adapterhub.recipe.recipe import read
from adapterhub.tasks import TASKS
from adapterhub.training import loading
from adapterhub.training import plan as plan_module
from adapterhub.training.plan import plan_of, preview_rows
from adapterhub.training.run import prepare
from tests.kit import tiny_models
from tests.kit.data import HEADS, mixed_recipe, write_json_lines, write_tsv
from tests.kit.selection import long_table
from tests.kit.session import succeeded
from tests.kit.task_cases import CASES


@pytest.fixture
def prepared(recipe_with):
    return lambda *words: prepare(recipe_with(*words))


@pytest.mark.parametrize("method", ["lora(rank=2)", "full", "[prompt, norms]"])
def test_the_sites_account_for_every_trained_parameter(prepared, method):
    ready = prepared(f"method={method}")
    plan = plan_of(ready)
    assert sum(count for _, _, count in plan.sites) == plan.trainable
    assert plan.trainable == sum(p.numel() for p in ready.adapter.parameters())
    heads = [count for site, method, count in plan.sites if method == "head"]
    assert sum(heads) == plan.head > 0
    assert plan.memory["gradients"] == 4 * plan.trainable
    assert plan.memory["optimizer"] == 8 * plan.trainable


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["train.epochs=2", "train.batch_size=10"], 14),
        (["train.epochs=2", "train.batch_size=10", "train.gradient_accumulation=3"], 6),
        (["train.max_steps=5", "train.max_length=4"], 5),
    ],
)
def test_steps_rates_labels_and_texts_that_are_cut(prepared, words, steps):
    plan = plan_of(prepared("method=lora", "train.learning_rate=0.5", *words))
    assert plan.steps == steps
    assert plan.rates == {"lora": 0.5, "head": HEAD_LEARNING_RATE}
    assert plan.labels == {"neg": 32, "pos": 32}
    assert plan.truncated == 64 * ("train.max_length=4" in words)


PEAK = """
import sys
from pathlib import Path
from adapterhub.training.plan import plan_of
from adapterhub.training.run import (prepare)
from adapterhub.recipe.recipe import read
from adapterhub.loop.report import Reporter
from adapterhub.loop import loop
from adapterhub.training.run import training_session

backbone, train, eval_, output, *words = sys.argv[1:]
flags = {"backbone": backbone, "output": output, "data": {"train": train, "eval": eval_}}
prepared = prepare(read(None, words, flags))
planned = sum(plan_of(prepared).memory.values())
Path(output).mkdir()
session = training_session(prepared, Reporter(), False)
print(planned / loop.train(session).peak_memory)
"""
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
FULL = [
    (MINILM, 126, ["train.batch_size=16"]),
    (MINILM, 126, ["train.batch_size=4"]),
    (MINILM, 62, ["train.batch_size=64"]),
    (MINILM, 62, ["method=full", "train.batch_size=16"]),
    (MINILM, 126, ["task=masked-lm", "train.batch_size=4", "train.eval_batch_size=16"]),
]
RUNS = [("tiny", 60, []), *(FULL if tiny_models.FULL_MATRIX else [])]


@pytest.mark.apart
@pytest.mark.parametrize(("name", "words", "options"), RUNS)
def test_the_memory_is_that_of_the_process(name, words, options, backbone, tmp_path):
    """Measured in a process of its own: within 25 % of its peak."""
    row = " ".join((["good", "bad", "movie"] * words)[:words])
    file = write_tsv(tmp_path / "a.tsv", [(row, "neg"), (row, "pos")] * 64)
    place = str(backbone) if name == "tiny" else name
    command = [sys.executable, "-c", PEAK, place, str(file), str(file), str(tmp_path / "run")]
    done = subprocess.run(
        [*command, "train.max_steps=3", "train.tensorboard=false", *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(1, abs=0.25)


def grown(backbone: Path, folder: Path) -> Path:
    """Return a backbone of the same kind whose activations are not lost in the process."""
    config = transformers.AutoConfig.from_pretrained(backbone)
    wide = {"hidden_size": 256, "intermediate_size": 1024, "d_model": 256, "d_ff": 1024}
    for name in wide.keys() & vars(config).keys():
        setattr(config, name, wide[name])
    if getattr(config, "head_dim", None) is not None:
        config.head_dim = 256 // config.num_attention_heads
    shutil.copytree(backbone, folder)
    (folder / "model.safetensors").unlink()
    kind = getattr(transformers, config.architectures[0])
    kind._from_config(config).save_pretrained(folder)
    return folder


CHECKPOINTS = ["train.gradient_checkpointing=true"]
RUNS_TRIED = [
    ("bert", "classification", ["method=lora", "train.batch_size=16"]),
    ("bert", "classification", ["method=lora", "train.batch_size=64"]),
    ("bert", "classification", ["method=lora", "train.batch_size=16", *CHECKPOINTS]),
    ("bert", "classification", ["method=full", "train.batch_size=16"]),
    ("bert", "classification", ["method=pfeiffer", "train.batch_size=32", *CHECKPOINTS]),
    ("bert", "masked-lm", ["method=lora", "train.batch_size=16"]),
    ("llama", "causal-lm(data=text)", ["method=full", "train.batch_size=16", *CHECKPOINTS]),
    ("llama", "causal-lm(data=text)", ["method=prefix", "train.batch_size=8"]),
    ("t5", "seq2seq", ["method=pfeiffer", "train.batch_size=32", *CHECKPOINTS]),
]


@pytest.mark.apart
@long_table(("family", "task", "options"), RUNS_TRIED, nightly=8)
def test_a_dry_run_prints_the_memory_and_the_time_of_the_run(
    family, task, options, backbones, tmp_path
):
    place = grown(backbones(family), tmp_path / "backbone")
    row = " ".join(["good", "bad", "movie"] * 20)
    file = write_tsv(tmp_path / "a.tsv", [(row, "neg"), (f"{row} good", "pos")] * 64)
    words = ["--backbone", str(place), "--train", str(file), "--eval", str(file), "--task", task]
    words += ["--output", str(tmp_path / "run"), "train.tensorboard=false", "train.epochs=1"]
    ratios = [tried_and_ran(words + options, tmp_path / "run")]
    if not 0.88 <= ratios[0] <= 1.05:  # a process that others press on returns memory late
        for number in (1, 2):
            again = tmp_path / f"run-{number}"
            ratios.append(tried_and_ran([*words, *options, "--output", str(again)], again))
    assert 0.88 <= sorted(ratios)[len(ratios) // 2] <= 1.05, ratios


def tried_and_ran(words: list[str], output: Path) -> float:
    """Return the memory that a dry run prints, in that of the run."""
    facts = []
    for more in (["--dry-run"], []):
        command = [sys.executable, "-m", "adapterhub", "train", *words, *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        pairs = (line.strip().partition("  ") for line in done.stdout.splitlines())
        facts.append({name: value.strip() for name, _, value in pairs})
        assert bool(more) != output.exists()
    tried, ran = facts
    assert "measured in 6 steps" in tried["memory, total"]
    assert tried["time"].startswith("about ")
    return in_bytes(tried["memory, total"]) / in_bytes(ran["peak memory"])


def in_bytes(text: str) -> float:
    number, unit = text.split()[:2]
    return float(number) * {"MB": 1e6, "GB": 1e9}[unit]


def test_the_time_is_that_of_all_steps_and_evaluations(prepared, monkeypatch):
    """In proportion to the steps, however fast the machine is; of what would not fit, none."""
    few, many = (
        plan_module.rehearse(prepared(f"train.max_steps={n}", "train.eval_every=1000000"))
        for n in (10, 1000)
    )
    for found, steps in ((few, 10), (many, 1000)):
        assert found.seconds >= steps * found.step_seconds
    assert many.seconds > 5 * few.seconds
    monkeypatch.setattr(plan_module, "_room", lambda device: -math.inf)
    assert plan_module.rehearse(prepared()) is None


LEARNED = {
    "classification": {"label": "neg (class 0)"},
    "multi-label": {"labels": "none"},
    "regression": {"label": "-1.0"},
    "tagging": {"tokens": "[CLS] the/O movie/O was/O bad/B-neg [SEP]"},
    "question-answering": {"answer": "bad (tokens 8 to 8)"},
    "seq2seq": {"target": "bad </s>"},
    "unified-qa": {"target": "bad </s>"},
    "causal-lm": {"learned": "·x9 bad </s>"},
    "multiple-choice": {"right, 0": "[CLS] the movie [SEP] the movie was good [SEP]"},
    "embedding": {"anchor": "[CLS] the movie was bad [SEP]", "positive": "[CLS] awful [SEP]"},
    "reranking": {"label": "0.0"},
    "preference": {"chosen": "·x9 bad </s>", "rejected": "·x9 good </s>"},
    "grpo": {"tokens": "user : the movie was bad </s> assistant :"},
    "reward": {"chosen": "·x3 the movie was good"},
    "masked-lm": {"learned": "·x4 bad ·"},
    "prompted": {"learned": "·x6 bad ·"},
    "span-corruption": {"target": "<extra_id_0> bad <extra_id_1> </s>"},
    "audio-classification": {"label": "high (class 0)", "input_values": "4800"},
    "speech-recognition": {"input_values": "4480", "target": "a b"},
    "image-classification": {"label": "0 (class 0)", "pixel_values": "3 x 16 x 16"},
    "image-text-to-text": {
        "question": "which digit?",
        "tokens": "<image>x16 \\n w h i c h ▁ d i g i t ? \\n 0 </s>",
        "pixel_values": "1 x 3 x 16 x 16",
        "learned": "·x30 0 </s>",
    },
    "denoising": {"target": "<s> the movie was bad </s>"},
}


def recipe_of(backbone, task, file, **train):
    data = {"train": str(file), "eval": str(file)}
    flags = {"backbone": str(backbone), "task": task, "output": "x", "data": data, "train": train}
    return read(flags=flags)


@pytest.mark.parametrize("name", sorted(CASES))
def test_what_the_model_gets_and_learns(name, backbones, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load_backbone", None)
    case = CASES[name]
    recipe = recipe_of(backbones(case.backbone), case.task, case.data(tmp_path))
    rows, notes = preview_rows(recipe, 3)
    assert len(rows) == 3
    assert rows[0].title.startswith("row 1 of ")
    facts = rows[0].facts
    assert facts.items() >= LEARNED[name].items()
    if TASKS[name].decodes:
        assert "length" not in facts
        assert facts[TASKS[name].input_name]
    else:
        assert facts["text"].startswith(("the movie", "great movie"))
        assert "tokens" in facts["length"]
        assert "no text is cut" in notes[-1]


def test_what_is_cut_and_what_is_padded(backbone, tmp_path, monkeypatch, adapterhub):
    monkeypatch.chdir(tmp_path)
    rows = [{"text": "the movie was very good", "label": "a"}, {"text": "bad", "label": "b"}]
    file = write_json_lines(tmp_path / "a.jsonl", rows)
    (first, second), notes = preview_rows(
        recipe_of(backbone, "classification", file, max_length=5), 9
    )
    assert first.facts["cut"] == "2 of 7 tokens: very good"
    assert second.facts["length"] == "3 tokens; 2 of padding on the right in a batch of these rows"
    assert "cut" not in second.facts
    assert any(note.startswith("1 of 2 training texts") for note in notes)
    command = ("train", file, "--backbone", backbone, "--eval", file, "--show", "2")
    assert succeeded(adapterhub(*command)).count("[CLS]") == 2
    assert not (tmp_path / "runs").exists()


def test_rows_of_each_of_several_tasks(backbone, tmp_path):
    recipe = mixed_recipe(backbone, tmp_path, "train.best_metric=length/mse")
    rows, notes = preview_rows(recipe, 2)
    assert [row.title.partition(":")[0] for row in rows] == [n for n in HEADS for _ in range(2)]
    assert rows[-1].title == "length: row 2 of 9"
    assert any(note.startswith("mood: ") for note in notes)


WORDS = "the movie was very good"
ANSWERS = {"the movie": "was good", "a": "bad"}
CHAT = [{"role": role, "content": text} for turn in ANSWERS.items()
        for role, text in zip(("user", "assistant"), turn, strict=True)]  # fmt: skip


@pytest.mark.parametrize(
    ("backbone_of", "task", "row", "length", "expected"),
    [
        ("t5", "seq2seq(max_target=3)", {"text": "the movie", "label": WORDS}, None,
         {"cut from the target": "3 of 6 tokens: was very good", "cut": None}),
        ("llama", "causal-lm(data=text)", {"text": "the movie was good"}, 3,
         {"windows": "the text has 2"}),
        ("llama", "causal-lm(data=text, pack=true)", {"text": "the movie was good"}, None,
         {"text": None, "windows": None}),
        ("llama", "chat", {"text": CHAT}, None, {"learned": "·x7 was good </s> ·x6 bad </s>"}),
    ],
)  # fmt: skip
def test_targets_windows_and_chats(backbone_of, task, row, length, expected, backbones, tmp_path):
    file = write_json_lines(tmp_path / "a.jsonl", [row] * 4)
    recipe = recipe_of(backbones(backbone_of), task, file, max_length=length)
    facts = preview_rows(recipe, 1)[0][0].facts
    assert {name: facts.get(name) for name in expected} == expected
