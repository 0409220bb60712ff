"""The paper model of large backbones: its counts, and the table in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
import scale

DOCS = Path(__file__).parents[1] / "docs" / "scale.md"


def test_the_parameters_of_llama_3_are_counted() -> None:
    counted = scale.count(scale.SHAPES["8B"], "lora(rank=16)")
    assert counted.parameters == 8_030_261_248  # as published
    assert counted.trained == 32 * 16 * (2 * 4096 + 4096 + 1024)
    line = f"| 8B | `lora(rank=16)` | {counted.trained / 1e6:,.1f} M | 8 |"
    assert line in DOCS.read_text("utf-8")


def test_more_processes_hold_less_and_receive_more() -> None:
    counted = scale.Counted(1000, 300, 10, 8, 3, 2.0)
    one, two, many = (scale.need(counted, gpus, tokens=1) for gpus in (1, 2, 1000))
    assert (one.received, one.memory["gathered"], one.memory["weights"]) == (0, 0, 2000)
    assert two.memory["weights"] == 1000
    assert two.memory["gathered"] == 2 * (2 * 300 + 100)
    assert two.received == pytest.approx(2000 + 20)
    assert many.memory["weights"] + many.memory["training"] < 3
    assert many.total > many.memory["gathered"] == two.memory["gathered"]


def test_processes_that_compute_together_share_the_work() -> None:
    counted = scale.Counted(1000, 300, 10, 8, 3, 2.0)
    two, eight = (scale.need_together(counted, "pfeiffer", gpus, tokens=1) for gpus in (2, 8))
    assert two.memory["weights"] == 1000
    assert two.computing == 4 * eight.computing
    assert two.received == pytest.approx(18 * 2 * 8 * 3 / 2)
    lora = scale.need_together(counted, "lora(rank=16)", 2, tokens=1)
    assert lora.received == pytest.approx(two.received * 24 / 18)


@pytest.mark.apart
def test_the_table_of_tensor_parallelism_is_that_of_the_script() -> None:
    text = DOCS.read_text("utf-8")
    for row in scale.rows_together():
        assert f"| {' | '.join(row)} |" in text
