"""The options of each method: what is refused, and the number of parameters that they give."""

import pytest

import adapterhub as ah
from adapterhub.errors import AttachError, ConfigError, SiteError
from tests.kit import tiny_models

# model type or (type, task), method, error, texts of the message
REFUSED = [
    # Values out of range.
    ("bert", "loha(rank=0)", ConfigError, ["loha"]),
    ("bert", "lora(rank=0)", ConfigError, ["rank: 0, must be at least 1"]),
    ("bert", "lora(ranks={attn.q: -1})", ConfigError, ["rank cannot be less than 1"]),
    ("bert", "lora(dropout=-0.1)", ConfigError, ["dropout"]),
    ("bert", "lora-plus(ratio=high)", ConfigError, ["ratio"]),
    ("bert", "pissa(alpha=0)", ConfigError, ["alpha"]),
    ("bert", "pissa(rank=33)", SiteError, ["33 components"]),
    ("bert", "lokr(factor=0)", ConfigError, ["lokr"]),
    ("bert", "delora(strength=0)", ConfigError, ["delora"]),
    ("bert", "oft(block=1)", ConfigError, ["oft"]),
    ("bert", "oft(terms=33)", ConfigError, ["oft"]),
    ("bert", "fourierft(coefficients=0)", ConfigError, ["fourierft"]),
    ("bert", "hra(rank=3)", SiteError, ["hra"]),
    ("bert", "gralora(rank=6, pieces=4)", SiteError, ["gralora"]),
    ("bert", "lora-xs(rank=64)", SiteError, ["lora-xs"]),
    ("bert", "road(variant=3)", ConfigError, ["road"]),
    ("bert", "adalora(warmup=0.6, final=0.4)", ConfigError, ["adalora"]),
    ("bert", "bdlora(rank=6, blocks=4)", SiteError, ["bdlora"]),
    ("bert", "glora(weights=none, prompt=none, biases=none)", SiteError, ["glora"]),
    ("bert", "kasa(rank=64)", SiteError, ["kasa"]),
    ("bert", "mica(rank=64)", SiteError, ["mica"]),
    ("bert", "psoft(rank=1)", ConfigError, ["psoft"]),
    ("bert", "pfeiffer(activation=swoosh)", ConfigError, ["swoosh"]),
    ("bert", "houlsby(source=input)", ConfigError, ["source"]),
    ("bert", "parallel(source=block)", ConfigError, ["source"]),
    ("bert", "compacter(size=8, n=3)", ConfigError, ["does not divide 8, 32"]),
    ("bert", "mam(length=0)", ConfigError, ["length"]),
    ("bert", "mam(size=0)", ConfigError, ["size"]),
    ("bert", "prefix(length=0)", ConfigError, ["length"]),
    ("bert", "prefix(middle=0)", ConfigError, ["middle"]),
    ("bert", "prompt(length=0)", ConfigError, ["length"]),
    ("bert", "p-tuning(encoder=gru)", ConfigError, ["gru"]),
    ("llama", "cartridge(length=3, frozen=3)", ConfigError, ["none is left"]),
    ("bert", "freeze(top=0)", ConfigError, ["0"]),
    ("bert", "freeze(top=3)", ConfigError, ["3"]),
    ("bert", "full(decay=0)", ConfigError, ["decay"]),
    ("bert", "unfreeze(size=0)", ConfigError, ["size"]),
    ("bert", "unfreeze(decay=0)", ConfigError, ["decay"]),
    ("bert", "unfreeze(every=0)", ConfigError, ["every"]),
    ("bert", "staged(every=0)", ConfigError, ["every"]),
    ("bert", "staged(patience=0)", ConfigError, ["patience"]),
    ("bert", "staged(decay=0)", ConfigError, ["decay"]),
    ("bert", "staged(groups=['top 0'])", ConfigError, ["top 0"]),
    ("bert", "staged(groups=[norm])", ConfigError, ["norm"]),
    ("bert", "staged(groups=['encoder.9.*'])", ConfigError, ["encoder.9.*"]),
    ("bert", "head(size=3)", ConfigError, ["size"]),
    ("bert", "loreft(rank=33)", SiteError, ["orthonormal", "at most 32"]),
    ("llama", "unipelt(gate=sequense)", ConfigError, ["'sequence'"]),
    *(("bert", {"loreft": {"positions": wrong}}, ConfigError, ["positions"]) for wrong in (
        "", "+", "f0", "f1+", "+l1", "l1+f1", "f1l1", "first", "f-1"
    )),
    # Sites that a method cannot have.
    ("bert", "lora(ranks={attn.k: 4, attn.q: 2})", SiteError, ["ranks names sites", "- 'attn.k'"]),
    ("bert", "dora(sites=[ffn, attn.q])", SiteError, ["does not support these sites", "- ffn\n"]),
    ("bert", "pissa(sites=[ffn, attn.q])", SiteError, ["does not support these sites", "- ffn\n"]),
    ("bert", "ia3(sites=[ffn])", SiteError, ["- ffn\n"]),
    ("llama", "alora(sites=[ffn])", SiteError, ["does not support"]),
    ("bert", "loreft(sites=[attn.q])", SiteError, ["does not support"]),
    ("bert", "scalar-mix(sites=[decoder.mix])", SiteError, ["decoder.mix"]),
    ("bert", "unipelt(sites=[])", ConfigError, ["which method they get"]),
    ("bert", "unipelt(sites=[attn.*, ffn])", ConfigError, ["which method they get"]),
    ("mixtral", "unipelt(sites=[ffn.experts.down])", SiteError, ["routed experts"]),
    *(("mixtral", f"{spec}, experts=shared)", SiteError, ["is a weight of experts"])
      for spec in ("lora(sites=[attn.q]", "ia3(sites=[attn.v]")),
    ("qwen2", "bitfit(sites=[ffn.up])", SiteError, ["no bias at the sites"]),
    ("bert", "chosen(names=[encoder.0.attn.q.weigth, embeddings])", SiteError,
     ["did you mean 'encoder.0.attn.q.weight'"]),
    # Models.
    ("olmo", "norms", SiteError, ["norms"]),
    (("bert", "features"), "head", AttachError, ["head"]),
    *(("bloom", spec, SiteError, ["residual stream", "- ffn\n"]) for spec in (
        "pfeiffer(source=block)", "parallel(source=residual)", "compacter(source=block)"
    )),
    *((architecture, "prefix(positions=keys)", SiteError, ["keys have no separate positions"])
      for architecture in ("bert", "gpt2")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "spec", "error", "texts"), REFUSED)
def test_what_a_method_cannot_do_is_refused(kind, spec, error, texts):
    architecture, *task = (kind,) if isinstance(kind, str) else kind
    model = tiny_models.model(architecture, *task)
    with pytest.raises(error) as raised:
        ah.attach(model, spec)
    assert [text for text in texts if text not in f"{raised.value}\n"] == []
    assert not ah.adapters(model)


# The number of parameters by hand: widths are 32, the middle is 48.


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
