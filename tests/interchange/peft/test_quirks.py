"""Where peft does not reproduce its own outputs, as described in docs/guides/interchange.md."""

from __future__ import annotations

import peft
import pytest
import torch

import adapterhub as ah
from tests.kit import tiny_models
from tests.kit.peers import lora_config, outputs, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def peft_model(folder, architecture="gpt2"):
    return peft.PeftModel.from_pretrained(
        tiny_models.model(architecture, "causal-lm"), folder
    ).eval()


def test_a_randomized_pissa_differs_each_time_peft_loads_it(tmp_path):
    config = lora_config("causal-lm", target_modules=["c_attn"], init_lora_weights="pissa_niter_1")
    folder = trained(tmp_path, "gpt2", config, "causal-lm")
    loaded = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loaded.append(outputs(peft_model(folder)))
    assert not torch.allclose(*loaded, atol=1e-3)
    model = tiny_models.model("gpt2", "causal-lm")
    ah.load(model, folder)
    assert outputs(model).isfinite().all()


def test_peft_generates_with_other_positions_behind_a_prompt_and_left_padding(tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    folder = trained(tmp_path, "gpt2", config, "causal-lm")
    ours = tiny_models.model("gpt2", "causal-lm")
    ah.load(ours, folder)
    ids = tiny_models.batch(rows=1, length=6)["input_ids"]
    padded = torch.cat([torch.full((1, 4), tiny_models.PAD), ids], dim=1)

    def first_logits(model, input_ids):
        mask = (input_ids != tiny_models.PAD).long()
        generated = model.generate(
            input_ids=input_ids, attention_mask=mask, max_new_tokens=1, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return generated.logits[0]

    theirs = peft_model(folder)
    expected = first_logits(theirs, ids)
    torch.testing.assert_close(first_logits(ours, ids), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(first_logits(ours, padded), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(first_logits(theirs, padded), expected, atol=1e-2)
