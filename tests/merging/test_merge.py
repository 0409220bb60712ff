"""`ah.merge` and `ah.unmerge` as a user calls them; the contract suite merges every method."""

import itertools

import pytest
import torch
import transformers

import adapterhub as ah
from adapterhub.adapters.state import get_state
from adapterhub.backbones.probe import probe
from adapterhub.errors import AttachError, MergeError
from adapterhub.merging.merge import blockers
from tests.kit import own_models, tiny_models
from tests.kit.compare import differences, observed
from tests.kit.own_models import expert_logits, expert_model, redraw
from tests.kit.selection import long_table


@pytest.mark.parametrize("method", ["lora", "full"])
def test_weights_of_another_dtype_are_not_put_back(method):
    model = tiny_models.model("bert")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tiny_models.scramble(ah.attach(model, method))
    ah.merge(model)
    model.half()
    with pytest.raises(MergeError, match=r"converted to torch\.float16") as error:
        ah.unmerge(model)
    assert error.value.hint == "model.to(torch.float32) first"
    model.to(torch.float32)
    ah.unmerge(model)
    ah.detach(model)
    after = model.state_dict()
    merged = [name for name in before if not torch.equal(after[name], before[name])]
    halved = [name for name in before if torch.equal(after[name], before[name].half().float())]
    assert set(merged) <= set(halved)


def test_a_refused_merge_leaves_what_was_active():
    model = tiny_models.model("bert")
    ah.attach(model, "lora", name="a")
    ah.attach(model, "pfeiffer", name="b")
    ah.activate(model, "a")
    with pytest.raises(MergeError, match="cannot be merged"):
        ah.merge(model, "a", "b")
    adapters = get_state(model).adapters
    assert [name for name, adapter in adapters.items() if adapter.active] == ["a"]


@pytest.mark.parametrize(
    ("architecture", "task", "most"),
    [("bert", "masked-lm", 2), ("gpt2", "causal-lm", 2), ("llama", "causal-lm", 70),
     ("t5", "seq2seq", 2), ("bart", "seq2seq", 70)],
)  # fmt: skip
def test_new_tokens_are_rows_of_the_merged_model(architecture, task, most, backbones):
    tokens = [f"<{number}>" for number in range(most)]
    place = str(backbones(architecture))
    model, tokenizer = ah.load_backbone(place, task=task, new_tokens=tokens)
    before = observed(model)
    adapter = ah.attach(model, "lora")
    tiny_models.scramble(adapter)
    expected = probe(model)
    ah.merge(model)
    assert len(tokenizer) <= len(model.get_input_embeddings().weight)
    assert tokenizer.tokenize("<1>") == ["<1>"]
    assert probe(model).keys() == expected.keys()
    ah.unmerge(model)
    ah.detach(model)
    assert differences(before, observed(model)) == []


def test_what_no_batch_is_made_for_is_merged_with_a_warning():
    """CLIP reads pairs of a picture and a text: the merged weights are those without a check."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text = {**sizes, "num_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 12}
    vision = {**sizes, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).eval()
    batch = {"input_ids": torch.randint(3, 40, (2, 6)), "pixel_values": torch.randn(2, 3, 16, 16)}
    adapter = ah.attach(model, "lora(sites=['attn.q', 'attn.v', 'patch_embedding'])")
    tiny_models.scramble(adapter)
    with torch.no_grad():
        expected = model(**batch).logits_per_image
        with pytest.warns(UserWarning, match=r"CLIPModel .* merge\(model, batch=inputs\) compares"):
            merged = ah.merge(model)
        assert merged.differences == {}
        torch.testing.assert_close(model(**batch).logits_per_image, expected)
        ah.unmerge(model)
        assert ah.merge(model, batch=batch).difference <= 1e-5
        ah.unmerge(model)
        torch.testing.assert_close(model(**batch).logits_per_image, expected)
    with pytest.raises(ValueError, match="input_ids"):  # the model's own
        ah.merge(model, batch={"pixel_values": batch["pixel_values"]})


@pytest.mark.parametrize("error", [AttachError("ours"), torch.OutOfMemoryError("no memory")])
def test_what_is_not_of_the_batch_is_no_warning(error, monkeypatch):
    """A merge that could not be compared for another reason does not go on."""
    model = tiny_models.model("bert")
    tiny_models.scramble(ah.attach(model, "lora"))
    before = observed(model)

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(model, "forward", fails)
    with pytest.raises(type(error)):
        ah.merge(model)
    monkeypatch.undo()
    assert not differences(before, observed(model))


# Adapters of experts and of routers merged into the weights of mixtures of experts.

SPECS = (
    "lora(sites=[ffn.experts.*], rank=3)",
    "lora(sites=[ffn.experts.*], rank=3, experts=shared)",
    "ia3(sites=[ffn.experts.*])",
    "lora(sites=[ffn.router], rank=2)",
    "ia3(sites=[ffn.router])",
)


@long_table(("model_type", "spec"), itertools.product(own_models.TYPES, SPECS), parts=8, nightly=3)
def test_a_merged_model_computes_the_same_and_unmerge_restores_every_bit(model_type, spec):
    model = expert_model(model_type)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapter = ah.attach(model, spec)
    redraw(adapter)
    changed = {placed.site.host for placed in adapter.placed}
    with torch.no_grad():
        expected = expert_logits(model)
        # Values this far from zero round differently on each kind of processor.
        ah.merge(model, tolerance=1e-3)
        assert list(model.state_dict()) == list(before)
        torch.testing.assert_close(expert_logits(model), expected, atol=1e-4, rtol=1e-3)
        after = model.state_dict()
        moved = {name for name in before if not torch.equal(after[name], before[name])}
        assert moved
        assert {name.rpartition(".")[0] for name in moved} == changed
        ah.unmerge(model)
        assert torch.equal(expert_logits(model), expected)
    ah.detach(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("experts", own_models.IMPLEMENTATIONS)
def test_a_merged_checkpoint_is_a_plain_one(tmp_path, experts):
    """transformers loads it with any implementation, and computes the same."""
    model = expert_model("gpt_oss", experts)
    redraw(ah.attach(model, "lora(sites=[ffn.experts.*, attn.q, ffn.router])"))
    with torch.no_grad():
        expected = expert_logits(model)
        ah.merge(model)
        model.save_pretrained(tmp_path / "merged")
        plain = type(model).from_pretrained(tmp_path / "merged", experts_implementation=experts)
        torch.testing.assert_close(expert_logits(plain.eval()), expected, atol=2e-5, rtol=1e-4)
    ah.unmerge(model)
    ah.detach(model)


def test_an_adapter_of_experts_beside_others():
    model = expert_model("mixtral")
    redraw(ah.attach(model, SPECS[0], name="a"))
    redraw(ah.attach(model, "lora(sites=[attn.q, ffn.experts.down, ffn.router])", name="b"), seed=1)
    with torch.no_grad():
        ah.activate(model, "a", "b")
        expected = expert_logits(model)
        ah.merge(model, "a", "b")
        torch.testing.assert_close(expert_logits(model), expected, atol=2e-5, rtol=1e-4)
        ah.unmerge(model)
    with pytest.raises(MergeError, match="cannot be combined") as error:
        ah.combine(model, ["a", "b"])
    assert "decoder.ffn.experts.gate_up" in error.value.offenders
    ah.detach(model)


def test_experts_in_a_dtype_that_cannot_be_merged_are_refused():
    model = expert_model("mixtral")
    host = next(own_models.holders(model))
    ah.attach(model, SPECS[0])
    original = host._parameters["down_proj"]
    codes = torch.zeros(original.shape, dtype=torch.uint8)
    host._parameters["down_proj"] = torch.nn.Parameter(codes, requires_grad=False)
    try:
        with pytest.raises(MergeError, match="cannot merge into the weights") as error:
            ah.merge(model)
        assert any("down_proj: it is stored as uint8" in each for each in error.value.offenders)
    finally:
        host._parameters["down_proj"] = original
        ah.detach(model)


def test_a_bias_that_a_projection_lacks_is_no_part_of_a_checkpoint():
    adapter = ah.attach(tiny_models.model("llama"), "beft")
    assert any("adds a bias to a projection that has none" in each for each in blockers(adapter))
