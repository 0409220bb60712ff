"""Rows of new tokens: look-up, logits, initialization, and limits."""

from __future__ import annotations

import pytest
import torch

from adapterhub.anatomy.projections import matrices_in
from adapterhub.anatomy.sites import Site
from adapterhub.errors import AttachError
from adapterhub.files.manifest import NewToken
from adapterhub.hooks.composition import AppliedModules
from adapterhub.hooks.new_tokens import new_token_rows
from adapterhub.hooks.weight_host import TokenRows, embedding_slot
from tests.kit import tiny_models

VOCAB = tiny_models.VOCAB
TOKENS = (NewToken("<a>", VOCAB - 1), NewToken("<b>", VOCAB + 1))


def test_look_up_replaces_the_embeddings_of_new_ids_only():
    module = TokenRows(torch.tensor([5, 9]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    ids, y = torch.tensor([[9, 4, 5]]), torch.zeros(1, 3, 2)
    assert module.look_up(ids, y, 2.0).tolist() == [[[6, 8], [0, 0], [2, 4]]]


def test_scores_of_new_ids_are_products_with_their_rows():
    module = TokenRows(torch.tensor([1, 4]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    x, y = torch.tensor([[2.0, 3.0]]), torch.tensor([[7.0, 7.0, 7.0]])
    logits = module.score(x, y)[0].tolist()
    lowest = torch.finfo(torch.float32).min
    assert logits == [7, 2, 7, lowest, 3], "id 3 has no token"


def test_new_rows_start_as_the_mean_of_the_known_ones_or_as_they_are():
    model = tiny_models.model("llama", "causal-lm")
    rows = new_token_rows(model, TOKENS, VOCAB - 1, "default-0")
    table = model.get_input_embeddings().weight.detach()
    expected = table[: VOCAB - 1].mean(0)
    for row in rows.input.rows.detach():
        assert row.shape == (32,)
    torch.testing.assert_close(rows.input.rows[1].detach(), expected)
    assert torch.equal(rows.input.rows[0].detach(), table[VOCAB - 1]), "a resized model has it"


def test_an_embedding_that_is_no_table_is_refused():
    model = tiny_models.model("llama", "causal-lm")
    model.get_input_embeddings().register_forward_hook(lambda module, args, y: y + 1)
    with pytest.raises(AttachError):
        new_token_rows(model, TOKENS, VOCAB - 1, "default-0")


class OwnRow(torch.nn.Embedding):
    """A scaled embedding with a row of its own for one token, as that of T5Gemma 2."""

    def __init__(self):
        super().__init__(6, 2)
        self.embed_scale = 3.0
        self.own = torch.nn.Parameter(torch.ones(2))

    def forward(self, ids):
        y = super().forward(ids) * self.embed_scale
        return torch.where((ids == 5).unsqueeze(-1), self.own, y)


def test_rows_are_scaled_at_an_embedding_that_is_no_site():
    host, rows = OwnRow(), TokenRows(torch.tensor([8]), torch.tensor([[1.0, 2.0]]))
    assert matrices_in(host) == {}
    slot = embedding_slot(host)
    slot.add("rows", Site("table", "tokens", None, "tokens", "embed", "table", 2, 2), rows)
    slot.active = AppliedModules(("rows",))
    ids = torch.tensor([[1, 5, 8]])
    expected = torch.stack([host.weight[1] * 3, host.own, torch.tensor([3.0, 6.0])])[None]
    torch.testing.assert_close(host(ids), expected)
