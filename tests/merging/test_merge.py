"""`ah.merge` and `ah.unmerge` as a user calls them; the contract suite merges every method."""

from __future__ import annotations

import pytest
import torch
import transformers

import adapterhub as ah
from adapterhub.adapters.state import get_state
from adapterhub.anatomy.backbone import CHILD
from adapterhub.backbones.probe import probe
from adapterhub.errors import AttachError, MergeError
from adapterhub.merging.affine import merged_weight_and_bias
from tests.kit import tiny_models
from tests.kit.compare import differences, observed


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


def test_a_bias_needs_a_place():
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora(sites=['attn.q'])")
    host = model.get_submodule(adapter.placed[0].site.host)
    host.bias = None
    adapter.placed[0].module.forward = lambda x, y: y + 1
    with pytest.raises(MergeError, match="bias"):
        merged_weight_and_bias(host, host._modules[CHILD])
