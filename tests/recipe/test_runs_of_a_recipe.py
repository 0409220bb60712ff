"""The output folder of a run; the runs of a sweep, and recipes of stages."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.config.yaml import dump_yaml
from adapterhub.errors import ConfigError, OutputError
from adapterhub.files.atomic import replace_file
from adapterhub.pages.page import PAGE
from adapterhub.recipe.output_folder import LOCK, check_output, hold_output, new_output
from adapterhub.recipe.sweep import MOST_NAME, parse_sweep, read_staged

# The output folder: refusals and lock


def test_an_output_folder_is_checked_before_any_work(tmp_path, monkeypatch):
    check_output(tmp_path / "new" / "run", resume=False)
    check_output(tmp_path, resume=False)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is a file"):
        check_output(tmp_path / "file", resume=True)
    with pytest.raises(OutputError, match="exists") as error:
        check_output(tmp_path, resume=False)
    assert "--resume" in error.value.hint
    (tmp_path / "checkpoints" / "best").mkdir(parents=True)
    with pytest.raises(OutputError, match="no last checkpoint") as error:
        check_output(tmp_path, resume=True)
    assert error.value.offenders == ("checkpoints/best", "file")
    # An interrupted replacement, which the next read completes.
    (tmp_path / "checkpoints" / ".adapterhub-0123-old").mkdir()
    check_output(tmp_path, resume=True)
    (tmp_path / "checkpoints" / ".adapterhub-0123-old").rename(tmp_path / "checkpoints" / "last")
    check_output(tmp_path, resume=True)
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "file"]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OutputError, match="is not writable"):
        check_output(tmp_path / "new" / "run", resume=False)


@pytest.mark.parametrize(
    ("train", "recipe", "folder"),
    [
        ("a/rows.csv.gz", "", "runs/rows"),
        ("hf:imdb#500", "", "runs/hf-imdb"),
        (["b.csv", "c.csv"], "", "runs/b"),
        (None, "data: {train: [{path: d.jsonl, weight: 2}, e.csv]}", "runs/d"),
        (None, "data: f.csv", "runs/f"),
        (None, "seed: 3", "runs/recipe"),
        ("a.csv", "output: mine", None),
        ("../part-*.parquet", "", "runs/part"),
        ("/data/**/*.csv", "", "runs/data"),
        ("*.csv", "", None),
        ("_a-.csv", "", "runs/_a-"),
        ("..", "", None),
        (None, "", None),
    ],
)
def test_a_run_is_named_after_its_first_data(train, recipe, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    file = "recipe.yaml" if recipe else None
    assert new_output(file, (), train) == folder
    if folder:
        for name in (folder, f"{folder}-2"):
            (tmp_path / name).mkdir(parents=True)
        assert new_output(file, (), train) == f"{folder}-3"
        assert new_output(file, (), train, resume=True) == f"{folder}-2"
        assert new_output(file, ["output=other"], train) is None


def test_an_empty_folder_is_removed_if_this_run_created_it(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("mine", "new"):
        with hold_output(tmp_path / name, resume=False):
            assert os.listdir(tmp_path / name) == [LOCK]
    assert os.listdir(tmp_path) == ["mine"]


@pytest.mark.parametrize("name", [PAGE, "any thing"])
def test_a_file_that_a_killed_process_has_not_finished_is_removed(tmp_path, name, monkeypatch):
    leftover = f".{name}.0123abcd.new"
    for resume in (False, True):
        (tmp_path / leftover).write_bytes(b"{")
        check_output(tmp_path, resume)
        with hold_output(tmp_path, resume):
            assert os.listdir(tmp_path) == [LOCK]
    # One that a process writes now, such as `adapterhub report`, stays.
    replace = os.replace

    def hold(*places):
        with hold_output(tmp_path, resume=False):
            assert any(each.endswith(".new") for each in os.listdir(tmp_path))
        replace(*places)

    monkeypatch.setattr(os, "replace", hold)
    replace_file(tmp_path / name, b"1")
    assert sorted(os.listdir(tmp_path)) == sorted([LOCK, name])


# Sweeps and stages


def test_the_last_option_changes_fastest():
    runs = parse_sweep(["method=lora,pfeiffer", "train.learning_rate=1e-3,1e-4"])
    assert [run.words for run in runs] == [
        ("method=lora", "train.learning_rate=1e-3"),
        ("method=lora", "train.learning_rate=1e-4"),
        ("method=pfeiffer", "train.learning_rate=1e-3"),
        ("method=pfeiffer", "train.learning_rate=1e-4"),
    ]
    assert [runs[0].name, runs[3].name] == [
        "lora,learning_rate=1e-3",
        "pfeiffer,learning_rate=1e-4",
    ]


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("method=lora(rank=4, alpha=8),mam", ["lora(rank=4, alpha=8)", "mam"]),
        ("method=[prefix, lora],lora", ["[prefix, lora]", "lora"]),
        ("method={lora: {rank: 4, alpha: 8}}", ["{lora: {rank: 4, alpha: 8}}"]),
        ("data.text='a, b',c", ["'a, b'", "c"]),
        ("seed=0, 1 ,2", ["0", "1", "2"]),
        ("task=causal-lm(a=')'),x", ["causal-lm(a=')')", "x"]),
    ],
)
def test_commas_inside_brackets_and_quotes_belong_to_a_value(word, values):
    key = word.partition("=")[0]
    assert [run.words for run in parse_sweep([word])] == [(f"{key}={v}",) for v in values]


def test_options_without_values_and_repetitions_are_refused():
    for word in ("method", "method=", "=lora", "method=lora,", "seed=,1"):
        with pytest.raises(ConfigError, match="is not an option with values"):
            parse_sweep([word])
    with pytest.raises(ConfigError) as error:
        parse_sweep(["seed=0,0", "method=lora", "method=mam"])
    assert error.value.offenders == ("method is given twice", "seed has the value 0 twice")


values = st.text(st.characters(exclude_characters="()[]{}'\",=", min_codepoint=33), min_size=1)


@given(st.lists(values, min_size=1, max_size=6, unique=True), st.integers(1, 3))
def test_every_name_is_the_plain_name_of_one_folder(texts, others):
    texts = list({text.strip(): None for text in texts if text.strip()}) or ["x"]
    seeds = ",".join(map(str, range(others)))
    runs = parse_sweep([f"data.text={','.join(texts)}", f"seed={seeds}"])
    names = [run.name for run in runs]
    assert len(runs) == len(texts) * others
    assert len({name.lower() for name in names}) == len(names)
    assert all(name.isascii() and "/" not in name and not name.startswith(".") for name in names)
    assert all(len(name) <= MOST_NAME + 4 for name in names)


COMMON = {"backbone": "b", "method": {"lora": {"rank": 4}}, "output": "runs/x", "train": {"lr": 1}}
STAGES = [
    {"name": "first", "task": "masked-lm", "data": {"train": "a.txt"}, "train": {"epochs": 2}},
    {"name": "second", "from": "first", "method": "ia3", "data": {"train": "b.tsv"}, "seed": 3},
]


def staged(folder, *words, **changed):
    """Write a recipe, and read it."""
    (folder / "recipe.yaml").write_text(dump_yaml({**COMMON, "stages": STAGES, **changed}))
    return read_staged(folder / "recipe.yaml", words)


def test_a_stage_overrides_what_is_around_it(tmp_path):
    read = staged(tmp_path, "train.epochs=5", "data.rows=9")
    first, second = read.stages["first"], read.stages["second"]
    assert (first.task, first.method, first.from_) == ("masked-lm", {"lora": {"rank": 4}}, None)
    assert (second.task, second.method, second.seed) == (None, "ia3", 3)
    assert second.from_ == "./runs/x/first/adapter"
    for recipe in (first, second):
        assert (recipe.backbone, recipe.train.learning_rate) == ("b", 1)
        assert (recipe.train.epochs, recipe.data.rows) == (5, 9), "the command line is for all"
    assert (first.output, second.output) == ("runs/x/first", "runs/x/second")
    assert read.starts == {"first": (), "second": ("first",)}


def test_what_is_written_reads_the_same(tmp_path):
    read = staged(tmp_path, "train.epochs=5", "method=[bitfit, ia3]")
    (tmp_path / "again.yaml").write_text(read.to_yaml())
    again = read_staged(tmp_path / "again.yaml")
    assert again.stages == read.stages
    (tmp_path / "plain.yaml").write_text(dump_yaml(COMMON))
    assert read_staged(tmp_path / "plain.yaml") is read_staged(None, ["seed=1"]) is None
    assert all(recipe.method == ["bitfit", "ia3"] for recipe in again.stages.values())


def test_a_stage_may_name_no_method_and_other_names_stay_references(tmp_path):
    later = {**STAGES[0], "name": "later"}
    for stages, start in (
        ([STAGES[0], {**STAGES[1], "from": "hf:someone/polite"}], "hf:someone/polite"),
        ([{**STAGES[1], "from": "later"}, later], "later"),  # only an earlier stage is one
    ):
        assert staged(tmp_path, stages=stages).stages["second"].from_ == start
    stages = [STAGES[0], {**STAGES[1], "method": None}]
    assert staged(tmp_path, method=None, stages=stages).stages["second"].method is None


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([], "expected: a list of recipes"),
        (["first"], "stage 1: the name is None"),
        ([{"name": "../up"}], "the name is '../up'"),
        ([{"name": "adapter"}], "the name is 'adapter'"),
        ([STAGES[0], {"name": "first"}], "two stages are named 'first'"),
        ([{**STAGES[0], "output": "x"}], "stage 'first' has an output"),
        ([{**STAGES[0], "epohcs": 1}], "stage 'first': "),
        ([{"name": "first"}], "data.train is missing"),
    ],
)
def test_invalid_stages(stages, expected, tmp_path):
    with pytest.raises(ConfigError) as error:
        staged(tmp_path, stages=stages)
    assert expected in str(error.value)
    with pytest.raises(ConfigError, match="no output"):
        staged(tmp_path, output=None)
