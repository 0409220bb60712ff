"""The depth of parameters in a backbone, counted in layers from the top.

Layers of an encoder-decoder are counted through both stacks: the decoder is above the encoder.
"""

from __future__ import annotations

from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.weights import packed_hosts
from adapterhub.errors import SiteError


def layer_count(anatomy: Anatomy) -> int:
    """Count the layers of all stacks."""
    return sum(anatomy.depth(stack) for stack in anatomy.layers)


def layers_above(anatomy: Anatomy) -> dict[str, int]:
    """Map the path of each backbone parameter to the number of layers above it.

    0 is the top layer and everything after it (a final norm, a pooler); embeddings, before the
    first layer, get the number of all layers.

    Raises:
        SiteError: weights are stored as packed codes, so whole layers cannot train.
    """
    if packed := packed_hosts(anatomy):
        more = [f"and {len(packed) - 3} more"] if len(packed) > 3 else []
        raise SiteError(
            "cannot train whole layers: the weights of this backbone are quantized and packed",
            offenders=[*packed[:3], *more],
            expected="weights in fp32, bf16 or fp16",
        )
    layers = [(stack, n) for stack in anatomy.layers for n in range(anatomy.depth(stack))]
    above: dict[object, int] = {layer: n for n, layer in enumerate(reversed(layers))}
    above |= {"above": 0, "below": len(layers)}
    return {path: above[anatomy.layer_of(path)] for path in anatomy.parameters()}
