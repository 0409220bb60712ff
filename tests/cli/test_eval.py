"""`adapterhub eval`: labelled data for an adapter, and baselines without one."""

import json
import re

import pytest

from tests.kit.data import write_json_lines
from tests.kit.server import CAUSAL, write_adapter
from tests.kit.session import refused, succeeded
from tests.kit.task_cases import classes


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
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"the {word} was", "completion": "very good"} for word in ("movie", "plot")]
    write_json_lines(file, rows * 4)
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
    refused(
        adapterhub("eval", *place, *task, *words, "--against-backbone"), "no adapter to compare"
    )


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
