"""Options, sites and models that methods refuse: the error names what is wrong."""

from __future__ import annotations

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
    ("bert", "rslora(rank=0)", ConfigError, ["rank"]),
    ("bert", "lora(dropout=-0.1)", ConfigError, ["dropout"]),
    ("bert", "lora(dropout=1.5)", ConfigError, ["dropout"]),
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
