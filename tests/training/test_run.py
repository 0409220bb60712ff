"""A run from its recipe to its files: what it prepares, its report, and its verdicts."""

import errno
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from adapterhub.backbones.pooling import max_positions
from adapterhub.data.examples import Example, data_hash
from adapterhub.data.options import DataOptions
from adapterhub.errors import AdapterhubError, ConfigError, OutputError
from adapterhub.inference.open import open_adapter
from adapterhub.loop.report import Evaluated, Reporter, Timing, verdict
from adapterhub.pages.page import recorded_words
from adapterhub.pages.row_scores import PREDICTIONS, PredictionFile
from adapterhub.recipe.recipe import Recipe, TrainOptions, read
from adapterhub.tasks import parse_task
from adapterhub.training import run as running
from adapterhub.training import word_baseline
from adapterhub.training.loading import make_ready
from adapterhub.training.run import RunPage, prepare, run
from adapterhub.training.run_data import RunData
from adapterhub.training.word_baseline import compare_with_words
from tests.kit import tiny_models
from tests.kit.data import write_json_lines
from tests.kit.runs import adapter_bytes, lines, predictions, quiet, run_folder
from tests.kit.task_cases import CASES


@pytest.fixture
def recipe(recipe_with) -> Recipe:
    return recipe_with(
        "method=lora(rank=2)", "train.max_steps=3", "train.tensorboard=false", "train.report=false"
    )


def test_the_output_folder_has_every_file_of_a_run(recipe, tmp_path):
    """A report adds its files, and changes no other."""
    output = tmp_path / "run"
    outcome = run(recipe, quiet(recipe))
    assert {path.name for path in output.iterdir()} == {
        ".lock", "adapter", "checkpoints", "metrics.jsonl", "recipe.schema.json",
        "recipe.yaml", "timings.jsonl",
    }  # fmt: skip
    assert read(output / "recipe.yaml") == replace(recipe, task="classification")
    assert outcome.folder == output / "adapter"
    assert outcome.adapter_bytes == sum(f.stat().st_size for f in outcome.folder.iterdir())
    assert outcome.result.steps == 3
    assert outcome.metrics == outcome.result.best
    assert lines(output / "metrics.jsonl")[-1]["metrics"] == outcome.result.last
    training = json.loads((outcome.folder / "adapter.json").read_text("utf-8"))["training"]
    assert (training["steps"], training["data"]["train"]) == (3, 64)
    (method,) = training["recipe"]["method"]
    assert method["lora"]["rank"] == 2
    assert str(tmp_path) not in json.dumps(training)
    shown = tmp_path / "shown"
    recipe = replace(recipe, output=str(shown), train=replace(recipe.train, report=True))
    outcome = run(recipe, quiet(recipe))
    assert outcome.page == shown / "report.html"
    names = [{path.name for path in folder.iterdir()} for folder in (output, shown)]
    assert names[1] - names[0] == {"bag_of_words.json", "predictions.jsonl", "report.html"}
    for file in ("adapter/adapter.safetensors", "metrics.jsonl"):
        assert (output / file).read_bytes() == (shown / file).read_bytes()
    assert outcome.words.record() == recorded_words(shown).record()
    assert outcome.words.lines[0] in (shown / "report.html").read_text().replace("A bag", "a bag")
    # A resume may turn the report off: nothing that is trained depends on it.
    recipe = replace(recipe, train=replace(recipe.train, report=False))
    assert run(recipe, Reporter(), resume=True).page is None


def test_a_record_has_no_unset_option_that_earlier_versions_cannot_read(recipe):
    data = running._identity(recipe)["data"]
    assert not {"text", "label", "header", "encoding", "skip_empty", "eval_rows"} & data.keys()
    fixed = replace(recipe.data, text="a", header=False, skip_empty=True)
    data = running._identity(replace(recipe, data=fixed))["data"]
    assert (data["text"], data["header"], data["skip_empty"]) == ("a", False, True)


def test_a_moved_run_resumes_with_data_at_another_path(recipe, data, tmp_path):
    whole = run(recipe, Reporter()).result
    (tmp_path / "run").rename(tmp_path / "moved")
    train = data[0].rename(tmp_path / "renamed.tsv")
    moved = replace(
        recipe, output=str(tmp_path / "moved"), data=replace(recipe.data, train=str(train))
    )
    assert run(moved, Reporter(), resume=True).result.history == whole.history
    with pytest.raises(ConfigError, match="another run") as error:
        run(replace(moved, seed=9), Reporter(), resume=True)
    assert any(line.startswith("seed") for line in error.value.offenders)


LONG = "x" * 1001
MANY = [f"{number:04}{'x' * 900}" for number in range(1300)]  # 1.2 MB, where a manifest has 1


@pytest.mark.parametrize("task", ["classification", "multi-label", "tagging"])
@pytest.mark.parametrize(
    ("labels", "problem"), [([LONG, "b"], "a label of at most 1000"), (MANY, "bytes, more than")]
)
def test_what_no_adapter_can_have_is_found_before_the_first_step(
    recipe, tmp_path, monkeypatch, task,
    labels, problem,
):  # fmt: skip
    """Labels, and the name and methods of a manifest."""
    rows = [{"text": f"row {n}", "label": label} for n, label in enumerate(labels)]
    if task == "tagging":
        rows = [{"tokens": ["a"], "tags": [f"B-{label}"]} for label in labels]
    file = str(write_json_lines(tmp_path / "rows.jsonl", rows * (2 if len(rows) < 9 else 1)))
    text, label = ("tokens", "tags") if task == "tagging" else ("text", "label")
    source = replace(recipe.data, train=file, eval="none", text=text, label=label)
    monkeypatch.setattr(running.loop, "train", lambda session: pytest.fail("it was trained"))
    with pytest.raises(OutputError, match="cannot be written") as error:
        run(replace(recipe, data=source, task=task), Reporter())
    assert problem in str(error.value)
    for change in {"name": "a/../b"}, {"method": ["lora(rank=2)", "lora(rank=4)"]}:
        with pytest.raises(AdapterhubError):
            run(replace(recipe, **change), Reporter())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [[], ["train.max_length=100000"]])
def test_the_schedule_and_the_length_are_chosen_and_told(recipe_with, words):
    prepared = prepare(recipe_with("method=unfreeze", *words))
    assert prepared.model.config.use_cache is False
    assert prepared.recipe.train.schedule == "slanted"
    assert prepared.recipe.train.max_length == 64, "the positions of the backbone"
    assert max(prepared.train.lengths) <= max_positions(prepared.model) == 64
    assert any("train.max_length" in note for note in prepared.notes)


def test_packing_is_refused_with_virtual_tokens(recipe_with, backbones, tmp_path):
    file = write_json_lines(tmp_path / "texts.jsonl", [{"text": "the movie was good"}] * 8)
    words = ("method=prompt", "task=causal-lm(data=text, pack=true)", f"data.train={file}")
    with pytest.raises(ConfigError, match="prompt prepends virtual tokens") as error:
        prepare(recipe_with(*words, f"data.eval={file}", folder=backbones("llama")))
    assert error.value.hint == "pack=false"


LIMITED = [a for a in tiny_models.MATRIX if "max_position_embeddings" in tiny_models.SIZES[a]]


@pytest.mark.parametrize("architecture", [*LIMITED, "roberta", "mpnet"])
def test_a_row_of_the_longest_length_is_read(architecture):
    assert len(LIMITED) > (20 if tiny_models.FULL_MATRIX else 7)
    model = tiny_models.usual_model(architecture)
    assert max_positions(model) <= 64 < max_positions(tiny_models.model("t5")) == 1 << 30
    inputs = tiny_models.batch(rows=2, length=max_positions(model))
    inputs |= tiny_models.decoder_inputs(model, inputs)
    assert model(**inputs).logits.isfinite().all()


def test_a_model_that_is_placed_already_stays_where_it_is(monkeypatch):
    model = tiny_models.model("llama", "causal-lm")
    model.hf_device_map = {"": "cpu"}
    monkeypatch.setattr(type(model), "to", lambda *_: pytest.fail("the model was moved"))
    make_ready(model)


WORDS = ("train.tensorboard=false", "train.report=false", "train.learning_rate=1e-2")


@pytest.fixture
def recipe_of(recipe_with, backbones, tmp_path):
    case = CASES["preference"]
    file = case.data(tmp_path)
    usual = (*WORDS, f"task={case.task}", f"data.train={file}", f"data.eval={file}")
    return lambda output, *words: recipe_with(
        *usual, *words, output=output, folder=backbones(case.backbone)
    )


def test_the_reference_of_a_new_and_of_a_started_adapter(recipe_of):
    new = recipe_of("new", "train.max_steps=6", "method=lora")
    outcome, bare = run(new, Reporter()), prepare(new)
    evaluated = open_adapter(outcome.folder).evaluate(bare.data.evaluation)
    assert evaluated == pytest.approx(outcome.metrics, abs=1e-4)
    started = prepare(recipe_of("again", f"from={outcome.folder}"))
    before, after = (
        np.array([row["reference"] for row in each.train.rows]) for each in (bare, started)
    )
    assert np.abs(after - before).max() > 0.1
    margin = started.data.task.evaluate(started.model, started.evaluation, 64)["margin"]
    assert margin == pytest.approx(0, abs=1e-5)


def test_a_resumed_run_has_the_reference_of_its_start(recipe_of):
    words = ("method=full", "train.schedule=constant")
    run(recipe_of("part", "train.max_steps=4", *words), Reporter())
    longer, alone = (recipe_of(name, "train.max_steps=8", *words) for name in ("part", "alone"))
    run(longer, Reporter(), resume=True)
    run(alone, Reporter())
    assert adapter_bytes(longer.output) == adapter_bytes(alone.output)


def evaluated(page: RunPage, step: int, best: bool = True) -> None:
    page.evaluated(Evaluated(step, 1.0, {"accuracy": 0.5}, best), Timing(1.0, 2.0, 3))


def written_step(folder: Path) -> int:
    return int(json.loads((folder / PREDICTIONS).read_bytes().splitlines()[0])["step"])


@pytest.fixture
def page(tmp_path: Path) -> RunPage:
    """The page of a run that has predictions of any step."""
    latest = SimpleNamespace(file=lambda step: replace(predictions("classes"), step=step))
    return RunPage(run_folder(tmp_path), latest, pytest.fail)  # type: ignore[arg-type]


def test_the_predictions_are_those_of_the_best_step(page):
    """Those that were written after the checkpoint are dropped."""
    for step, best in ((2, True), (4, True), (6, False)):
        evaluated(page, step, best)
    assert written_step(page.folder) == 4
    page.start(9, 4)
    assert written_step(page.folder) == 4
    page.start(9, 2)
    assert not (page.folder / PREDICTIONS).exists()
    (page.folder / PREDICTIONS).write_bytes(b"\xff")
    page.start(9, 2)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), ImportError("no matplotlib"), KeyError("x")]
)
def test_a_failure_is_one_note(error, page, monkeypatch):
    notes: list[str] = []
    monkeypatch.setattr(page, "note_failure", notes.append)
    for name in ("write_page", "replace_file"):
        monkeypatch.setattr(running, name, Mock(side_effect=error))
    evaluated(page, 2)
    evaluated(page, 4)
    assert page.finish() is None
    (note,) = notes
    assert note.startswith(f"no report of this run: {type(error).__name__}")


def test_one_class_for_every_row_of_the_best_step_is_remembered(page):
    evaluated(page, 2)
    assert page.only_class is None
    rows = [row | {"prediction": "x"} for row in predictions("classes").rows]
    page.latest.file = lambda step: replace(predictions("classes"), step=step, rows=rows)
    evaluated(page, 4)
    assert page.only_class == "x"


def history(*accuracies: float) -> list[dict[str, float]]:
    return [
        {"step": 10 * number, "epoch": number, "accuracy": accuracy}
        for number, accuracy in enumerate(accuracies, start=1)
    ]


def test_the_best_evaluation_is_said_in_words():
    for records, best, options, stopped, expected in (
        (history(0.5, 0.861, 0.8, 0.7, 0.7), 20, {"epochs": 10, "patience": 3}, True,
         ["epoch 2 of 10 (accuracy 0.8610)", "stopped early: no improvement in 3 evaluations"]),
        (history(0.5, 0.6, 0.7), 30, {"epochs": 3}, False, [
            "epoch 3 of 3 (accuracy 0.7000)",
            "the last epoch was the best: more may help (train.epochs=6)"]),
        ([], None, {}, False, []),
    ):  # fmt: skip
        options = TrainOptions(**options)
        assert verdict(records, best, options, "accuracy", stopped_early=stopped) == expected


# A run beside a bag of words on the same rows: who is better, and what is not compared.

NOISE = random.Random(0)
OF_LABELS = ("bad", "fine", "good")


def rows_of(kind, count, hidden=0.0):
    """Return texts whose word is their label, but for a share of them."""
    rows = []
    for n in range(count):
        label = n % 3
        seen = label if NOISE.random() >= hidden else NOISE.randrange(3)
        text = f"the film {n % 7} was {OF_LABELS[seen]}"
        rows.append(Example(text, None, float(label) if kind == "numbers" else OF_LABELS[label]))
    return rows


def data_of(kind, train, rows):
    task = parse_task("regression" if kind == "numbers" else "classification")
    return RunData(task, (), train, rows, DataOptions())


def predicted(kind, rows, right, metric=""):
    """Return the predictions of a run of which a share is right."""
    outcomes = []
    for n, row in enumerate(rows):
        label = row.label if n < right * len(rows) else rows[n - 1].label
        own = {"id": n, "texts": [row.text], "label": row.label, "prediction": label}
        outcomes.append(own | ({"score": 0.5} if kind == "classes" else {}))
    return PredictionFile(kind, "task", 1, data_hash(rows), metric, OF_LABELS, outcomes)


@pytest.mark.parametrize(
    ("kind", "hidden", "right", "told"),
    [
        ("classes", 0.6, 1.0, "adapter: better, +"),
        ("classes", 0.0, 1.0, "adapter: not shown to be better, +0.000"),
        ("classes", 0.0, 0.4, "adapter: worse, -"),
        ("numbers", 0.6, 1.0, "adapter: better, +"),
    ],
)
def test_who_is_better(kind, hidden, right, told):
    train, rows = rows_of(kind, 90), rows_of(kind, 90, hidden)
    metric = "pearson" if kind == "numbers" else "macro_f1"
    own = predicted(kind, rows, right, metric)
    found = compare_with_words(data_of(kind, train, rows), rows, own)
    assert found.lines[1].startswith(told), found.lines
    assert f"has {metric} {found.value:.4f} on the same 90 rows" in found.lines[0]
    assert found.low <= found.difference <= found.high
    signs = {"difference": -found.difference, "low": -found.high, "high": -found.low}
    by_loss = replace(found, score="mse", **signs)
    assert by_loss.lines[1].partition(",")[0] == found.lines[1].partition(",")[0]


def test_what_is_not_compared(monkeypatch):
    monkeypatch.setattr(word_baseline, "_STEPS", 1)  # it does not converge, of which nobody is told
    train, rows = rows_of("classes", 30), rows_of("classes", 12)
    data, own = data_of("classes", train, rows), predicted("classes", rows, 1.0)
    few = compare_with_words(data, rows, own)
    assert few.lines[1].endswith(", of too few rows to compare")
    one = [replace(each, label="good") for each in train]
    assert "one class" in compare_with_words(data_of("classes", one, rows), rows, own).skipped
    monkeypatch.setattr(word_baseline, "MOST_FITTED", 29)
    assert compare_with_words(data, rows, own).lines == (
        "no bag of words was fitted:",
        "30 training rows, 784 characters, 3 classes are too many",
    )
    assert compare_with_words(data, rows[1:], own) is None  # predictions of other rows


def test_pages_take_at_most_a_twentieth_of_the_time(page, monkeypatch):
    now = [0.0]
    made: list[float] = []

    def write(folder: Path, live: bool = False) -> None:
        assert live
        made.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr(running, "write_page", write)
    monkeypatch.setattr(running.time, "perf_counter", lambda: now[0])
    page.began = 0.0
    while now[0] < 400:
        now[0] += 1
        evaluated(page, 2, best=False)
        page.flush()
        page.flush()
    assert made[0] == 20
    assert 8 <= len(made) <= 10
    assert page.spent <= 0.05 * now[0]
