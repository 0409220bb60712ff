"""The row of an architecture family: its stacks of layers, and the path of each site in a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Layout = Literal["blocks", "heads", "whole"]
WHOLE: Layout = "whole"


@dataclass(frozen=True)
class Stack:
    """One stack of layers: the path of its module list, and the paths of the sites in one layer.

    All paths are relative to the base model (`model.base_model`), except `sites` and `bias`, which
    are relative to one layer.

    Attributes:
        name: "encoder" or "decoder"; in a model with several of a kind, the kind of input:
            "vision", "audio", "language".
        layers: the module list of the layers. `a.*.b` means that each element of `a` has a list
            `b`; layers are numbered across these lists.
        sites: role -> path of its module. `a|b` is the first of the two that exists. A sublayer
            (`attn`, `cross`, `ffn`) needs a path only where it does not run from the input of its
            first projection to the output of its last one: `a` is a module as a whole, `a>b` runs
            from the input of `a` to the output of `b`.
        root: the module whose forward takes `input_ids`; "" is the base model itself. If its
            forward takes something else, the stack has no `embed` site.
        body: the module inside the root whose output the root pools; None if it pools nothing.
        fused: the layout of the parts in a fused projection's output: `blocks` (all of q, then all
            of k, ...; the default), `heads` (q, k and v of the first key-value head, then of the
            next) or `whole` (unknown: the parts are not sites).
        norms: "pre" or "post", or the name of a boolean config option that is true for pre-norm;
            None if unknown.
        bias: the table of relative positions, a child of the attention that computes their bias. A
            layer without a table uses the bias of the nearest earlier layer with one.
        own: the sites of layers that differ from `sites`, by layer number.
    """

    name: str
    layers: str
    sites: Mapping[str, str]
    root: str = ""
    body: str | None = None
    fused: Mapping[str, Layout] = field(default_factory=dict)
    norms: str | None = None
    bias: str | None = None
    own: Mapping[int, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One row: the complete description of an architecture family.

    Attributes:
        model_types: the `config.model_type` values that the row applies to.
        stacks: one stack, or two in an encoder-decoder.
        below: the modules before the first layer (embeddings).
        positions_from_padding: whether the backbone counts positions from the padding index, as
            RoBERTa does.
        constants: parameters computed from a formula (sinusoidal positions), which never train.
        batch_dim: the batch dimension of hidden states.
        positions_follow_mask: whether positions are counted over the tokens that the attention mask
            includes.
        query_stream: the layer argument for a second stream of hidden states (XLNet). If it is
            passed, heads read it instead of the first stream. None without a second stream.
    """

    model_types: tuple[str, ...]
    stacks: tuple[Stack, ...]
    below: tuple[str, ...]
    positions_from_padding: bool = False
    constants: tuple[str, ...] = ()
    batch_dim: int = 0
    positions_follow_mask: bool = False
    query_stream: str | None = None
