"""peft loads our exports with equal outputs; what it cannot express is refused."""

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import adapterhub as ah
from adapterhub.adapters.export import blocking, compare, in_peft
from adapterhub.anatomy.build import anatomy_of
from adapterhub.errors import AdapterhubError, MismatchError
from adapterhub.interchange.peft import exporter
from adapterhub.interchange.peft.exporter import to_peft
from adapterhub.interchange.peft.importer import from_peft
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.matrix import example
from tests.kit.peers import compare_export, outputs, same_bits
from tests.kit.selection import ALL, cases_of, long_table

CLASS, LM, S2S = "classification", "causal-lm", "seq2seq"
IN_DECODER = "prefix(length=3, positions=true, sites=['decoder.attn.kv'])"
THREE = {"t5": {"num_layers": 3, "num_decoder_layers": 3},
         "bart": {"encoder_layers": 3, "decoder_layers": 3}}  # fmt: skip
# What test_differential.py does not compare: architecture, task, method, options, and whether the
# import of the export has the same bits, or other methods.
EXPORTS = {
    **{name: (a, CLASS, spec, {}, True) for name, (a, spec) in {
        "lora": ("bert", "lora"),
        "whole head": ("bart", "lora"),
        "ranks": ("bert", {"lora": {"rank": 4, "ranks": {"attn.q": 2, "encoder.1.attn.v": 3}}}),
        "ia3-inputs": ("bert", {"ia3": {"sites": ["attn.o", "ffn.down", "attn.k"],
                                        "inputs": ["attn.o"]}}),
        "fused": ("gpt2", {"lora": {"sites": ["attn.qkv", "ffn.down"], "rank": 3}}),
    }.items()},
    **{name: (a, CLASS, spec, {}, False) for name, (a, spec) in {
        "heads": ("gpt_neox", "lora"),  # q and v are parts of one module
        "bias-some": ("bert", ["lora", {"bitfit": {"sites": ["attn.q", "ffn.up"]}}]),
        "embeddings": ("bert", ["lora", "chosen"]),
        "two": ("bert", [{"lora": {"sites": ["attn.q"]}},
                         {"lora-plus": {"sites": ["attn.v"], "alpha": 3}}]),
        "norms-top": ("bert", "norms(layers='top 1')"),
        "dora-parts": ("gpt2", {"dora": {"ranks": {"attn.q": 2}}}),
        "dora-heads": ("gpt_neox", "dora"),
        "ia3-fused": ("gpt2", "ia3"),
        "ia3-halves": ("phi3", "ia3"),
        "shared layers": ("albert", "lora"),
        "several-on-one": ("gpt2", {"lora": {"ranks": {"attn.q": 2}}}),
        # A bias of a module that is otherwise frozen, and a whole norm.
        "biases and norms": ("bert", [{"lora": {"sites": ["attn.q"]}}, "bitfit(sites=['attn.o'])",
                                      {"chosen": {"names": ["encoder.0.attn.norm.*"]}}]),
        # Biases that are no module's: DeBERTa's q_bias and v_bias.
        "other biases": ("deberta", ["lora", "bitfit"]),
    }.items()},
    "pissa": ("gpt2", CLASS, "pissa(rank=4)", {"atol": 1e-4}, False),
    **{method: ("t5", S2S, f"{method}(length=5)", {"atol": 2e-5}, True)
       for method in ("prompt", "p-tuning", "cpt")},
    "prefix": ("llama", LM, "prefix(length=5, positions=true, sites=['attn.kv'], "
               "reparametrize=true)", {"atol": 2e-5}, True),
    # With an odd number of layers, 2 i modulo it is another layer for each i.
    **{f"prefix after an encoder, {a}": (a, S2S, IN_DECODER, {"atol": 2e-5, **layers}, True)
       for a, layers in THREE.items()},
    **{f"llama-adapter, {a}": (a, LM, "llama-adapter(length=3)", {"atol": 2e-5}, True)
       for a in ("llama", "mistral")},
    **{f"cartridge, {a}": (a, LM, "cartridge(length=5, frozen=2)", {"atol": 2e-5}, True)
       for a in ("gpt2", "llama")},
}  # fmt: skip


@long_table("case", EXPORTS, 3)
def test_an_export_gives_equal_outputs(tmp_path, case):
    architecture, task, spec, options, same = EXPORTS[case]
    pair = compare_export(tmp_path / "out", architecture, spec, task, **options)
    if same:
        same_bits(*pair)
    if case.startswith("cartridge"):
        assert peft.PeftConfig.from_pretrained(tmp_path / "out").num_frozen_tokens == 2


Q, V = {"sites": ["attn.q"]}, {"sites": ["attn.v"]}
PART = "ia3(sites=[attn.q], inputs=[attn.q])"
CACHED = "prefix(length=3, positions=true, sites=['encoder.attn.kv'])"
REFUSED = {  # architecture, task, method, and what the error says
    "two kinds": ("llama", LM, ["lora", "prompt"], "a peft checkpoint contains only one of"),
    "no positions": ("llama", LM, "prefix", "prefix(positions=true)"),
    "some layers": ("llama", LM, "prefix(positions=true, layers='top 1')", "every self-attention"),
    "another method": ("llama", LM, ["lora", "houlsby"], "houlsby: peft has no such method"),
    "edits": ("llama", LM, "loreft", "loreft: peft has no such method"),
    "dora and lora": ("llama", LM, [{"dora": Q}, {"lora": V}], "DoRA for all updates"),
    "updated and trained": ("llama", LM, [{"lora": Q}, {"chosen": {"names": ["*.attn.q.weight"]}}],
                            "both updated and trained whole"),
    "not the topmost": ("llama", LM, "llama-adapter(layers='first 1')", "topmost"),
    # A LoRA at a sublayer reads the sublayer's input, which no module of peft does.
    **{f"at {site}": (a, CLASS, f"lora(rank=2, sites=['{site}'])", "peft adapts projections only")
       for a, site in (("bert", "ffn"), ("llama", "attn"), ("t5", "attn.norm"))},
    "no ids": ("llama", LM, "alora", "by the ids of tokens"),
    "other updates beside alora": ("llama", LM, [{"alora": {"invocation": [7]}},
                                   "lora(sites=[attn.k])"], "one invocation"),
    # peft's layout for two caches cannot give each layer its own prefix.
    "after an encoder, t5": ("t5", S2S, IN_DECODER, "that of layer 2 i"),
    "after an encoder, bart": ("bart", S2S, IN_DECODER, "that of layer 2 i"),
    # peft would rescale that of the other parts too.
    **{f"the input of a part, {a}": (a, CLASS, PART, "decoder.0.attn.q: peft rescales the input of "
                                     "the whole") for a in ("gpt2", "gpt_neox")},
    "a last token": ("gpt2", CLASS, "prompt(length=4)", "counts_padding=true"),
    "no cache, albert": ("albert", CLASS, CACHED, "needs a KV cache for prefixes, and albert has",
                         "each of the 4 layers, albert has 2 self-attentions"),
    "no cache, distilbert": ("distilbert", CLASS, CACHED, "prefixes, and distilbert has none"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_one_error_lists_what_peft_cannot_express(tmp_path, case):
    architecture, task, spec, *reasons = REFUSED[case]
    adapter = ah.attach(tiny_models.model(architecture, task), spec)
    with pytest.raises(MismatchError) as error:
        adapter.export(tmp_path / "out")
    assert all(reason in str(error.value) for reason in reasons)
    assert not (tmp_path / "out").exists()


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


# More may be exported: what `blocking` does not block has to be, with equal logits.
GO = {"lora", "rslora", "lora-plus", "dora", "pissa", "ia3", "norms"}


@pytest.mark.parametrize("method", cases_of(METHODS, 8))
def test_every_method(tmp_path, method):
    folder, model = tmp_path / method, tiny_models.model("bert")
    with torch.device("meta"):
        known = blocking(tiny_models.model("bert"), example(method))
    try:
        adapter = ah.attach(model, example(method))
    except AdapterhubError:
        assert known
        return
    fixed = {n: t.clone() for n, t in adapter.tensors().items() if not t.requires_grad}
    tiny_models.scramble(adapter)
    for name, tensor in fixed.items():
        adapter.tensors()[name].copy_(tensor)
    if known:
        with pytest.raises(MismatchError) as caught:
            adapter.export(folder)
        assert list(caught.value.offenders) == known
        assert not folder.exists()
        assert method not in GO
        return
    adapter.export(folder)
    theirs = peft.PeftModel.from_pretrained(tiny_models.model("bert"), folder)
    atol = 1e-4 if any(not t.requires_grad for t in adapter.tensors().values()) else 2e-5
    torch.testing.assert_close(outputs(theirs), outputs(model), atol=atol, rtol=1e-5)


def test_a_whole_module_around_an_updated_one_is_refused(tmp_path):
    model = tiny_models.model("deberta")
    name = next(n for n, _ in model.named_parameters() if n.endswith("q_bias"))
    parameters = {"chosen": {"names": [anatomy_of(model).key(name)]}}
    adapter = ah.attach(model, [{"ia3": {"sites": ["attn.qkv"]}}, parameters])
    with pytest.raises(MismatchError) as caught:
        adapter.export(tmp_path / "out")
    holder = name.rpartition(".")[0]
    assert f"{holder}: both updated and trained whole" in caught.value.offenders


ranks = st.dictionaries(
    st.sampled_from(["attn.q", "attn.v", "encoder.0.attn.q", "encoder.*.ffn.up", "encoder.1.*"]),
    st.integers(1, 6),
    max_size=4,
)
MODEL = tiny_models.model("bert")


@settings(max_examples=25 if ALL else 10)
@given(rank=st.integers(1, 6), alpha=st.integers(1, 32), ranks=ranks, rooted=st.booleans())
def test_any_ranks_round_trip_through_peft(rank, alpha, ranks, rooted):
    options = {
        "rank": rank,
        "alpha": alpha,
        "ranks": ranks,
        "sites": ["attn.q", "attn.v", "ffn.up"],
    }
    adapter = ah.attach(MODEL, {"rslora" if rooted else "lora": options})
    try:
        tiny_models.scramble(adapter)
        files = to_peft(adapter.export_source())
        back = from_peft(files, adapter.anatomy)
        own = adapter.saved_tensors()
    finally:
        adapter.detach()
    assert own.keys() == back.tensors.keys()
    assert all(torch.equal(own[name], back.tensors[name]) for name in own)
    again = ah.attach(MODEL, [dict(spec) for spec in back.methods])
    scales = {placed.site.id: placed.module.scale for placed in again.placed}
    again.detach()
    assert scales == pytest.approx({p.site.id: p.module.scale for p in adapter.placed}, rel=1e-12)


# Outputs of an adapter beside those of its export in peft.


def test_problems_are_returned_and_name_no_local_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = tiny_models.model("bert")
    model.config._name_or_path = "acme/gone"
    ah.attach(model, "lora").save(tmp_path / "a")
    export = in_peft(tmp_path / "a")
    assert export.files is None
    assert "acme/gone" in export.problems[0]


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_difference_is_found(monkeypatch, is_trained):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora")
    if is_trained:
        tiny_models.scramble(adapter, std=0.05)
    pattern_options = exporter.pattern_options
    monkeypatch.setattr(
        exporter,
        "pattern_options",
        lambda updates, rooted: pattern_options(updates, rooted) | {"lora_alpha": 1},
    )
    problems = compare(lambda: adapter)
    assert bool(problems) == is_trained  # before training, alpha has no effect
    if is_trained:
        assert "peft computes another logits: max |difference| " in problems[0]


@pytest.mark.parametrize("method", ["lora", "dora", "ia3"])
def test_every_role_is_equal_or_refused(method):
    exported = []
    roles = {site.role for site in anatomy_of(tiny_models.usual_model("gpt2")).sites.values()}
    for role in sorted(roles):
        model = tiny_models.usual_model("gpt2")
        try:
            adapter = ah.attach(model, {method: {"sites": [role]}})
            tiny_models.scramble(adapter)
            to_peft(adapter.export_source())
        except AdapterhubError:
            continue
        assert compare(lambda made=adapter: made) == [], role
        exported.append(role)
    assert len(exported) >= 2


def test_a_head_alone_is_refused():
    adapter = ah.attach(tiny_models.model("bert", num_labels=2), "head")
    with pytest.raises(MismatchError, match="only the task head"):
        to_peft(adapter.export_source())
