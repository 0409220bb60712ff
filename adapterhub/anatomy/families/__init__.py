"""One row an architecture family: where T5 differs from BERT, and nowhere else.

Paths start at the base model (stacks) or at one layer (sites). A path that a model does not have is
skipped, so that one row serves a family's variants (gated or plain feed-forward networks).
"""

from __future__ import annotations

from transformers import PreTrainedModel

from adapterhub.anatomy.build import build_anatomy
from adapterhub.anatomy.discovery import discover
from adapterhub.anatomy.families import decoders, encoder_decoders, encoders
from adapterhub.anatomy.sites import Anatomy, Family

FAMILIES: dict[str, Family] = {
    model_type: family
    for rows in (encoders, decoders, encoder_decoders)
    for family in rows.ROWS
    for model_type in family.model_types
}


def anatomy_of(model: PreTrainedModel) -> Anatomy:
    """The anatomy of a model, by its family's row, or by its structure if it has none.

    Raises:
        BackboneError: no row for this architecture, and its structure does not tell enough; the
            error prints the row to write.
    """
    return build_anatomy(model, FAMILIES.get(model.config.model_type) or discover(model))
