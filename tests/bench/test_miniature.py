"""benchmarks/studies/miniature.py: its rows, its models, and the two studies of them."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import miniature
import pytest

from adapterhub.anatomy.build import anatomy_of
from adapterhub.backbones.load import meta_model
from adapterhub.bench.study import read_study
from adapterhub.methods.common.base import parse_methods
from adapterhub.tasks import parse_task


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(miniature, "PRETRAINING", 30)
    source = tmp_path / "source"
    (source / "multi30k").mkdir(parents=True)
    (source / "gsm8k").mkdir()
    for split, language in [(s, x) for s in ("train", "val") for x in ("en", "de")]:
        lines = "".join(f"{language} {split} line {n}\n" for n in range(40))
        with gzip.open(source / f"multi30k/{split}.{language}.gz", "wt", encoding="utf-8") as file:
            file.write(lines)
    row = json.dumps({"question": "How many?", "answer": "4"}) + "\n"
    (source / "gsm8k/train.jsonl").write_text(row, encoding="utf-8")
    return source


def test_no_row_of_a_study_pre_trains(data: Path, tmp_path: Path) -> None:
    files = miniature.write_data(data, tmp_path / "data")
    own = {text for path in files.values() for text in miniature._texts(path)}
    studies = {
        text
        for path in sorted((tmp_path / "data").glob("*.t*.jsonl"))
        for text in miniature._texts(path)
    }
    assert "en train line 29" in own
    assert {"de train line 30", "de val line 0"} <= studies
    assert not {text.removeprefix(miniature.TO_GERMAN) for text in studies} & own
    rows = [json.loads(line) for line in miniature._lines(tmp_path / "data/translation.test.jsonl")]
    assert rows[0] == {"text": miniature.TO_GERMAN + "en val line 0", "label": "de val line 0"}


def test_pretraining_rows_restore_words_and_translate_from_german() -> None:
    first, second = miniature.pretraining_pairs([("a red ball", "ein roter Ball")])
    assert first["label"] in ("a red ball", "ein roter Ball")
    assert len(first["text"].split()) == 3
    assert second == {"text": miniature.FROM_GERMAN + "ein roter Ball", "label": "a red ball"}
    text = " ".join(map(str, range(1000)))
    gaps = miniature.with_gaps(text, random.Random(0)).split().count("_")
    assert 250 < gaps < 350
    assert miniature.with_gaps(text, random.Random(0)) == miniature.with_gaps(
        text, random.Random(0)
    )


@pytest.mark.parametrize(
    ("study", "name"),
    [("miniature-seq2seq", "encoder-decoder"), ("miniature-causal", "decoder")],
)
def test_every_method_of_the_studies_fits_the_miniature(
    study: str, name: str, tmp_path: Path
) -> None:
    recipe = read_study(Path(miniature.__file__).with_name(f"{study}.yaml"))
    (task,) = recipe.tasks().values()
    assert task.backbone == name
    miniature.MINIATURES[name].config.save_pretrained(tmp_path)
    anatomy = anatomy_of(meta_model(str(tmp_path), task=parse_task(task.task).head))
    size = sum(p.numel() for p in anatomy.parameters().values())
    assert 1.5e6 < size < 3e6
    for label, spec in recipe.labels().items():
        counts = [method.count(anatomy) for method in parse_methods(spec)]
        assert 0 < sum(counts) <= size, label
