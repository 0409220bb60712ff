"""What a page shows for each kind of predictions."""

from __future__ import annotations

import pytest

from adapterhub.pages.figures import WORST, marked_text, prediction_sections
from adapterhub.pages.row_scores import KINDS
from tests.kit.runs import predictions

SECTIONS = {
    "sets": ["scores", "worst"],
    "classes": ["confusion", "scores", "calibration", "worst"],
    "choices": ["calibration", "worst"],
    "numbers": ["residuals", "worst"],
    "spans": ["scores", "worst"],
    "texts": ["quality", "worst"],
    "losses": ["quality", "worst"],
    "pictures": ["quality", "pictures"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_sections(kind):
    sections = prediction_sections(predictions(kind))
    assert [section.id for section in sections] == SECTIONS[kind]
    assert sections[-1].examples


def test_the_most_confident_mistake_is_first():
    rows = [
        {"label": "a", "prediction": "b" if i % 2 else "a", "score": i / 100} for i in range(100)
    ]
    worst = prediction_sections(predictions("classes", rows))[-1]
    assert len(worst.examples) == WORST
    assert worst.examples[0].facts[-1][1] == "0.990"
    assert worst.note.startswith("50 of 100 examples are wrong")


def test_many_classes_have_a_list_in_place_of_a_matrix():
    rows = [
        {"label": f"c{i % 60}", "prediction": f"c{(i + i // 60) % 60}", "score": 0.5}
        for i in range(120)
    ]
    confusion, scores, *_ = prediction_sections(predictions("classes", rows))
    assert confusion.matrix is None
    assert confusion.table is not None
    assert confusion.table.rows[0][0] == "c0 → c1"
    assert "40 of 62" in scores.note


def test_a_run_without_mistakes_says_so():
    rows = [{"label": "a", "prediction": "a", "score": 1.0}]
    worst = prediction_sections(predictions("classes", rows))[-1]
    assert worst.note == "There are none in 1 examples."


def test_losses_without_tokens_have_no_section():
    assert prediction_sections(predictions("losses", [{"loss": 0.0, "tokens": 0}])) == []


def test_entities_are_marked_in_their_text():
    spans = [["loc", 6, 9], ["per", 0, 2], ["per", 1, 3]]
    assert marked_text("Al in Rome", spans, [["per", 0, 2]]) == [
        ("Al", "per", True), (" in ", "", False), ("Rom", "loc", False), ("e", "", False)
    ]  # fmt: skip
