"""`adapterhub eval`, and every score with its error: in a run, its files, and of test rows."""

import json
import re

import pytest

from adapterhub.files.native import Saved
from tests.kit.data import sentences, write_json_lines, write_tasks, write_tsv
from tests.kit.selection import long_table
from tests.kit.server import CAUSAL, write_adapter
from tests.kit.session import refused, succeeded
from tests.kit.task_cases import CASES, classes


def test_a_backbone_is_a_baseline_without_training(adapterhub, backbones, tmp_path):
    words = ("--data", classes(tmp_path), "--json")
    task = "prompted(template='{text} is {mask}', words={'pos': 'good', 'neg': 'bad'}, model=%s)"
    for backbone, kind in (("bert", "masked-lm"), ("llama", "causal-lm"), ("gpt2", "causal-lm")):
        line = ("eval", "--backbone", backbones(backbone), "--task", task % kind, *words)
        for few in ((), ("--examples", words[1], "--shots", 2)):
            assert 0 <= json.loads(succeeded(adapterhub(*line, *few)))["accuracy"] <= 1
    for backbone, shots, expected in (
        ("llama", (), "no model for masked-lm"),
        ("bert", ("--shots", 2), "--examples"),
    ):
        line = ("eval", "--backbone", backbones(backbone), "--task", task % "masked-lm", *shots)
        refused(adapterhub(*line, *words), expected)


@pytest.mark.parametrize("method", ["lora(rank=2)", "full"])
def test_an_adapter_against_its_backbone(adapterhub, backbones, tmp_path, method):
    folder = write_adapter(backbones("llama"), tmp_path / "tuned", method, CAUSAL)
    rows = [{"prompt": f"the {word} was", "completion": "very good"} for word in ("movie", "plot")]
    file = write_json_lines(tmp_path / "rows.jsonl", rows * 4)
    words = ("--data", file, "--text", "prompt", "--label", "completion")
    place = ("--backbone", backbones("llama"))
    line, task = ("eval", folder, *words, *place), ("--task", "causal-lm")
    both, alone, bare = (
        json.loads(succeeded(adapterhub(*each, "--json")))
        for each in ((*line, "--against-backbone"), line, ("eval", *place, *task, *words))
    )
    assert both["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert both["backbone"]["loss"] == pytest.approx(bare["loss"], rel=1e-5)
    assert both["loss"] != pytest.approx(bare["loss"], rel=1e-3)
    assert both["difference"]["score"]
    succeeded(adapterhub(*line, "--against-backbone"), "tuned - backbone: ")
    bare = ("eval", *place, *task, *words)
    refused(adapterhub(*bare, "--against-backbone"), "no adapter to compare")


@pytest.mark.parametrize("method", ["lora(rank=2)", "full"])
def test_a_run_scores_what_it_retains(adapterhub, backbones, tmp_path, method):
    rows = {
        "train": [("the movie was", "very good"), ("a plot is", "dull")] * 8,
        "other": [("the end is", "fine"), ("the film", "poor"), ("it was", "great")] * 8,
    }
    files = {}
    for name, pairs in rows.items():
        key = ("prompt", "completion") if name == "train" else ("question", "answer")
        named = [dict(zip(key, pair, strict=True)) for pair in pairs]
        files[name] = write_json_lines(tmp_path / f"{name}.jsonl", named)
    words = ("train", files["train"], "--backbone", backbones("llama"), "--task", "causal-lm")
    more = ("--eval", "none", "--steps", 3, "--method", method, "--output", tmp_path / "run")
    out = succeeded(adapterhub(*words, *more, "--retain", files["other"]))
    scored = re.search(r"loss ([\d.]+) without the adapter[^:]+: \w.*, ([-+][\d.]+) \(95 %", out)
    assert scored, out
    place = ("--data", files["other"], "--text", "question", "--label", "answer", "--json")
    both = json.loads(succeeded(adapterhub("eval", tmp_path / "run", *place, "--against-backbone")))
    losses = both["backbone"]["loss"], both["loss"]
    found = tuple(map(float, scored.groups()))
    assert found == pytest.approx((losses[0], losses[1] - losses[0]), abs=1e-3)
    assert abs(found[1]) > 1e-3
    assert "without the adapter, on 24 rows" in (tmp_path / "run/report.html").read_text()


# Every score with its error: at the end of a run, in its files, and of rows that chose nothing.


TO = "\N{EN DASH}"
ERROR = rf"\((-?[\d.]+({TO}| to )-?[\d.]+, )?n = \d+( in \d+ groups?)?\)"
PICKED = "also picked the epoch; try --test 0.1"


@long_table("name", CASES, 6, nightly=2)
def test_each_task_prints_and_records_the_error_of_each_score(
    name, adapterhub, backbones, tmp_path
):
    case = CASES[name]
    file, output = case.data(tmp_path), tmp_path / "run"
    words = ("--train", file, "--eval", file, "--test", file, "--task", case.task, "--epochs", 1)
    line = ("train", "--backbone", backbones(case.backbone), "--output", output, *words)
    line += (*case.words, "--quiet", "train.report=false")
    out = succeeded(adapterhub(*line))
    manifest = Saved.at(output / "adapter").manifest
    errors = manifest.training["errors"]
    assert errors.keys() == manifest.metrics.keys()
    own = {n: v for n, v in manifest.metrics.items() if not n.startswith("test/")}
    assert manifest.metrics.keys() == {*own, *(f"test/{n}" for n in own)}
    for metric, value in own.items():
        assert value == pytest.approx(manifest.metrics[f"test/{metric}"], abs=1e-3)
        assert re.search(rf"^{metric} +{value:.4f} {ERROR}", out, re.MULTILINE), out
        assert re.search(rf" {metric} {manifest.metrics[f'test/{metric}']:.4f} {ERROR}", out), out
    card = (output / "adapter" / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(ERROR, card)) == 2 * len(own)


@pytest.mark.parametrize("kind", ["file", "share"])
def test_test_rows_choose_nothing_and_are_shown_everywhere(
    kind, train, trained, trained_once, adapterhub, tmp_path
):
    test = write_tsv(tmp_path / "test.tsv", sentences(90)[64:]) if kind == "file" else 0.25
    run = tmp_path / "tested"
    code, out, err = train("--test", test, "train.epochs=2", "train.report=true", output=run)
    assert code == 0, err
    assert PICKED in trained_once[1].stdout
    assert "these 22 rows also picked the epoch; the test rows picked nothing" in out
    rows = {"file": 26, "share": 15}[kind]
    assert f"{rows} test rows: the scores are uncertain; --test FILE, or more rows" in err
    assert "22 evaluation rows: the scores are uncertain; --eval FILE, or more rows" in err
    data = Saved.at(run / "adapter").manifest.training["data"]
    assert (data["train"], data["test"]) == ({"file": 64, "share": 49}[kind], rows)
    shown = [out, (run / "report.html").read_text(encoding="utf-8")]
    shown.append(adapterhub("compare", run, trained, "--list")[1])
    shown.append(adapterhub("show", run)[1])
    for text in shown:
        assert re.search(rf"\d{TO}[\d.]+, n = {rows}", text), text
        assert re.search(rf"\d{TO}[\d.]+, n = 22", text), text
    if kind == "file":
        assert PICKED not in train("train.epochs=1", output=tmp_path / "once")[1]
        tensors = [(f / "adapter/adapter.safetensors").read_bytes() for f in (run, trained)]
        assert tensors[0] == tensors[1], "what trains and what is evaluated are as without it"


def test_eval_has_intervals_also_in_json_and_in_ascii(adapterhub, trained, tmp_path, monkeypatch):
    few = write_tsv(tmp_path / "few.tsv", [("the film was good", "pos"), ("a good film", "pos")])
    code, out, err = adapterhub("eval", trained, "--data", few)
    assert code == 0, err
    pattern = rf"^accuracy +[01]\.0000 \(0\.\d\d{TO}[01]\.\d\d, n = 2\)$"
    assert re.search(pattern, out, re.MULTILINE), out
    assert "2 evaluation rows: the scores are uncertain; evaluate on more" in err
    assert "all 2 evaluation rows are of one class, 'pos'" in err
    monkeypatch.setattr("adapterhub.cli._format._can_print", str.isascii)
    _, out, _ = adapterhub("eval", trained, "--data", few)
    assert re.search(r"\(0\.\d\d-[01]\.\d\d, n = 2\)", out)
    found = json.loads(adapterhub("eval", trained, "--data", few, "--json")[1])
    low, high = found["intervals"]["accuracy"]
    assert low <= found["accuracy"] <= high + 1e-9


def test_each_of_several_tasks_has_test_rows(adapterhub, backbone, tmp_path):
    tasks = write_tasks(tmp_path / "data")
    tasks["mood"]["data"]["test"] = tasks["mood"]["data"]["eval"]
    recipe = {"tasks": tasks, "task": "classification", "train": {"epochs": 2, "batch_size": 4}}
    recipe |= {"backbone": str(backbone), "output": str(tmp_path / "run"), "data": {"test": 0.2}}
    tasks["length"]["data"]["test"] = None
    (tmp_path / "r.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    out = succeeded(adapterhub("train", tmp_path / "r.yaml", "--quiet"))
    metrics = Saved.at(tmp_path / "run" / "adapter").manifest.metrics
    assert {"test/mean", "test/mood/accuracy", "test/thing-2/accuracy"} < metrics.keys()
    assert "test/length/pearson" not in metrics
    assert re.search(rf" mood/accuracy {metrics['mood/accuracy']:.4f} {ERROR}", out), out
    shown = adapterhub("show", tmp_path / "run")[1]
    assert "test/mood/accuracy" in " ".join(shown.split())
