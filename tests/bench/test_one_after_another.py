"""benchmarks/studies/forgetting.py on a tiny backbone."""

from __future__ import annotations

import random
from pathlib import Path

import forgetting
import pytest

ROWS = forgetting.Rows(
    [(f"a {'good' if n % 2 else 'bad'} film {n}",) for n in range(40)], [n % 2 for n in range(40)]
)
DATA = {task: {"train": ROWS, "test": ROWS} for task in forgetting.TASKS}


def test_the_record_has_each_test_row_before_and_after(backbone: Path) -> None:
    names = ["lora", "lora, one per task"]
    found = forgetting.study(DATA, names, str(backbone), seeds=2, steps=3)
    assert list(found["approaches"]) == names
    assert found["device"].startswith("CPU")
    assert set(found["versions"]) == {"adapterhub", "torch", "transformers", "python"}
    for runs in found["approaches"].values():
        assert [len(side) for run in runs for side in run.values()] == [40] * 6
        assert {digit for run in runs for side in run.values() for digit in side} <= {"0", "1"}
    for run in found["approaches"]["lora, one per task"]:
        assert run["before"] == run["after"]


@pytest.mark.parametrize("name", forgetting.APPROACHES)
def test_the_second_task_changes_the_logits_of_the_first_unless_it_has_its_own_adapter(
    name: str, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = []

    class Watched(forgetting.Classifier):
        def right(self, task: str, rows: forgetting.Rows, size: int = 64) -> str:
            self.model.eval()
            logits.append(self.logits(task, rows).detach() if task == forgetting.FIRST else None)
            return super().right(task, rows, size)

    monkeypatch.setattr(forgetting, "Classifier", Watched)
    approach = forgetting.APPROACHES[name]
    found = forgetting.run_approach(approach, DATA, str(backbone), 1, 3)
    assert set(found) == {"before", "after", "second"}
    before, _, after = logits
    assert before.equal(after) == approach.per_task


def test_batches_go_through_all_rows_before_any_again() -> None:
    batches = ROWS.batches(10, random.Random(0))
    seen = [text for _ in range(4) for text in next(batches).texts]
    assert sorted(seen) == sorted(ROWS.texts)
    assert len(next(batches).labels) == 10


def test_the_tasks_are_read(tmp_path: Path) -> None:
    (tmp_path / "sst2").mkdir()
    for split in ("train", "dev"):
        rows = [f"a {split} film {n}\t{n % 2}" for n in range(30)]
        text = "\n".join(["sentence\tlabel", *rows, ""])
        (tmp_path / f"sst2/{split}.tsv").write_text(text, encoding="utf-8")
    found = forgetting.read_task(tmp_path, "sst2")
    assert found["test"].texts[1] == ("a dev film 1",)
    assert found["test"].labels[:4] == [0, 1, 0, 1]
    assert len(found["train"].labels) == 30
