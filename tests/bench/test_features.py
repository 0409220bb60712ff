"""Features of texts with several adapters, alone and in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import adapterhub as ah
from adapterhub.bench.suggest import features_of
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.matrix import one_of_each_signature
from tests.kit.selection import long_table


class Rows:
    """Encoded rows of a tiny model, padded on the right."""

    def __init__(self, count: int = 5) -> None:
        self.rows = list(range(count))

    def batch(self, indices: Any) -> dict[str, torch.Tensor]:
        every = tiny_models.batch(rows=len(self.rows))
        mask = torch.ones_like(every["input_ids"])
        for row in range(1, len(self.rows)):
            mask[row, -row:] = 0
        tensors = {"input_ids": every["input_ids"], "attention_mask": mask}
        return {name: tensor[list(indices)] for name, tensor in tensors.items()}


def by_hand(model: Any, rows: Rows) -> np.ndarray:
    """The mean of the last layer's states over each row's tokens, a row at a time."""
    means = []
    for number in rows.rows:
        batch = rows.batch([number])
        kept = int(batch["attention_mask"].sum())
        with torch.inference_mode():
            states = model(**batch, output_hidden_states=True).hidden_states[-1][0]
        states = states[-len(batch["attention_mask"][0]) :]
        means.append(states[:kept].mean(0).numpy())
    return np.stack(means)


@long_table("method", one_of_each_signature(), 4)
def test_each_adapter_has_the_features_that_it_has_alone(method: str) -> None:
    model, rows = tiny_models.model("bert").eval(), Rows()
    bare = by_hand(model, rows)
    expected: dict[str | None, np.ndarray] = {None: bare}
    for name, spec in (("one", METHODS[method].example()), ("two", "lora(rank=2)")):
        adapter = ah.attach(model, spec, name=name)
        adapter.head = None
        tiny_models.scramble(adapter)
        model.eval()
        expected[name] = by_hand(model, rows)
    found = features_of(model, rows, [None, "one", "two"])  # type: ignore[arg-type]
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=2e-5, rtol=2e-5)


def test_the_bare_backbone_needs_no_adapter() -> None:
    model, rows = tiny_models.model("bert").eval(), Rows()
    found = features_of(model, rows, [None])[None]  # type: ignore[arg-type]
    np.testing.assert_allclose(found, by_hand(model, rows), atol=1e-6)
