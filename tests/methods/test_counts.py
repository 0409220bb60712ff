"""The number of parameters of each method, computed by hand: widths are 32, the middle is 48."""

from __future__ import annotations

import pytest

import adapterhub as ah
from tests.kit import tiny_models

BOTTLENECK = 2 * 32 * 5 + 5 + 32
MAM = 2 * 3 * 32 + 4 * (32 + 1) + 32 * (4 + 1)
# Three trunks: encoder attention, decoder attention and cross-attention, in two layers each.
TRUNKS = 3 * (3 * 32 + 5 * (32 + 1)) + 6 * 2 * 32 * (5 + 1)
COUNTS = [
    ("bert", "lora(rank=3, sites=[attn.q, ffn.up])", 2 * (3 * (32 + 32) + 3 * (32 + 48))),
    ("bert", "rslora(rank=5)", 2 * 2 * 5 * (32 + 32)),
    ("bert", "lora-plus(rank=3)", 2 * 2 * 3 * (32 + 32)),
    ("bert", "pissa(rank=3)", 2 * 2 * 3 * (32 + 32)),  # A0 and B0 are saved but do not train
    ("bert", "dora(rank=3, sites=[ffn.up])", 2 * (3 * (32 + 48) + 48)),
    ("bert", "miss(rank=4, ranks={attn.v: 2})", 2 * 32 * (4 + 2)),
    ("bert", "ia3", 2 * (32 + 32 + 48)),
    ("bert", "ia3(inputs=[])", 2 * (32 + 32 + 32)),
    ("bert", "houlsby(size=5)", 4 * BOTTLENECK),
    ("bert", "houlsby(size=8, sizes={attn: 3})", 2 * (2 * 32 * (8 + 3) + 8 + 3 + 2 * 32)),
    ("bert", "pfeiffer(size=5)", 2 * BOTTLENECK),
    ("bert", "parallel(size=5)", 2 * BOTTLENECK),
    ("bert", "scaled-parallel(size=5)", 2 * BOTTLENECK),
    ("bert", "compacter(size=8, rank=2, n=4)", 4**3 + 2 * 2 * (2 * 2 + 1) * (32 + 8)),
    ("bert", "mam(length=3, size=4)", 2 * MAM),
    ("bert", "prefix(length=3)", 2 * (2 * 3 * 32)),
    ("bart", "prefix(length=3, reparametrize=true, middle=5)", TRUNKS),
    ("bert", "prompt(length=7)", 7 * 32),
    ("bert", "p-tuning(length=4, middle=6)", 4 * 32 + 6 * (32 + 1) + 6 * (6 + 1) + 32 * (6 + 1)),
    ("bert", "norms", (1 + 2 * 2) * (32 + 32)),  # one behind the embeddings
    ("bert", "scalar-mix", 2 + 2),
    ("t5", "scalar-mix", 2 * (2 + 2)),
    ("t5", "scalar-mix(sites=['decoder.mix'])", 2 + 2),
    ("bert", "head", 0),
    ("bert", "chosen", tiny_models.VOCAB * 32),
    ("gpt2", "chosen", tiny_models.VOCAB * 32),
    # Two layers of four experts: 32 -> 2 * 48 for gates and the middle, 48 -> 32 behind.
    ("mixtral", "lora(sites=[ffn.experts.*], rank=3)", 2 * 4 * 3 * (32 + 96 + 48 + 32)),
    ("mixtral", "lora(sites=[ffn.experts.*], rank=3, experts=shared)", 2 * 3 * (128 + 80)),
    ("mixtral", "ia3(sites=[ffn.experts.down])", 2 * 4 * 48),
    ("mixtral", "ia3(sites=[ffn.experts.down], experts=shared)", 2 * 48),
]


@pytest.mark.parametrize(("architecture", "spec", "number"), COUNTS)
def test_the_count_is_that_of_its_formula(architecture, spec, number):
    adapter = ah.attach(tiny_models.model(architecture), spec)
    assert adapter.count() == number == sum(m.count(adapter.anatomy) for m in adapter.methods)
