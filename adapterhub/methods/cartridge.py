"""Cartridge: a prefix that is initialized from a document and learns to represent it.

    attention(Q, [P_k; K], [P_v; V])                                              (section 3)

    P_k, P_v: (length, d_kv), the keys and values of the first tokens of `text`
    K, V: (tokens, d_kv)    d_kv: key-value heads times head size

Tokens count their positions from the end of the prefix, so that the initial outputs of the adapted
decoder equal its outputs behind the first `length` tokens of the document. The first token, which
receives much of the attention, does not train. Without `text` the prefix is drawn from N(0, 0.02²).
The paper trains on conversations about the document, with the answers of a model that reads the
whole document.

Parameters: 2 (length - frozen) d_kv per site.

Eyuboglu et al. 2025, "Cartridges: Lightweight and general-purpose long context representations via
self-study", section 3, https://arxiv.org/abs/2506.06266.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapterhub.config.options import option
from adapterhub.methods.common.base import register_method
from adapterhub.methods.common.site_module import Positions
from adapterhub.methods.prefix import Prefix


@register_method
@dataclass(frozen=True)
class Cartridge(Prefix):
    """A prefix that starts from a document."""

    name = "cartridge"
    paper = "Eyuboglu et al. 2025, https://arxiv.org/abs/2506.06266"
    summary = "a prefix that starts from the keys and values of a document"
    learning_rate = 2e-2

    length: int = option(128, "prefix length in tokens", least=1)
    positions: Positions = option(
        True, "count positions from after the prefix; keys: only relative positions of keys"
    )
    frozen: int = option(1, "tokens at the start of the prefix that do not train", least=0)
    sites: tuple[str, ...] = option(("attn.kv",), "attentions to adapt")

    @classmethod
    def example(cls) -> Cartridge:
        """Return a short prefix in front of texts that keep their positions, for any backbone."""
        return cls(length=4, positions=False)
