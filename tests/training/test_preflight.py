"""What is said of a run before torch is imported."""

from __future__ import annotations

import pytest

from tests.kit.processes import run_commands

ROWS = "text\tlabel\n" + "good film\tyes\nbad film\tno\n" * 4
FILES = {
    "good.tsv": ROWS,
    "empty.tsv": "",
    "ragged.tsv": "text\tlabel\ngood film\tyes\tmore\n",
    "columns.tsv": ROWS.replace("text\t", "review\t"),
    "labels.tsv": ROWS.replace("yes", "other"),
    "unlabelled.tsv": "text\tlabel\ngood film\t\n",
}
GOOD = {
    "--backbone": "sentence-transformers/all-MiniLM-L6-v2",
    "--train": "good.tsv",
    "--eval": "good.tsv",
    "--output": "run",
}
CASES = {
    "a missing training file": ({"--train": "gone.tsv"}, "no such file: 'gone.tsv'"),
    "a missing evaluation file": ({"--eval": "gone.tsv"}, "no such file: 'gone.tsv'"),
    "an empty file": ({"--train": "empty.tsv"}, "empty.tsv is empty"),
    "a malformed row": ({"--train": "ragged.tsv"}, "line 2: 3 fields"),
    "a missing column": ({"--train": "columns.tsv"}, "'text'"),
    "a label that training lacks": ({"--eval": "labels.tsv"}, "other"),
    "a row without label": ({"--train": "unlabelled.tsv"}, "line 2"),
    "an unknown method": ({"--method": "lorra"}, "did you mean 'lora'"),
    "an unknown option of a method": ({"--method": "lora(rnk=4)"}, "did you mean 'rank'"),
    "an option of a wrong type": ({"--method": "lora(rank=big)"}, "lora.rank is 'big'"),
    "an unknown task": ({"--task": "clasification"}, "did you mean 'classification'"),
    "an unknown option": ({"train.epoch=3": None}, "train.epoch is not an option"),
    "an option out of range": ({"train.epochs=0": None}, "epochs: 0"),
    "a missing backbone": ({"--backbone": "./nothing"}, "no backbone './nothing'"),
    "a folder without a model": ({"--backbone": "."}, "lacks config.json"),
    "an unknown quantization": ({"--quantize": "nf5"}, "nf5"),
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
        for case, (changes, _) in CASES.items()
    }
    results = run_commands(words, folder)
    assert not (folder / "run").exists()
    return results


@pytest.mark.parametrize("case", CASES)
def test_it_is_said_before_torch_is_imported(case, said):
    code, output, slow = said[case]
    assert code == 2, output
    assert CASES[case][1] in output
    assert output.count("error: ") == 1
    assert slow == []
