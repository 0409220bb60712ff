"""One row an architecture family: where T5 differs from BERT, and nowhere else.

Paths start at the base model (stacks) or at one layer (sites). A path that a model does not have is
skipped, so that one row serves a family's variants (gated or plain feed-forward networks).
"""

from __future__ import annotations

from transformers import PreTrainedModel

from adapterhub.backbones.anatomy import Anatomy, Family
from adapterhub.backbones.build import build
from adapterhub.backbones.families import decoders, encoder_decoders, encoders
from adapterhub.errors import BackboneError, did_you_mean

FAMILIES: dict[str, Family] = {
    model_type: family
    for rows in (encoders, decoders, encoder_decoders)
    for family in rows.ROWS
    for model_type in family.model_types
}


def anatomy_of(model: PreTrainedModel) -> Anatomy:
    """The anatomy of a model, by its family's row.

    Raises:
        BackboneError: no row for this architecture; the error tells the row to write.
    """
    model_type = model.config.model_type
    if model_type not in FAMILIES:
        raise BackboneError(
            f"no anatomy for the architecture {model_type!r}{did_you_mean(model_type, FAMILIES)}",
            expected=f"one of {', '.join(sorted(FAMILIES))}",
            hint="add a Family row to adapterhub/backbones/families/ that names, for one layer, "
            "the paths of attn.q attn.k attn.v attn.o ffn.up ffn.down",
        )
    return build(model, FAMILIES[model_type])
