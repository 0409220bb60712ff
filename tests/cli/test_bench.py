"""`adapterhub bench`, the command that trains what it recommends, and `suggest`."""

import json
import shlex
import shutil
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import adapterhub as ah
from adapterhub import cli, ray_cluster
from adapterhub.bench import suggest
from adapterhub.bench.baselines import Constant
from adapterhub.bench.conduct import LocalEngine
from adapterhub.bench.results import study_results
from adapterhub.bench.study import read_study
from adapterhub.cli import _study
from adapterhub.cli._study import train_commands
from adapterhub.training.loading import SharedLoader
from tests.kit.data import sentences, write_tsv
from tests.kit.session import home_in, refused, succeeded
from tests.kit.studies import made_records

SMALL = ("--methods", "head,lora(rank=2, alpha=4)", "--rates", "1", "--seeds", "1", "--steps", "2")


def study_words(backbone, folder, count=120):
    rows = [(f"{text} {n}", label) for n, (text, label) in enumerate(sentences(count))]
    source = write_tsv(folder / "mine.tsv", rows)
    return ("--backbone", backbone, "--train", source, "--output", folder / "study", "dtype=fp32")


@pytest.fixture
def words(backbone, tmp_path):
    return study_words(backbone, tmp_path)


@pytest.fixture(scope="module")
def ran(backbone, tmp_path_factory):
    """A study that ran once, and the result of its command."""
    folder = tmp_path_factory.mktemp("ran")
    words = ["bench", *study_words(backbone, folder), *SMALL]
    with home_in(folder / "home"):
        result = CliRunner().invoke(cli.group, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return folder / "study", result


@pytest.fixture
def folder(ran, tmp_path):
    """A copy of the folder of a study that ran."""
    return shutil.copytree(ran[0], tmp_path / "study")


def test_flags_alone_run_a_study_and_the_same_command_repeats_nothing(adapterhub, ran, folder):
    """The reports are made anew from the records."""
    records = folder / "records"
    assert len(list(records.glob("*.json"))) == 2
    assert "rows train" in ran[1].stderr
    assert "head, rate" in ran[1].stderr
    told = "Cannot tell yet: no method has three finished seeds."
    for text in ("bag of words", "majority class", "against", told):
        assert text in ran[1].stdout
    made = {name: (folder / name).read_bytes() for name in ("report.html", "report.md")}
    assert all(told.encode() in content for content in made.values())
    times = {path: path.stat().st_mtime_ns for path in records.iterdir()}
    for command in (("bench", "--output", folder), ("report", folder)):
        for name in made:
            (folder / name).unlink()
        code, out, err = adapterhub(*command)
        assert (code, "report.html" in out, "rate 1.0e-03" in err) == (0, True, False), err
        assert {path: path.stat().st_mtime_ns for path in records.iterdir()} == times
        assert {name: (folder / name).read_bytes() for name in made} == made


def test_a_shard_ends_with_a_code_of_its_own_until_all_is_done(adapterhub, words, tmp_path):
    shards = ("--quiet", "--shard")
    first, last = (adapterhub("bench", *words, *SMALL, *shards, f"{n}/2") for n in (1, 2))
    assert len(list((tmp_path / "study" / "records").glob("*.json"))) == 2
    assert last[0] == 0, last
    assert first[0] == (3 if "left to other shards" in first[1] else 0)


def test_the_engine_is_chosen_by_a_flag(adapterhub, words, monkeypatch):
    calls = []

    @contextmanager
    def engine(contexts, work, workers, address):
        calls.append((work.is_absolute(), workers, address))
        yield LocalEngine(contexts, SharedLoader(), work)
        calls.append("stopped")

    monkeypatch.setattr(_study, "RayEngine", engine)
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: None)
    on_ray = ("--engine", "ray", "--workers", "2", "--ray-address", "host:1")
    succeeded(adapterhub("bench", *words, *SMALL, *on_ray))
    assert calls == [(True, 2, "host:1"), "stopped"]


def test_a_study_in_which_all_fails_says_why(adapterhub, words, tmp_path):
    methods = ("--methods", "lora(sites=[nowhere])", *SMALL[2:])
    refused(adapterhub("bench", *words, *methods), "no tested run", "no such site")
    assert len(list((tmp_path / "study" / "records").glob("*.json"))) == 1


BEST = "lora(rank=2)"
ACCURACY = {"head": 0.6, BEST: 0.95}


@pytest.fixture
def study(backbone, tmp_path):
    source = write_tsv(tmp_path / "my data.tsv", sentences(40))
    flags = {"backbone": str(backbone), "output": str(tmp_path / "study"),
             "data": {"train": str(source)}}  # fmt: skip
    words = ["dtype=fp32", "train.batch_size=8", "train.report=false", "seed=0"]
    return read_study(None, words, flags, {"methods": tuple(ACCURACY), "baseline": BEST})


def test_the_command_trains_the_winner(adapterhub, study, tmp_path):
    study = replace(study, bench=replace(study.bench, steps=80))
    results = study_results(study, made_records(study, ACCURACY), {})
    ((place, line),) = train_commands(study, results, tmp_path / "study").items()
    assert place == ("my data", 100)
    program, *words = shlex.split(line)
    assert program == "adapterhub"
    succeeded(adapterhub(*words))
    recipe = (tmp_path / "study" / "best" / "recipe.yaml").read_text()
    for option in ("batch_size: 8", "max_steps: 80", "learning_rate: 0.001", "dtype: fp32"):
        assert option in recipe
    assert "rank: 2" in recipe or "rank=2" in recipe


@pytest.mark.parametrize(("rows", "usual"), [(1000, 375), (100, 156)])
def test_after_short_runs_of_a_budget_nothing_is_recommended(study, tmp_path, rows, usual):
    """The runs have 80 steps; a command of a study with a budget takes as many as `train`."""
    study = replace(study, bench=replace(study.bench, budget="8m", steps=80, rates=3))
    results = study_results(study, made_records(study, ACCURACY, rows=rows), {})
    advice = results[0].advice
    (line,) = train_commands(study, results, tmp_path).values()
    assert f"--method '{BEST}'" in line
    assert "--steps" not in line
    if usual <= 2 * 80:
        assert advice.method == BEST
        assert "--lr 0.001" in line
        return
    assert (advice.method, advice.candidate, advice.best) == (None, BEST, BEST)
    assert f"80 steps, where adapterhub train takes {usual}" in " ".join(advice.reasons)
    assert "budget of about 38 min" in " ".join(advice.reasons)  # 4.7 times as many steps
    assert "--lr" not in line


def test_which_winners_have_a_command(study, tmp_path):
    """One for the most rows of each task, in a folder of its own, if it is trained at all."""

    def commands(study, accuracy=ACCURACY, rows=(100,), constants=()):
        records = [each for count in rows for each in made_records(study, accuracy, rows=count)]
        results = study_results(study, records, dict(constants))
        return train_commands(study, results, tmp_path), results

    assert [*commands(study, rows=(50, 100))[0]] == [("my data", 100)]
    tasks = {"one": {"data": {"train": "1.tsv"}}, "two": {"data": {"train": "2.tsv"}}}
    both, _ = commands(replace(study, bench=replace(study.bench, tasks=tasks)))
    for name, number in (("one", 1), ("two", 2)):
        assert f"--train {number}.tsv" in both[name, 100]
        assert f"best-{name}" in both[name, 100]
    methods = ("head", [{"lora": {"rank": 2}}])  # a spec that is no text is quoted
    other = replace(study, bench=replace(study.bench, methods=methods, baseline=BEST))
    words = shlex.split(*commands(other)[0].values())
    assert words[words.index("--method") + 1] == '[{"lora": {"rank": 2}}]'
    constants = {"my data": Constant("majority class", "classes", "pos", 0.6)}
    found, (result,) = commands(study, {"head": 0.5, BEST: 0.5}, constants=constants)
    assert (result.advice.method, found) == ("majority class", {})


# `adapterhub suggest`.


@pytest.fixture
def texts(backbone, tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    return study_words(backbone, tmp_path, 60)[:4]


@pytest.fixture
def published(texts, backbone, tmp_path):
    for name, method in (("first", "lora(rank=2)"), ("second", "pfeiffer")):
        model, _ = ah.load_backbone(str(backbone), task="classification", labels=["a", "b"])
        ah.attach(model, method, name=name).save(tmp_path / name)
        ah.publish(tmp_path / name)
    return ["first@v1", "second@v1"]


def test_the_adapters_of_the_registry_are_ranked(adapterhub, texts, published):
    out = succeeded(adapterhub("suggest", *texts))
    for name in (*published, "bare backbone", "bag of words"):
        assert name in out
    assert "A bag of words was not shown to be worse than the features of" in " ".join(out.split())
    assert "No difference" in out  # untrained adapters change no feature
    assert "train --from" not in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_named_adapters_are_compared_and_printed_as_json(adapterhub, texts, published, tmp_path):
    out = succeeded(adapterhub("suggest", tmp_path / "first", *texts, "--json", "--rows", "40"))
    found = json.loads(out)
    assert (found["score"], found["best"]) == ("accuracy", None)
    assert [each["adapter"] for each in found["adapters"]] == [str(tmp_path / "first")]
    assert found["adapters"][0]["verdict"] == "tied"
    assert found["bag_of_words"]["value"] >= 0.9
    assert 0 <= found["bare"]["low"] <= found["bare"]["value"] <= found["bare"]["high"] <= 1


def test_a_better_one_is_suggested_with_the_command(adapterhub, texts, published, monkeypatch):
    def helped(model, encoded, names):
        labels = [[float(e.label == encoded.examples[0].label)] for e in encoded.examples]
        found = np.random.default_rng(0).normal(size=(len(labels), 6))
        return {n: found + 9 * np.array(labels) * (n == "candidate-1") for n in names}

    monkeypatch.setattr(suggest, "features_of", helped)
    out = succeeded(adapterhub("suggest", *texts))
    assert "Start from second@v1" in " ".join(out.split())
    assert "adapterhub train --from second@v1" in out


def test_texts_have_room_behind_the_virtual_tokens_of_every_adapter(
    adapterhub, texts, published, backbone, tmp_path
):
    """Texts of 64 tokens, all of the positions, were longer than what a prompt leaves of them."""
    rows = [(f"{text} {'good ' * 80}{n}", label) for n, (text, label) in enumerate(sentences(60))]
    file = write_tsv(tmp_path / "long.tsv", rows)
    for name, length in (("prompted", 20), ("crowded", 63)):
        model, _ = ah.load_backbone(str(backbone), task="classification", labels=["a", "b"])
        ah.attach(model, f"prompt(length={length})", name=name).save(tmp_path / name)
    named = [tmp_path / name for name in ("first", "prompted", "crowded")]
    with pytest.warns(UserWarning, match="cut to 44 tokens"):
        code, out, err = adapterhub("suggest", *named, *texts[:3], file)
    assert code == 0, err
    assert "prompted" in out
    assert "crowded: virtual tokens leave" in " ".join(err.split())
