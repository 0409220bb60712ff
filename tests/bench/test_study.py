"""Studies from flags and from files, and the folder of a study."""

from dataclasses import replace

import pytest

from adapterhub.bench import study as studies
from adapterhub.bench.study import STUDY, keep_study, read_study
from adapterhub.errors import ConfigError, OutputError

FLAGS = {"backbone": "some/backbone", "data": {"train": "a/train.tsv"}, "output": "out"}


def test_a_study_is_read_as_it_was_written(tmp_path):
    study = read_study(None, [], FLAGS)
    assert study.bench.methods == studies.METHODS_COMPARED
    assert (study.baseline, list(study.tasks())) == ("lora", ["train"])
    methods = ("pfeiffer", "lora(rank=4)", {"lora": {"rank": 16}}, ["prefix", "lora"])
    bench = {"methods": methods, "seeds": 5, "budget": "90m", "rows": (50, 100), "test": "test.tsv"}
    study = read_study(None, ["train.batch_size=8", "bench.rates=3"], FLAGS, bench)
    path = tmp_path / "study.yaml"
    path.write_text(study.to_yaml())
    again = read_study(path)
    assert again.to_yaml() == study.to_yaml()
    assert again.bench.rates == 3
    assert again.recipe.train.batch_size == 8
    assert list(again.labels()) == ["pfeiffer", "lora(rank=4)", "lora(rank=16)", "prefix+lora"]
    assert again.baseline == "pfeiffer", "the first one where the usual baseline is missing"


def test_tasks_differ_in_what_they_name_and_share_the_rest():
    tasks = {
        "sst2": {"data": {"train": "sst2.tsv"}, "test": "sst2-test.tsv"},
        "stsb": {"data": {"train": "stsb.tsv", "pair": "sentence2"}, "task": "regression"},
    }
    study = read_study(None, ["train.batch_size=8"], {"backbone": "b"}, {"tasks": tasks})
    recipes = study.tasks()
    assert [recipe.data.train for recipe in recipes.values()] == ["sst2.tsv", "stsb.tsv"]
    assert [recipe.task for recipe in recipes.values()] == [None, "regression"]
    assert {recipe.train.batch_size for recipe in recipes.values()} == {8}
    assert study.tests() == {"sst2": "sst2-test.tsv"}


@pytest.mark.parametrize(
    ("words", "bench", "expected"),
    [
        (["seed=3"], {}, "seed=3"),
        ([], {"seeds": 0, "rates": -1}, "rates: -1"),
        ([], {"methods": ()}, "methods: none"),
        ([], {"budget": "soon"}, "30m"),
        ([], {"rows": (1,)}, "rows: 1"),
        ([], {"ranks": (0, 4)}, "ranks: 0"),
        ([], {"methods": ("lora",), "recorded": ("other lora", "lora")}, "recorded: lora"),
        ([], {"recorded": ("other",), "baseline": "other"}, "not one of the methods"),
        ([], {"baseline": "mam", "methods": ("lora",)}, "not one of the methods"),
        (["bench.sedes=3"], {}, "seeds"),
    ],
)
def test_mistakes_say_what_to_type(words, bench, expected):
    with pytest.raises(ConfigError) as error:
        read_study(None, words, FLAGS, bench)
    assert expected in str(error.value)


@pytest.mark.parametrize("spec", ["from sst2-lora", " from  sst2-lora ", {"from": "sst2-lora"}])
def test_a_method_may_be_an_adapter_to_start_from(spec):
    assert studies.start_of(spec) == "sst2-lora"
    assert studies.method_label(spec) == "from sst2-lora"
    study = read_study(None, (), {"backbone": "b"}, {"methods": ("lora", spec)})
    assert list(study.labels()) == ["lora", "from sst2-lora"]
    others = ("lora", "from", "fromage", {"lora": {}}, {"lora": None}, {"from": 1, "lora": 2})
    assert {studies.start_of(other) for other in others} == {None}


@pytest.mark.parametrize(
    ("spec", "labels"),
    [
        ("lora", ["lora(rank=4, alpha=8)", "lora(rank=64, alpha=128)"]),
        ("lora(rank=16, alpha=16)", ["lora(rank=4, alpha=4)", "lora(rank=64, alpha=64)"]),
        ("lora(alpha=16)", ["lora(alpha=16, rank=4)", "lora(alpha=16, rank=64)"]),
        ({"dora": {"dropout": 0.1}},
         ["dora(dropout=0.1, rank=4, alpha=8)", "dora(dropout=0.1, rank=64, alpha=128)"]),
        ("rslora", ["rslora(rank=4)", "rslora(rank=64)"]),
        ("vera", ["vera(rank=4)", "vera(rank=64)"]),
        ("full", ["full"]),
        ("from sst2-lora", ["from sst2-lora"]),
    ],
)  # fmt: skip
def test_a_method_is_compared_at_ranks_with_one_scale(spec, labels):
    bench = {"methods": ("lora(sites=[all-linear])", spec), "ranks": (4, 64, 4)}
    study = read_study(None, (), FLAGS, bench).with_usual_method("dora")
    assert list(study.labels())[2:] == labels
    groups = studies.ranks_of({label: study.labels()[label] for label in labels})
    assert groups == ([dict(zip(labels, (4, 64), strict=True))] if len(labels) == 2 else [])


def test_without_methods_the_usual_one_is_compared_at_ranks(tmp_path):
    study = read_study(None, (), FLAGS, {"ranks": (2, 8)})
    found = study.with_usual_method("lora(rank=16, alpha=32)")
    (tmp_path / STUDY).write_text(found.to_yaml())
    again = read_study(tmp_path / STUDY, (), FLAGS, {"ranks": (2, 8)})
    assert again.with_usual_method("dora") == found
    assert list(found.labels()) == ["lora(rank=2, alpha=4)", "lora(rank=8, alpha=16)"]
    assert found.baseline == "lora(rank=2, alpha=4)"
    with pytest.raises(ConfigError, match="none of these methods has a rank: full, head"):
        replace(study, bench=replace(study.bench, methods=("full", "head"))).with_usual_method("")


def test_the_folder_of_a_study_may_be_moved_and_is_not_that_of_another(study, tmp_path):
    keep_study(study, tmp_path / "a")
    keep_study(study, tmp_path / "a")
    assert read_study(tmp_path / "a" / STUDY).to_yaml() == study.to_yaml()
    (tmp_path / "a").rename(tmp_path / "b")
    moved = replace(study, recipe=replace(study.recipe, output=str(tmp_path / "b")))
    assert keep_study(moved, tmp_path / "b").to_yaml() == moved.to_yaml()
    assert read_study(tmp_path / "b" / STUDY).recipe.output == str(tmp_path / "b")
    with pytest.raises(OutputError, match="another study"):
        keep_study(replace(study, bench=replace(study.bench, seeds=9)), tmp_path / "b")
