"""The features that vLLM does not serve are listed before training."""

from __future__ import annotations

import pytest
import tiny_models
import torch

from adapterhub.adapters.export import blocking
from adapterhub.interchange.peft.exporter import RANKS

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


VLLM = {
    "rank": ("llama", "lora(rank=24)", ["--max-lora-rank 32"]),
    "too high": ("llama", "rslora(rank=1024)", ["at most 512"]),
    "ranks": ("llama", {"lora": {"ranks": {"attn.q": 4}}}, ["one alpha / rank"]),
    "dora": ("llama", "dora", ["DoRA"]),
    "kind": ("llama", "ia3", ["only LORA"]),
    "whole": ("llama", ["lora", "chosen"], ["modules_to_save"]),
    "bias": ("qwen2", ["lora", "bitfit"], ["bias"]),
    "all": ("gpt2", ["dora(rank=24)", "bitfit"], ["GPT2LMHeadModel", "rank", "DoRA", "bias"]),
    "none": ("llama", "lora(rank=16)", []),
}


def test_unsupported_features_are_listed_before_training(subtests):
    for case in VLLM:
        with subtests.test(case=case):
            architecture, spec, reasons = VLLM[case]
            with torch.device("meta"):
                model = tiny_models.model(architecture, "causal-lm")
            found = blocking(model, spec, "vllm")
            for reason in reasons:
                assert any(reason in line for line in found), (reason, found)
            assert bool(found) == bool(reasons)
            assert not hasattr(model, "_adapterhub")
            assert max(RANKS) == 512
