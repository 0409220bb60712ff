"""`adapterhub eval`: labelled data for an adapter, and baselines without one."""

import json

from tests.kit.data import sentences, write_tsv
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


def test_a_missing_column_of_new_data(adapterhub, trained, tmp_path):
    file = write_tsv(tmp_path / "new.tsv", sentences(4), header="sentence\tlabel")
    refused(adapterhub("eval", trained, "--data", file), "'text'", "'sentence'")
