"""Predictions of `ah.open`, of every task and form of input, and of jobs on Parquet files."""

import json
from typing import Any

import datasets
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError, DataError, OutputError
from adapterhub.inference import table_job
from adapterhub.inference.inputs import items_of
from adapterhub.inference.open import open_adapter
from adapterhub.inference.table_job import ONLY, TableJob, TableOutput, TableWorker, plan_table
from adapterhub.loop.report import Reporter
from adapterhub.training.run import run
from tests.kit.runs import TABLE_ROWS, routed, write_table
from tests.kit.selection import long_table
from tests.kit.session import refused, succeeded
from tests.kit.task_cases import CASES


def close(found: Any, expected: Any) -> bool:
    """Return whether nested values are equal, numbers up to the rounding of padded batches."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[k], expected[k]) for k in found)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(close, found, expected))
    return found == (pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else expected)


@pytest.fixture
def trained(recipe_with, backbones, tmp_path, monkeypatch):
    """Return a function that trains an adapter for one step; it returns data and folder."""

    def train(task: str):
        case = CASES[task]
        data = case.data(tmp_path)
        words = (f"task={case.task}", f"data.train={data}", "data.eval=none", "method=lora(rank=2)",
                 "train.max_steps=1", "train.batch_size=64", "train.tensorboard=false",
                 "train.report=false")  # fmt: skip
        run(recipe_with(*words, folder=backbones(case.backbone)), Reporter())
        monkeypatch.chdir(data if data.is_dir() else tmp_path)  # files are named relative to it
        return data, tmp_path / "run"

    return train


@long_table("task", sorted(CASES), 6, nightly=2)
def test_every_way_in_gives_the_same_predictions(task, trained, adapterhub, tmp_path):
    data, folder = trained(task)
    first, *pairs = (word for word in CASES[task].asked(data) if word != "--pair")
    model = ah.open(folder)
    one = model.predict((first, *pairs) if pairs else first)
    assert close([p.as_dict() for p in model.predict([(first, *pairs)])], [one.as_dict()])
    out = succeeded(adapterhub("predict", folder, *CASES[task].asked(data), "--json"))
    assert close({model.task.input_name: json.loads(out)[model.task.input_name], **one.as_dict()},
                 json.loads(out))  # fmt: skip
    table = tmp_path / "out.jsonl"
    succeeded(adapterhub("predict", folder, data, "--output", table))
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    if task != "question-answering":  # SQuAD's JSON has no rows
        for form in (rows, pd.DataFrame(rows), datasets.Dataset.from_list(rows)):
            found = [p.columns() for p in model.predict(form)]
            for row, columns in zip(rows, found, strict=True):
                assert not row.pop("truncated", 0)
                assert close([*row.values()][-len(columns) :], [*columns.values()])
    if task == "embedding":
        assert np.allclose(model.embed([first]), one.vectors, atol=1e-5)
        assert model.embed(first).ndim == 1
    else:
        with pytest.raises(ConfigError, match="has no vectors"):
            model.embed([first])
    given = (first, *pairs)
    if CASES[task].key == "generated" and task != "speech-recognition":  # by CTC, in the case
        text = model.generate(given)
        assert "".join(model.generate(given, stream=True)) == text == one.text
        (short,) = model.generate([given], max_new_tokens=1)
        assert text.startswith(short)
        return
    with pytest.raises(ConfigError, match="does not generate"):
        model.generate(given)
    words = ("predict", folder, *CASES[task].asked(data), "--top-p", "0.5")
    refused(adapterhub(*words), "does not generate")


@pytest.fixture(scope="module")
def classifier(two_adapters) -> Any:
    return ah.open(two_adapters["mood"].reference)


TEXTS = ["the movie was good", "the plot was very bad"]
ROWS = [{"id": n, "Text": text} for n, text in enumerate(TEXTS)]


def test_many_forms_of_texts_and_rows(classifier):
    one = classifier.predict(TEXTS[0])
    assert classifier.labels == ("neg", "pos")
    assert classifier.max_length == classifier.setting.max_length
    assert one.probability == one.scores[one.label] == max(one.scores.values())
    of_labels = {"probability of neg", "probability of pos"}
    assert one.columns(every=True).keys() == {"label", "probability"} | of_labels
    expected = [classifier.predict(text).label for text in TEXTS]
    frames = pd.DataFrame(ROWS), pd.Series(TEXTS), np.array(TEXTS)
    tables = pa.Table.from_pylist(ROWS), datasets.Dataset.from_list(ROWS)
    for given in (TEXTS, iter(TEXTS), [(text,) for text in TEXTS], ROWS, *frames, *tables):
        found = [prediction.label for prediction in classifier.predict(given)]
        assert found == expected, type(given)
    assert classifier.predict(ROWS[0]).label == expected[0]
    assert classifier.predict([]) == classifier.predict(pd.DataFrame()) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("one", "two"), "2 texts for one prediction; this adapter reads 1"),
        (3, "cannot predict on int"),
        ([["a", 1]], "cannot predict on list"),
        ({"txt": "a"}, "rows with the columns of the training data: 'text'"),
        ([{"text": "a"}, {"text": None}], "row 1: 'text' is missing"),
        (pd.DataFrame({"text": ["a", float("nan")]}), "row 1: 'text' is missing"),
        (["a", {"text": "b"}], "item 1: dict"),
        ([{"role": "user", "content": "a"}], "takes no chats"),
    ],
)
def test_other_inputs_are_refused(classifier, given, expected):
    with pytest.raises(DataError) as error:
        classifier.predict(given)
    assert expected in str(error.value)


def test_chats_and_options_of_generation(trained):
    model = ah.open(trained("causal-lm")[1])
    chat = [{"role": "user", "content": "the film was bad"}]
    assert model.predict(chat).text == model.predict([chat, chat])[1].text
    assert model.generate(chat) == model.generate("the film was bad")
    assert "".join(model.generate(chat, stream=True)) == model.generate(chat)
    torch.manual_seed(0)
    sampled = {model.generate(chat, temperature=9.0, max_new_tokens=8) for _ in range(4)}
    assert len(sampled) > 1
    assert model.generate(chat, temperature=0) == model.generate(chat)
    pieces = model.generate(chat, stream=True, max_new_tokens=30, temperature=5.0)
    assert next(pieces)
    pieces.close()  # ends the thread
    wrong = {"max_new_tokens": 0, "temperature": -1.0, "top_p": 0.0, "beams": 0}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"{name} is {value}"):
            model.generate(chat, **{name: value})
    for more, prompt in (({"beams": 2}, chat), ({}, [chat, chat])):
        with pytest.raises(ConfigError, match="one prompt"):
            model.generate(prompt, stream=True, **more)


def test_objects_of_arrow_have_their_own_keys() -> None:
    """A null that Arrow fills in for a key of another row is no value of this one."""
    rows = [
        {"text": "a", "about": {"city": "Oslo", "tags": [{"x": 1}]}},
        {"text": "b", "about": {"year": 1, "tags": [{"y": 2}]}},
        {"text": "c", "about": None},
    ]
    made = datasets.Dataset.from_list(rows)
    for given in (pa.Table.from_pylist(rows), made.data.table, made, made.select([0, 1, 2])):
        assert items_of(given) == rows
    assert items_of(made.select([2, 0])) == [rows[2], rows[0]]


# Jobs on Parquet files: all columns, each row by its adapter, strict about the input.


def test_each_row_is_predicted_by_the_adapter_that_it_names(two_adapters, tmp_path):
    planned = plan_table(routed(two_adapters, write_table(tmp_path)))
    assert sum(part.rows for part in planned.parts) == TABLE_ROWS
    assert len(planned.parts) == 4 + 6
    worker = TableWorker(planned.job)
    rows = pa.concat_tables([worker.predict(part) for part in planned.parts]).to_pylist()
    assert [row["id"] for row in rows] == list(range(TABLE_ROWS))
    assert list(rows[0]) == ["id", "text", "adapter", "prediction"]
    for name, source in two_adapters.items():
        own = [row for row in rows if row["adapter"] == name]
        alone = open_adapter(source.reference).predict([Example(row["text"]) for row in own])
        for row, prediction in zip(own, alone, strict=True):
            found, expected = json.loads(row["prediction"]), prediction.as_dict()
            assert found["label"] == expected["label"]
            assert found["scores"] == pytest.approx(expected["scores"], abs=1e-5)


def test_what_is_wrong_with_the_input_is_told(two_adapters, tmp_path):
    source = write_table(tmp_path)
    with pytest.raises(DataError, match="not given") as error:
        plan_table(routed({"mood": two_adapters["mood"]}, source))
    assert error.value.offenders == ("'thing': 30 rows",)
    with pytest.raises(DataError, match="no column 'who'"):
        plan_table(TableJob(source, two_adapters, route="who"))
    with pytest.raises(DataError, match="has a column 'text' already"):
        plan_table(TableJob(source, {ONLY: two_adapters["mood"]}, into="text"))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="other columns"):
        plan_table(routed(two_adapters, source))
    (tmp_path / "c.parquet").write_text("no")
    with pytest.raises(DataError, match="not a Parquet file"):
        plan_table(routed(two_adapters, source))


def test_an_invalid_row_and_a_node_with_another_release_are_refused(two_adapters, tmp_path):
    """By one adapter for all rows, with other names of the columns."""
    table = pa.table({"review": ["the film was bad", "a great movie", None]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=2)
    job = TableJob(str(tmp_path / "rows.parquet"), {ONLY: two_adapters["mood"]}, into="mood")
    planned = plan_table(job, text="review")
    worker = TableWorker(planned.job)
    for row in worker.predict(planned.parts[0]).to_pylist():
        assert json.loads(row["mood"])["label"] in ("neg", "pos")
    with pytest.raises(DataError) as error:
        worker.predict(planned.parts[1])
    assert error.value.offenders == ("row 1 of group 1: 'review' is missing",)
    with pytest.raises(ConfigError, match=r"started with 0\.0\.0"):
        TableWorker(job, 1, ("0.0.0", "."))


@pytest.fixture
def planned(two_adapters, tmp_path) -> table_job.PlannedTable:
    return plan_table(routed(two_adapters, write_table(tmp_path / "rows")))


def test_another_job_and_other_files_are_refused(two_adapters, planned, tmp_path):
    """One of other adapters, and one of other parts of the rows."""
    source = str(tmp_path / "rows" / "*.parquet")
    for _ in range(2):
        TableOutput(str(tmp_path / "out"), plan_table(routed(two_adapters, source)))
    swapped = dict(zip(two_adapters, reversed(two_adapters.values()), strict=True))
    others = [plan_table(routed(swapped, source))]
    write_table(tmp_path / "rows", group=7)
    for other in (*others, plan_table(routed(two_adapters, source))):
        with pytest.raises(OutputError, match="another job"):
            TableOutput(str(tmp_path / "out"), other)
    with pytest.raises(OutputError, match="not empty"):
        TableOutput(str(tmp_path / "rows"), planned)
    with pytest.raises(OutputError, match="one file in a bucket"):
        TableOutput("memory://bucket/out.parquet", planned)


def test_a_url(planned):
    memory = fsspec.filesystem("memory")
    try:
        output = TableOutput("memory://jobs/out", planned)
        output.write(planned.parts[1], pa.table({"id": [1] * planned.parts[1].rows}))
        again = TableOutput("memory://jobs/out", planned)
        assert planned.parts[1] not in again.missing
        assert len(again.missing) == len(planned.parts) - 1
        assert memory.exists("/jobs/out/part-000001.parquet")
    finally:
        memory.rm("/jobs", recursive=True)
