"""One row per architecture family: all differences between architectures are data in this folder.

A row is a `Family` (see family.py for every field). BERT's row, with its most important sites:

    BERT = Family(
        ("bert",),                                      # config.model_type values
        stacks=(
            Stack(
                "encoder",                              # or "decoder"; encoder-decoders have both
                "encoder.layer",                        # module list, from model.base_model
                {                                       # role: module path, from one layer
                    "attn.q": "attention.self.query",
                    "attn.o": "attention.output.dense",
                    "ffn.up": "intermediate.dense",
                    ...
                },
                body="encoder",                         # BERT pools this module's output
                norms="post",                           # LayerNorm(x + sublayer(x))
            ),
        ),
        below=("embeddings",),                          # modules before the first layer
    )

To read a row: site `encoder.3.attn.q` is the module `encoder.layer.3.attention.self.query`.
sites.py lists the roles. A path that a model lacks is skipped, so one row covers the variants of a
family (gated or plain feed-forward networks). `a|b` is the first of two paths that exists.

To write a row: first try without one, because structural discovery (discovery/) handles most
architectures. `adapterhub inspect MODEL --draft-family --python` prints the discovered row. Print
the model, add missing sites, and put the row into the file for its kind: the tests then run every
method on it. docs/tutorials/new-architecture.md shows each step. Note these rules:

- Leave out `attn.kv` if prefixes do not fit the attention: `attends` (projections.py) is None.
- A fused q, k, v is `attn.qkv`; check in the model's forward whether it is split in blocks or per
  head (`fused`).
- Leave out a norm that serves two sublayers.
- Leave `norms` at None if the residual connection is neither pre-norm nor post-norm.
"""

from __future__ import annotations

from types import ModuleType

from adapterhub.anatomy.families import decoders, encoder_decoders, encoders
from adapterhub.anatomy.family import Family


def rows_of(module: ModuleType) -> tuple[Family, ...]:
    """Return the rows defined in a module, in order of definition."""
    return tuple(row for row in vars(module).values() if isinstance(row, Family))


FAMILIES: dict[str, Family] = {
    model_type: row
    for module in (encoders, decoders, encoder_decoders)
    for row in rows_of(module)
    for model_type in row.model_types
}
