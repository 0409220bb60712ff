"""Heads of `adapters` compute the same in models of transformers."""

from __future__ import annotations

import pytest
import torch
from adapters_golden import (
    EXPECTED,
    HEADS,
    OTHER_HEADS,
    head_of,
    imported,
    inputs,
    with_head,
)

import adapterhub as ah
from adapterhub.errors import MismatchError

# Imports warn about what they cannot carry over unchanged.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_heads_of_every_kind_are_compared():
    kinds = {head_of(*cell)["head_type"] for cell in HEADS}
    assert kinds == {"classification", "tagging", "question_answering", "seq2seq_lm"}
    assert len(HEADS) > 40


@pytest.mark.parametrize(("architecture", "case"), HEADS)
def test_equal_logits(architecture, case, tmp_path):
    model = with_head(architecture, case)
    adapter = imported(model, architecture, case)
    adapter.save(tmp_path / "own")
    expected, given = EXPECTED[architecture], inputs(architecture)
    names = [n for n in ("logits", "start_logits", "end_logits") if f"{case}.{n}" in expected]
    assert names
    with torch.no_grad():
        output = model(**given)
    for name in names:
        found, wanted = output[name], expected[f"{case}.{name}"]
        if found.dim() > 1 and found.shape[:2] == given["input_ids"].shape:
            mask = given["attention_mask"].bool()
            found, wanted = found[mask], wanted[mask]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    options = head_of(architecture, case)
    if "num_labels" in options and len(names) == 1:
        numbered = [f"LABEL_{i}" for i in range(options["num_labels"])]
        assert adapter.labels == tuple(options.get("label2id") or numbered)


@pytest.mark.parametrize(("architecture", "case"), sorted(OTHER_HEADS))
def test_an_unsupported_head_is_refused(architecture, case):
    model = with_head(architecture, case)
    keys = list(model.state_dict())
    with pytest.raises(MismatchError, match="head=False"):
        imported(model, architecture, case)
    assert list(model.state_dict()) == keys
    assert imported(model, architecture, case, head=False).head is None


def test_the_pooler_of_bert_is_restored():
    """The first layer of a head on BERT replaces the backbone's pooler while it is active."""
    model = with_head("bert", "houlsby")
    pooler = model.bert.pooler.dense.weight.clone()
    adapter = imported(model, "bert", "houlsby")
    assert not torch.equal(model.bert.pooler.dense.weight, pooler)
    ah.activate(model)
    assert torch.equal(model.bert.pooler.dense.weight, pooler)
    assert adapter.labels == ("a", "b", "c")
