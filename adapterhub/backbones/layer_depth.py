"""How deep under the top of a backbone its parameters are.

The layers of an encoder-decoder count through: the encoder's, then the decoder's above them.
"""

from __future__ import annotations

from adapterhub.anatomy.sites import Anatomy
from adapterhub.backbones.weights import packed_hosts
from adapterhub.errors import SiteError


def layer_count(anatomy: Anatomy) -> int:
    """The number of layers of all stacks."""
    return sum(anatomy.depth(stack) for stack in anatomy.stacks)


def layers_down(anatomy: Anatomy) -> dict[str, int]:
    """Under how many layers each backbone parameter is, by its path.

    0 is the top layer, and what stands above it (a final norm, a pooler); the number of layers is
    what stands below all of them (embeddings).

    Raises:
        SiteError: projections keep packed codes, of which no layer can train.
    """
    if packed := packed_hosts(anatomy):
        more = [f"and {len(packed) - 3} more"] if len(packed) > 3 else []
        raise SiteError(
            "whole layers cannot train: the weights of this backbone are quantized, and packed",
            offenders=[*packed[:3], *more],
            expected="weights in fp32, bf16 or fp16",
        )
    layers = [(stack, n) for stack in anatomy.stacks for n in range(anatomy.depth(stack))]
    down: dict[object, int] = {layer: n for n, layer in enumerate(reversed(layers))}
    down |= {"above": 0, "below": len(layers)}
    return {path: down[anatomy.layer_of(path)] for path in anatomy.parameters()}
