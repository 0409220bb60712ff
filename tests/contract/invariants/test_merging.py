"""What is merged: checkpoints, tied and shared weights, several adapters, refusals.

That merging keeps the outputs, and unmerging restores every byte, holds for every cell of the
matrix: test_cells.py.
"""

import copy

import pytest
import torch

import adapterhub as ah
from adapterhub.backbones.compare import TOLERANCE
from adapterhub.backbones.weights import read_weight
from adapterhub.errors import AttachError, MergeError, MismatchError
from adapterhub.inference.merged_checkpoint import auto_class, write_checkpoint
from adapterhub.methods import METHODS
from adapterhub.methods.common.site_module import OutputModule
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer
from tests.kit.matrix import ALL_CELLS, REFUSED, example, mergeable
from tests.kit.selection import long_table


def logits(model):
    inputs = tiny_models.batch()
    more = {"decoder_input_ids": inputs["input_ids"]} if model.config.is_encoder_decoder else {}
    return tiny_models.logits(model, **inputs, **more).float()


def assert_within_tolerance(actual, expected, dtype=torch.float32):
    """Check the largest difference against the tolerance of merging in this dtype."""
    assert (actual - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


def with_adapter(model, method, std=0.1, name="default"):
    """Attach the example of a method's name, or a spec."""
    spec = example(method) if method in tuple(METHODS) else method
    adapter = ah.attach(model, spec, name=name)
    tiny_models.scramble(adapter, std=std)
    return adapter


# By default each method on an encoder, and one on each architecture.
RELOADED = [
    (m, a)
    for m, a in ALL_CELLS
    if a in tiny_models.MATRIX
    and (m == "lora" or a == "bert" or tiny_models.FULL_MATRIX)
    and (m, a) not in REFUSED
    and m in mergeable()
]


@long_table(("method", "architecture"), RELOADED, parts=6, nightly=4)
def test_auto_model_loads_the_checkpoint(method, architecture, tmp_path):
    model = tiny_models.usual_model(architecture, id2label={0: "ham", 1: "eggs", 2: "spam"})
    model.config._name_or_path = "acme/tiny"
    with_adapter(model, method)
    live = logits(model)
    made = ah.merge(model)
    identity = ah.attach(model, "parallel").manifest().backbone
    assert identity.id == f"tiny--with-default--{identity.fingerprint.rpartition('-')[2][:12]}"
    ah.detach(model)
    differences = write_checkpoint(model, word_tokenizer(), tmp_path / "out", made.expected)
    assert differences == made.differences
    again = auto_class(model).from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    assert_within_tolerance(logits(again), live)
    assert again.config.id2label == {0: "ham", 1: "eggs", 2: "spam"}
    assert ah.attach(again, "parallel").manifest().backbone.fingerprint == identity.fingerprint


TIED = [("gpt2", {}), ("gemma3_text", {}), ("bart", {}), ("t5", {"tie_word_embeddings": True})]


@pytest.mark.parametrize(("architecture", "config"), TIED)
@pytest.mark.parametrize("spec", ["full", ["lora", "full"]])
def test_trained_tied_embeddings_stay_tied(architecture, config, spec, tmp_path):
    task = "seq2seq" if architecture in tiny_models.ENCODER_DECODERS else "causal-lm"
    model = tiny_models.model(architecture, task, **config)
    tied = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is tied
    before = tied.clone()
    with_adapter(model, spec)
    live = logits(model)
    made = ah.merge(model)
    new = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is new
    assert not torch.equal(new, before)
    write_checkpoint(model, word_tokenizer(), tmp_path / "out", made.expected)
    again = auto_class(model).from_pretrained(tmp_path / "out")
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert_within_tolerance(logits(again), live)
    ah.unmerge(model)
    ah.detach(model)
    assert model.get_output_embeddings().weight is tied
    assert torch.equal(tied, before)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "gpt_neox", "llama", "modernbert", "t5"])
def test_different_methods_merge_at_the_same_sites(architecture):
    """Their order matters, and methods that read weights read those of the backbone."""
    model = tiny_models.usual_model(architecture)
    sites = "sites=['attn.k', 'attn.v', 'ffn.down']"
    methods = [f"lora({sites})", "ia3", f"dora({sites})", "norms", f"pissa({sites})"]
    with_adapter(model, methods)
    live = logits(model)
    ah.merge(model)
    assert_within_tolerance(logits(model), live)
    ah.unmerge(model)
    assert torch.equal(logits(model), live)


def test_a_merged_weight_is_computed_in_fp32_and_rounded_once():
    model = tiny_models.model("gpt2").bfloat16()
    adapter = with_adapter(model, "lora(sites=['attn.qkv'])")
    host = model.transformer.h[0].attn.c_attn
    module = adapter.placed[0].module
    expected = read_weight(host) + module.scale * module.B @ module.A
    ah.merge(model)
    assert host.weight.dtype == torch.bfloat16
    torch.testing.assert_close(
        host.weight.detach(), expected.T.to(torch.bfloat16), rtol=2**-8, atol=0
    )
    changed = (host.weight != expected.T.to(torch.bfloat16)).float().mean()
    assert changed < 0.001  # a different summation order in fp32 rounds a few values differently


def test_a_difference_above_the_tolerance_changes_nothing():
    model = tiny_models.model("bert").bfloat16()
    base = copy.deepcopy(model.state_dict())
    adapter = with_adapter(model, "lora")
    live = logits(model)
    with pytest.raises(MergeError, match=r"max \|difference\|") as error:
        ah.merge(model, tolerance=1e-9)
    assert "--base-dtype fp32" in error.value.hint
    assert adapter.active
    assert torch.equal(logits(model), live)
    with torch.no_grad():
        adapter.placed[0].module.B.fill_(float("inf"))
    with pytest.raises(MergeError, match="nan"):
        ah.merge(model, tolerance=0.5)
    adapter.detach()
    assert all(torch.equal(v, base[k]) for k, v in model.state_dict().items())


def test_a_shared_weight_adapted_in_one_module_is_refused(monkeypatch):
    """So is a bias where a projection has none, and a merge that would compute something else."""
    model = tiny_models.model("bert")
    first, second = (layer.attention.self for layer in model.base_model.encoder.layer)
    second.query.weight = first.query.weight
    with_adapter(model, "lora(layers='first 1')")
    with pytest.raises(MergeError, match=r"0\.attention\.self\.query\.weight: other modules share"):
        ah.merge(model)

    class Shifted(OutputModule):
        affine = True

        def forward(self, x, y):
            return y + 1

    model = tiny_models.model("llama")
    adapter = with_adapter(model, "lora(sites=['attn.q'])")
    placed = adapter.placed[0]
    model.get_submodule(placed.site.host).adapterhub._modules[placed.key] = Shifted()
    with pytest.raises(MergeError, match="adds a bias to a projection"):
        ah.merge(model)
    assert adapter.active
    adapter.detach()
    with_adapter(model, "lora")
    monkeypatch.setattr("adapterhub.merging.merge._swaps", lambda adapters: ())
    with pytest.raises(MergeError, match="does not compute"):
        ah.merge(model)


def test_several_adapters_merge_in_the_given_order():
    """Those that are inactive, by name only."""
    model = tiny_models.model("gpt2")
    for name, method in [("a", "ia3"), ("b", "lora(sites=['attn.k'])")]:
        with_adapter(model, method, std=0.3, name=name)
    ah.activate(model)
    with pytest.raises(AttachError, match="no adapter is active") as error:
        ah.merge(model)
    assert "'a'" in error.value.hint
    with pytest.raises(AttachError, match="no adapter named 'c'"):
        ah.merge(model, "c")
    ah.activate(model, "b", "a")
    live = logits(model)
    ah.activate(model, "a", "b")
    assert not torch.allclose(logits(model), live, atol=1e-3), "their order matters"
    with pytest.raises(AttachError, match="other adapters are attached"):
        ah.merge(model, "a")
    ah.activate(model)
    made = ah.merge(model, "b", "a")
    assert [adapter.name for adapter in made.adapters] == ["b", "a"]
    assert_within_tolerance(logits(model), live)
    ah.unmerge(model)
    assert torch.equal(logits(model), live)


def test_merges_are_undone_in_reverse_order():
    model = tiny_models.model("bert")
    bare = logits(model)
    for name in "ab":
        with_adapter(model, ["lora", "norms"], name=name)
        ah.merge(model)
    both = logits(model)
    third = with_adapter(model, "lora", name="third")
    with pytest.raises(AttachError, match="were attached to the merged model") as error:
        ah.unmerge(model)
    assert error.value.offenders == ("'third'",)
    third.detach()
    assert torch.equal(logits(model), both)
    copied = copy.deepcopy(model)
    for name in "ba":
        (adapter,) = ah.unmerge(model)
        assert adapter.name == name
        adapter.detach()
    assert torch.equal(logits(model), bare)
    assert torch.equal(logits(copied), both)
    with pytest.raises(MergeError, match="nothing is merged"):
        ah.unmerge(model)
    with pytest.raises(AttachError, match="no adapter is attached"):
        ah.merge(model)


def test_a_merged_model_has_its_own_fingerprint(tmp_path):
    """And the labels of the adapter's head."""
    model = tiny_models.model("bert", id2label=dict(enumerate("abc")))
    adapter = with_adapter(model, "lora")
    base = adapter.manifest().backbone
    adapter.save(tmp_path / "adapter")
    ah.merge(model)
    with pytest.raises(MismatchError, match="trained on a different backbone"):
        ah.load(model, tmp_path / "adapter")
    assert model.config.id2label == dict(enumerate("abc"))
    ours = with_adapter(model, "norms", name="ours").manifest().backbone
    assert ours.fingerprint != base.fingerprint
    assert ours.id != base.id
    ah.detach(model)
    ah.unmerge(model)
    assert adapter.manifest().backbone == base
