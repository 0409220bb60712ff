"""The study of what a backbone forgets of general text."""

from __future__ import annotations

from pathlib import Path

import general_text
from run_records import RunRecords

ROOT = Path(__file__).parents[2]


def test_the_news_to_train_on_and_to_hold_are_disjoint(tmp_path: Path) -> None:
    (tmp_path / "mrpc").mkdir()
    rows = [f"1\t{i}\t{i}\tsentence number {i}\tanother" for i in range(10)]
    text = "\n".join(["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *rows])
    (tmp_path / "mrpc" / "train.tsv").write_text("\ufeff" + text + "\n", encoding="utf-8")
    news, held = (
        set(f.read_text().splitlines()) for f in general_text.write_news(tmp_path, tmp_path)
    )
    assert len(news) == len(held) == 5
    assert not news & held


def test_the_table_says_in_how_many_runs_detaching_gives_the_same_bits() -> None:
    def record(method: str, after: float, detached: float) -> dict[str, object]:
        loss = {"before": 2.0, "after": after, "detached": detached}
        return {"method": method, "right": "1101", "loss": loss}

    found = general_text.table(
        [record("lora", 2.5, 2.0), record("lora", 2.7, 2.0), record("full", 5.0, 2.0000001)]
    )
    assert "| lora | 75.0 | 2.000 | 2.600 ± 0.141 | 0.600 ± 0.141 | 2 of 2 |" in found
    assert "| full | 75.0 | 2.000 | 5.000 | 3.000 | 0 of 1 |" in found


def test_the_guide_has_the_table_of_the_committed_records() -> None:
    records = RunRecords(ROOT / "benchmarks" / "studies" / "general-text").read()
    assert len(records) == 3 * len(general_text.METHODS)
    guide = ROOT / "docs" / "guides" / "continued-pretraining.md"
    assert general_text.table(records) in guide.read_text("utf-8")
