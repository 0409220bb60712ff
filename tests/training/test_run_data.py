"""The data of a run, read from its recipe; where it is placed, and what is said before torch."""

from dataclasses import replace

import datasets
import pytest

from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.methods.common.base import parse_methods
from adapterhub.recipe.recipe import Recipe, TrainOptions, read
from adapterhub.tasks import parse_task
from adapterhub.tasks.common.infer_task import OF_LANGUAGE_MODELS
from adapterhub.training.run_data import RunData, check_recipe, placed, read_data
from tests.kit.data import ODD_FILES, write_tsv
from tests.kit.processes import run_commands


def test_without_evaluation_data_rows_are_held_out_or_none_are_evaluated(recipe_with, tmp_path):
    data = read_data(recipe_with("data.eval=null"))
    assert (len(data.train), len(data.evaluation)) == (52, 12)
    held_out = (
        "no evaluation data: 12 of 64 rows are held out, those of 8 of 42 different texts, "
        "in the same shares of each label"
    )
    assert held_out in data.notes
    assert read_data(recipe_with("data.eval=null", "seed=1")) != data
    # Those of tasks without classes are held out by row.
    rows = [(f"text number {i}", f"{i}.5") for i in range(100)]
    file = write_tsv(tmp_path / "n.tsv", rows, "text\tscore")
    words = (f"data.train={file}", "task=regression")
    data = read_data(recipe_with(*words, "data.eval=null"))
    assert (len(data.train), len(data.evaluation)) == (80, 20)
    assert "no evaluation data: 20 of 100 rows are held out" in data.notes
    assert data.options.label == "score"
    data = read_data(recipe_with("data.eval=none"))
    assert (len(data.train), data.evaluation) == (64, [])
    assert "no evaluation: the adapter has the tensors of the last step" in data.notes
    words = ("train.patience=2", "train.best_metric=accuracy", "data.eval_rows=5")
    with pytest.raises(ConfigError, match="need an evaluation") as error:
        read_data(recipe_with("data.eval=none", *words))
    assert len(error.value.offenders) == 3


def test_rows_are_limited_and_sampled_with_the_seed(recipe_with):
    data = read_data(recipe_with("data.eval_rows=5"))
    assert len(data.evaluation) == 5
    assert "evaluating on 5 of 22 rows, by data.eval_rows" in data.notes
    assert len(read_data(recipe_with("data.eval_rows=500")).evaluation) == 22
    first, second = (read_data(recipe_with("data.rows=9", "seed=3")) for _ in range(2))
    assert first.train == second.train
    assert (len(first.train), len(first.evaluation)) == (9, 22)


@pytest.mark.parametrize("has_split", [True, False])
def test_a_dataset_on_the_hub_is_evaluated_on_its_split_or_rows_are_held_out(
    recipe_with, monkeypatch, has_split
):
    def load(name: str, subset: str | None, split: str) -> datasets.Dataset:
        if split == "validation" and not has_split:
            raise ValueError("Unknown split")
        rows = range(100 if split == "train" else 7)
        return datasets.Dataset.from_dict(
            {"review": [f"{split} text {i}" for i in rows], "label": [i % 2 for i in rows]}
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = read_data(recipe_with("data.train=acme/reviews", "data.eval=null"))
    assert len(data.evaluation) == (7 if has_split else 20)
    assert len(data.train) == (100 if has_split else 80)
    assert data.options.text == "review"


def test_empty_cells_are_refused_or_skipped_and_counted(recipe_with, tmp_path):
    file = tmp_path / "e.csv"
    rows = "".join(f"text number {i},{'ab'[i % 2]}\n" for i in range(40))
    file.write_text(f"text,label\n{rows},a\nno label,\n")
    with pytest.raises(DataError, match="'text' is empty") as error:
        read_data(recipe_with(f"data.train={file}", "data.eval=null"))
    assert error.value.hint == "data.skip_empty=true skips the 2 with an empty cell"
    data = read_data(recipe_with(f"data.train={file}", "data.eval=null", "data.skip_empty=true"))
    assert len(data.train) + len(data.evaluation) == 40
    assert "2 of 42 rows with an empty text or label are skipped" in data.notes


def test_the_evaluation_file_is_read_as_it_is(recipe_with, tmp_path):
    """Columns are those of training; delimiter, encoding and header are found anew."""
    train, evaluation = tmp_path / "t.csv", tmp_path / "e.csv"
    train.write_text(
        "id;review;stars\n" + "".join(f"{i};good text {i};{i % 2}\n" for i in range(40))
    )
    evaluation.write_bytes("review,stars\ncaf\u00e9 was good,1\n".encode("cp1252"))
    data = read_data(recipe_with(f"data.train={train}", f"data.eval={evaluation}"))
    assert data.evaluation == [Example("caf\u00e9 was good", None, "1")]
    assert data.notes[0].startswith("t.csv: semicolon-separated, 40 rows")
    assert any(note.startswith("e.csv: comma-separated, cp1252") for note in data.notes)
    assert (data.options.text, data.options.label) == ("review", "stars")
    assert (data.options.delimiter, data.options.encoding, data.options.header) == (None,) * 3


def test_a_metric_that_the_task_lacks_is_refused(recipe_with):
    with pytest.raises(ConfigError, match=r"unknown metric 'acuracy'.*did you mean 'accuracy'"):
        read_data(recipe_with("train.best_metric=acuracy"))
    assert read_data(recipe_with("train.best_metric=matthews"))


OF_TASKS = {task: OF_LANGUAGE_MODELS for task in ("causal-lm", "preference")}


@pytest.mark.parametrize(("task", "method"), [*OF_TASKS.items(), ("classification", "lora")])
def test_a_recipe_without_a_method_gets_one_for_its_task(task, method):
    recipe = Recipe(backbone="b", task=task)
    data = RunData(parse_task(task), (), [], [], recipe.data)
    assert data.completed(recipe).method == method
    assert data.completed(replace(recipe, method="pfeiffer")).method == "pfeiffer"
    assert data.completed(replace(recipe, from_="adapter")).method is None
    assert parse_methods(method)


def test_a_run_keeps_the_method_that_it_began_with(tmp_path):
    """A release with another default resumes a run with the run's own method."""
    (tmp_path / "checkpoints/last").mkdir(parents=True)
    (tmp_path / "checkpoints/last/state.safetensors").touch()
    data = DataOptions(train="rows.csv")
    recipe = Recipe(backbone="b", task="causal-lm", output=str(tmp_path), data=data)
    began = replace(recipe, method="lora").to_yaml()
    (tmp_path / "recipe.yaml").write_text(began, encoding="utf-8")
    assert check_recipe(recipe, resume=True, dry=True).method == "lora"
    assert check_recipe(recipe, resume=False, dry=True).method is None


@pytest.mark.parametrize("odd", ODD_FILES, ids=lambda odd: odd.name)
def test_a_bare_file_is_read_right_or_refused_with_what_to_do(odd, tmp_path):
    if odd.name.endswith(".xlsx"):
        pytest.importorskip("openpyxl")
    odd.write(tmp_path / odd.name)
    recipe = read(None, flags={"data": {"train": str(tmp_path / odd.name)}, "output": "out"})
    if odd.refused:
        with pytest.raises(DataError) as refusal:
            read_data(recipe)
        assert [word for word in odd.refused if word not in str(refusal.value)] == []
        return
    data = read_data(recipe)
    assert data.task.name == odd.task
    assert {name: getattr(data.options, name) for name in odd.columns} == odd.columns
    assert not odd.labels or data.labels == odd.labels
    notes = "\n".join(data.notes)
    assert [word for word in odd.said if word not in notes] == []
    told = "\n".join(data.chosen)
    assert "--backbone ID" in told
    assert (f"task: {odd.task}, for " in told) == (odd.task != "classification")
    assert len(data.train) + len(data.evaluation) > 30


RECIPE = Recipe(backbone="b", method="lora", output="out")


def with_train(**options: object) -> Recipe:
    return replace(RECIPE, train=replace(TrainOptions(), **options))  # type: ignore[arg-type]


def test_processes_that_compute_together_are_several(monkeypatch):
    """A recipe that says nothing is sharded if the launcher shards."""
    assert placed(RECIPE) == RECIPE
    assert placed(with_train(shard=False)).train.shard is None
    options = [{"shard": True}, {"tensor_parallel": True}]
    for option in options:
        with pytest.raises(ConfigError, match="there is only one") as error:
            placed(with_train(**option))
        assert "torchrun" in error.value.hint
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert placed(with_train(**options[0])).train.shard is True
    assert placed(with_train(**options[1])).train.tensor_parallel is True
    for name, value in (("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2")):
        monkeypatch.setenv(name, value)
    assert placed(RECIPE).train.shard is True
    assert placed(with_train(shard=False)).train.shard is None


@pytest.mark.parametrize(
    ("how", "others"),
    [({"shard": True}, {"quantize": "int8"}),
     ({"tensor_parallel": True, "shard": False}, {"quantize": "nf4", "new_tokens": ("<a>",)})],
)  # fmt: skip
def test_every_option_that_does_not_know_processes_together_is_named(how, others, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    train = {"optimizer": "adamw-8bit", "mixed_precision": "fp16"}
    with pytest.raises(ConfigError, match="these options") as error:
        placed(replace(with_train(**how, **train), **others))
    named = [line.partition(":")[0].partition("=")[0] for line in error.value.offenders]
    assert named == [*(f"train.{name}" for name in train), *others]
    assert placed(with_train(shard=True, mixed_precision="bf16")).train.shard is True


# What is said of a run before torch is imported.


ROWS = "text\tlabel\n" + "good film\tyes\nbad film\tno\n" * 4
FILES = {
    "good.tsv": ROWS,
    "empty.tsv": "",
    "labels.tsv": ROWS.replace("yes", "other"),
}
GOOD = {
    "--backbone": "sentence-transformers/all-MiniLM-L6-v2",
    "--train": "good.tsv",
    "--eval": "good.tsv",
    "--output": "run",
}
REFUSED = {
    "a missing training file": ({"--train": "gone.tsv"}, "no such file: 'gone.tsv'"),
    "an empty file": ({"--train": "empty.tsv"}, "empty.tsv is empty"),
    "a label that training lacks": ({"--eval": "labels.tsv"}, "other"),
    "an unknown method": ({"--method": "lorra"}, "did you mean 'lora'"),
    "an option of a wrong type": ({"--method": "lora(rank=big)"}, "lora.rank is 'big'"),
    "an unknown task": ({"--task": "clasification"}, "did you mean 'classification'"),
    "an option out of range": ({"train.epochs=0": None}, "epochs: 0"),
    "a missing backbone": ({"--backbone": "./nothing"}, "no backbone './nothing'"),
    "a folder without a model": ({"--backbone": "."}, "lacks config.json"),
    "an unknown dtype": ({"dtype=fp8": None}, "fp8"),
    "an output folder in use": ({"--output": "."}, "exists"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preflight")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    words = {
        case: ["train", *(w for pair in (GOOD | changes).items() for w in pair if w is not None)]
        for case, (changes, _) in REFUSED.items()
    }
    results = run_commands(words, folder)
    assert not (folder / "run").exists()
    return results


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_said_before_torch_is_imported(case, said):
    code, output, slow = said[case]
    assert code == 2, output
    assert REFUSED[case][1] in output
    assert output.count("error: ") == 1
    assert slow == []
