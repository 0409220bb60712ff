"""`adapterhub diff`."""

import json

from tests.kit import registries


def test_two_versions_are_compared(typed, tmp_path):
    registries.write_sample(tmp_path / "a", 1, accuracy=0.5)
    registries.write_sample(tmp_path / "b", 2, accuracy=0.75, method="pfeiffer")
    for folder in "ab":
        typed(f"publish ./{folder} --name polite")
    shown = typed("diff polite@v1 polite@v2")
    assert "metrics.accuracy" in shown
    assert "0.75" in shown
    assert "encoder.0.attn.q.lora.a   2 x 4   1" in shown
    assert "0 of 1 tensors that both have are equal" in shown
    assert typed("diff a polite@v1") == "1 of 1 tensors that both have are equal\n"
    tree = json.loads(typed("diff polite@v1 ./b --json"))
    assert tree["adapters"] == ["polite@v1", "./b"]
    assert tree["fields"]["metrics.accuracy"] == [0.5, 0.75]
    row = {"first": [2, 4], "second": [2, 4], "distance": 1.0}
    assert tree["tensors"] == {"encoder.0.attn.q.lora.a": row}


def test_several_are_compared_with_the_first(typed, tmp_path):
    for seed, name in enumerate("abc"):
        registries.write_sample(tmp_path / name, seed, accuracy=seed / 4)
    shown = typed("diff a b c")
    assert typed("diff a b") in shown
    assert typed("diff a c") in shown
    lines = typed("diff a b c --json").splitlines()
    assert [json.loads(line)["adapters"] for line in lines] == [["a", "b"], ["a", "c"]]


def test_tensors_that_only_one_has_are_counted(typed, trained):
    registries.write_sample(trained.parent / "made")
    shown = typed("diff ./run ./made")
    assert "0 of 0 tensors that both have are equal" in shown
    assert "tensors are only in ./run" in shown
    assert "1 tensor is only in ./made" in shown
