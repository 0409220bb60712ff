"""`ah.train` is the command of the same name, on files or on rows that are in memory."""

import datetime
import json
import re
from pathlib import Path
from typing import Any

import datasets
import numpy
import pandas
import pytest
import torch

import adapterhub as ah
from adapterhub.config.yaml import load_yaml
from adapterhub.errors import AdapterhubError, ConfigError, DataError, OutputError
from adapterhub.files.native import Saved
from tests.kit.data import write_json_lines
from tests.kit.runs import adapter_bytes
from tests.kit.selection import long_table

WORDS = ["the", "film", "plot", "cast", "end", "music", "scene", "story", "pace", "joke"]
ROWS = [
    {"text": f"{('bad', 'good')[n % 2]} {WORDS[n % 10]} {n}", "label": ("neg", "pos")[n % 2]}
    for n in range(40)
]
FORMS: dict[str, Any] = {
    "list": ROWS,
    "generator": ROWS,
    "columns": {name: [row[name] for row in ROWS] for name in ("text", "label")},
    "tuples": [(row["text"], row["label"]) for row in ROWS],
    "pandas": pandas.DataFrame(ROWS),
    "dataset": datasets.Dataset.from_list(ROWS),
    "splits": {"train": ROWS},
    "dataset dict": datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)),
    "arrow": datasets.Dataset.from_list(ROWS).data.table,
}


def named(value: Any) -> str:
    """Return a short name of a case, which is the same in each process."""
    return re.sub(r"\W+", "-", str(value))[:60]


def trained(backbone: Path, output: Path, **options: Any) -> ah.Adapter:
    given = {"data": ROWS, "steps": 2, "quiet": True} | options
    return ah.train(backbone, output=output, **given)


@pytest.fixture(scope="module")
def of_a_file(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("file")
    trained(backbone, folder / "run", data=write_json_lines(folder / "rows.jsonl", ROWS))
    return adapter_bytes(folder / "run")


@long_table("form", FORMS, 3)
def test_rows_in_memory_train_as_those_of_a_file(backbone, of_a_file, tmp_path, form):
    data = iter(FORMS[form]) if form == "generator" else FORMS[form]
    opened = trained(backbone, tmp_path / "mine", data=data)
    assert adapter_bytes(tmp_path / "mine") == of_a_file
    assert str(opened.predict("a good film").label) in opened.labels == ("neg", "pos")
    assert len(repr(opened).splitlines()) == 1
    assert "'mine'" in repr(opened)
    source = load_yaml(tmp_path / "mine" / "recipe.yaml")["data"]["train"]
    assert Path(source).exists()  # so that the run can be repeated


@pytest.mark.parametrize(
    "options",
    [
        {"method": "lora(rank=2)", "dtype": torch.float32, "train.schedule": "cosine",
         "eval": ROWS[:6], "test": ROWS[6:9], "batch_size": 8},
        {"method": ah.LoRA(rank=2), "dtype": "float32", "train__schedule": "cosine",
         "lr": 1e-3, "batch_size": 8, "max_length": 9, "label": "label", "text": "text"},
        {"method": ah.LoRA, "dtype": "auto", "train": {"schedule": "cosine", "batch_size": 8},
         "labels": ["neg", "pos"], "seed": 3, "name": "other", "task": "classification"},
        {"method": ["lora(rank=2)", "prefix(length=2)"], "epochs": 1, "steps": None,
         "per_device_train_batch_size": 8, "train.schedule": "cosine", "eval": "none"},
    ],
    ids=named,
)  # fmt: skip
def test_the_words_of_the_command_are_arguments(backbone, tmp_path, options):
    opened = trained(backbone, tmp_path / "run", **options)
    assert opened.predict("a good film").label in ("neg", "pos")
    assert Saved.at(tmp_path / "run" / "adapter").manifest.name == options.get("name", "run")
    recipe = load_yaml(tmp_path / "run" / "recipe.yaml")
    assert (recipe["train"]["schedule"], recipe["train"]["batch_size"]) == ("cosine", 8)
    assert recipe["seed"] == options.get("seed", 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epoch": 1}, "did you mean 'train.epochs'"),
        ({"learning_rte": 1}, "train.learning_rate"),
        ({"rank": 8}, r"method='lora\(rank=8\)'"),
        ({"method": "lroa"}, "lora"),
        ({"task": "clasification"}, "classification"),
        ({"device": "cuda"}, "CUDA_VISIBLE_DEVICES"),
        ({"dtype": "float8"}, "bf16"),
        ({"data": []}, "no rows"),
        ({"data": [1, 2]}, "row 0: int"),
        ({"data": None}, "data is missing"),
        ({"data": {"text": ["a"], "label": []}}, "the columns have"),
        ({"data": {"text": "a", "label": "b"}}, "neither columns nor splits"),
        ({"data": [{"text": {1}, "label": "a"}]}, "row 0"),
        ({"train": ROWS}, "given twice"),
    ],
    ids=named,
)
def test_a_wrong_argument_names_the_right_one(backbone, tmp_path, options, words):
    with pytest.raises(AdapterhubError, match=words):
        trained(backbone, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_cells_of_other_types_are_their_texts_and_a_run_has_a_folder(
    backbone, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    odd = [datetime.date(2026, 11, 30), numpy.int64(3), Path("a/b.txt"), numpy.array([1, 2])]
    rows = [{**row, "other": odd[n % len(odd)]} for n, row in enumerate(ROWS)]
    ah.train(backbone, rows, steps=1, quiet=True)
    recipe = tmp_path / "runs" / "rows" / "recipe.yaml"
    kept = Path(load_yaml(recipe)["data"]["train"]).read_text(encoding="utf-8")
    assert [json.loads(line)["other"] for line in kept.splitlines()[:4]] == [
        "2026-11-30", 3, "a/b.txt", [1, 2]
    ]  # fmt: skip
    ah.train(recipe=recipe, steps=1, quiet=True, output="mine")
    with pytest.raises(OutputError, match="runs/rows exists"):  # the recipe names it
        ah.train(recipe=recipe, steps=1, quiet=True)


def test_a_model_is_no_name_of_a_backbone_and_an_empty_cell_no_label(backbone, tmp_path) -> None:
    model, _ = ah.load_backbone(backbone)
    with pytest.raises(ConfigError, match=r"(?s)backbone is .*ah\.attach"):
        ah.train(model, ROWS, output=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"(?s)loaded model.*ah\.load"):
        ah.open(model)
    rows = pandas.DataFrame([*ROWS, {"text": "no label", "label": None}])
    with pytest.raises(DataError, match="label"):
        trained(backbone, tmp_path / "a", data=rows)
    assert not (tmp_path / "a").exists()
    trained(backbone, tmp_path / "a", data=rows, skip_empty=True)


def test_an_output_that_exists_is_continued_or_refused(backbone: Path, tmp_path: Path) -> None:
    constant = {"train.schedule": "constant", "train.save_every": 2}
    trained(backbone, tmp_path / "run", **constant)
    with pytest.raises(OutputError, match="resume=True"):
        trained(backbone, tmp_path / "run", **constant)
    trained(backbone, tmp_path / "run", **constant | {"steps": 4}, resume=True)
    trained(backbone, tmp_path / "once", **constant | {"steps": 4})
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(tmp_path / "once")


def test_adapters_without_a_name_of_their_own_get_one(backbone: Path, tmp_path: Path) -> None:
    for name in ("first run", "lora,rank=2"):
        trained(backbone, tmp_path / name)
    model, _ = ah.load_backbone(backbone, task="classification", num_labels=2, device="cpu")
    names = [ah.load(model, path).name for path in sorted(tmp_path.glob("*/adapter"))]
    assert names == ["first-run", "lora-rank-2"]
    names = [ah.attach(model, method).name for method in ("lora", ah.LoRA, {"lora": {"rank": 2}})]
    assert names == ["default", "default-2", "default-3"]
    ah.adapters(model)["default-2"].save(tmp_path / "a")  # as old runs are called
    assert ah.load(model, tmp_path / "a").name == "default-2-2"


def test_a_dtype_as_people_write_it_and_what_is_unclear_is_refused(backbone: Path) -> None:
    for dtype in (torch.bfloat16, "torch.bfloat16", "BF16"):
        assert ah.load_backbone(backbone, dtype=dtype)[0].dtype == torch.bfloat16
    for unclear in (
        {"labels": "yes"}, {"labels": ["a", "b"], "num_labels": 3}, {"labels": 0},
        {"device": "gpu"}, {"device": 99}, {"dtype": "int3"},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            ah.load_backbone(backbone, task="classification", **unclear)
