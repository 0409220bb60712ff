"""aLoRA in both libraries and directions: equal logits, or a refusal by name."""

from __future__ import annotations

import peft
import pytest
import torch

import adapterhub as ah
from adapterhub.errors import AdapterhubError
from tests.kit import tiny_models
from tests.kit.peers import edit
from tests.kit.tiny_models import logits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
INVOCATION = [40, 41]
MODELS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn"]}


def inputs(side):
    """Return three texts: invoked twice, once, and never; the last two are padded."""
    batch = tiny_models.padded_batch(side)
    ids = batch["input_ids"]
    ids[0, 1:3] = ids[0, 5:7] = ids[1, 4:6] = torch.tensor(INVOCATION)
    return batch


def of_peft(architecture, folder, **options):
    """Save an adapter of peft; return the model with it."""
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=MODELS[architecture], task_type="CAUSAL_LM",
        alora_invocation_tokens=INVOCATION, init_lora_weights=False, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_models.language_model(architecture), config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("architecture", MODELS)
def test_logits_are_equal_in_both_directions(architecture, side, tmp_path):
    theirs, batch = of_peft(architecture, tmp_path / "peft"), inputs(side)
    ours = tiny_models.language_model(architecture)
    bare = logits(ours, **batch)
    adapter = ah.load(ours, tmp_path / "peft", any_backbone=True)
    (method,) = adapter.methods
    assert (method.name, method.invocation) == ("alora", (40, 41))
    real = batch["attention_mask"].bool()
    expected = logits(theirs, **batch)
    torch.testing.assert_close(logits(ours, **batch)[real], expected[real], atol=2e-5, rtol=0)
    assert not torch.allclose(expected[:2][real[:2]], bare[:2][real[:2]], atol=1e-2)
    assert torch.equal(logits(ours, **batch)[2], bare[2])
    adapter.export(tmp_path / "back")
    again = tiny_models.language_model(architecture)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "back")
    torch.testing.assert_close(logits(again, **batch)[real], expected[real], atol=2e-5, rtol=0)


def test_generated_texts_are_equal(tmp_path):
    theirs, ids = of_peft("llama", tmp_path), inputs("left")
    ours = tiny_models.language_model("llama")
    ah.load(ours, tmp_path, any_backbone=True)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": tiny_models.PAD}
    assert torch.equal(ours.generate(**ids, **options), theirs.generate(**ids, **options))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"task_type": None}, "applies no update"), ({"use_dora": True}, "use_dora"),
     ({"init_lora_weights": "olora"}, "olora")],
)  # fmt: skip
def test_what_peft_computes_otherwise_is_refused(changed, reason, tmp_path):
    of_peft("llama", tmp_path)
    edit(tmp_path, **changed)
    with pytest.raises(AdapterhubError) as error:
        ah.load(tiny_models.language_model("llama"), tmp_path, any_backbone=True)
    assert any("alora" in each and reason in each for each in error.value.offenders)


def test_gguf_has_the_invocation(tmp_path):
    gguf = pytest.importorskip("gguf")
    model = tiny_models.language_model("llama")
    ah.attach(model, {"alora": {"invocation": [7, 9]}}, name="a")
    model._adapterhub.adapters["a"].export(tmp_path / "a.gguf", format="gguf")
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    assert fields["adapter.alora.invocation_tokens"].contents() == [7, 9]
