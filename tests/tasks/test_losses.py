"""Losses of logits are those that models compute, for every kind of model and architecture."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
import transformers
from tiny_models import FULL_MATRIX, MATRIX
from transformers import AutoConfig, PreTrainedModel

from adapterhub.backbones.task_models import TASK_MODELS, label_options
from adapterhub.tasks import TASKS
from adapterhub.tasks._losses import LOSSES, without_labels
from adapterhub.tasks._rows import IGNORED

CLASSES = ("a", "b", "c")


def config_of(architecture: str, **options: Any) -> Any:
    """Return the configuration of a tiny model."""
    tokens = {"vocab_size": tiny_models.VOCAB, "pad_token_id": 1, "eos_token_id": 2}
    sizes = tiny_models.SIZES[architecture] | tokens | tiny_models.NO_DROPOUT | options
    return AutoConfig.for_model(architecture, **sizes)


# Their own loss compares each token with the logits at itself: tests/backbones/test_causality.py.
UNSHIFTED = {("causal-lm", a) for a in ("bart", "mbart", "plbart", "pegasus", "xlnet")}
CELLS = [
    (kind, architecture)
    for kind in LOSSES
    for architecture in MATRIX
    if TASK_MODELS[kind].classes_for(config_of(architecture))
    and (kind, architecture) not in UNSHIFTED
]


def built(kind: str, architecture: str) -> PreTrainedModel:
    """Build a tiny model of a kind."""
    row = TASK_MODELS[kind]
    options = label_options(kind, CLASSES if row.classes else ())
    torch.manual_seed(0)
    model = getattr(transformers, row.auto).from_config(config_of(architecture, **options))
    return model.eval()


def labelled(kind: str) -> dict[str, torch.Tensor]:
    """Make a batch with the labels of a kind, of which some are ignored."""
    batch = tiny_models.batch()
    if kind == "multiple-choice":
        choices = {name: torch.stack([value, value.roll(1, 0)], 1) for name, value in batch.items()}
        return choices | {"labels": torch.tensor([0, 1, 1])}
    ignored = torch.arange(9) > torch.tensor([[8], [6], [2]])
    ids = batch["input_ids"].masked_fill(ignored, IGNORED)
    spans = {"start_positions": torch.tensor([1, 0, 4]), "end_positions": torch.tensor([2, 0, 20])}
    labels = {
        "classification": torch.tensor([0, 1, 2]),
        "regression": torch.tensor([0.5, -1.0, 2.0]),
        "multi-label": torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 1]]),
        "tagging": (batch["input_ids"] % 3).masked_fill(ignored, IGNORED),
    }
    if kind == "question-answering":
        return batch | spans
    return batch | {"labels": labels.get(kind, ids)}


def test_every_kind_that_a_task_needs_has_a_loss() -> None:
    others = {"prompted", "span-corruption", "denoising", "unified-qa"}
    others |= {"embedding", "reranking", "preference", "reward"}
    others |= {"speech-recognition"}  # of letters or of tokens: the model decides
    heads = {cls.name for cls in TASKS.values()} - others
    assert LOSSES.keys() == heads | {"masked-lm", "causal-lm", "seq2seq"}
    assert len(CELLS) >= (200 if FULL_MATRIX else 55 if len(MATRIX) > 2 else 5)


@pytest.mark.parametrize(("kind", "architecture"), CELLS)
def test_the_loss_of_the_logits_is_the_models(kind: str, architecture: str) -> None:
    model, batch = built(kind, architecture), labelled(kind)
    with torch.no_grad():
        expected = model(**batch).loss
        output = model(**without_labels(model, batch))
    loss = LOSSES[kind](output, batch)
    assert output.get("loss") is None or architecture == "m2m_100"
    assert loss is not None
    assert torch.allclose(loss, expected, rtol=1e-6)
