"""Updates of modules that are not sites compute here what they compute in peft."""

from __future__ import annotations

import pytest

from tests.kit import tiny_models
from tests.kit.peers import compare_import, linear_names, lora_config
from tests.kit.selection import long_table

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
CLASS, LM = "classification", "causal-lm"
PISSA, OLORA = {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}
CASES = [
    ("bert", CLASS, PISSA),
    ("bert", CLASS, {"init_lora_weights": "mica", "r": 2}),
    ("albert", CLASS, OLORA),  # layers that are used several times
    ("xlnet", CLASS, OLORA),  # a rank above the size of the head
    ("gpt2", LM, PISSA),  # a tied output layer, whose embedding changes too
    ("gpt2", LM, {"use_dora": True}),
    ("opt", LM, OLORA),  # projections around the layers
    ("llama", LM, PISSA),
]


@long_table(("architecture", "task", "options"), CASES, 2)
def test_every_linear_layer(tmp_path, architecture, task, options):
    saved = {"modules_to_save": []} if task == CLASS else {}
    names = linear_names(tiny_models.model(architecture, task))
    config = lora_config(task, target_modules=names, **saved | options)
    compare_import(tmp_path, architecture, config, task, atol=3e-4, std=0.05)


EMBEDDINGS = {"gpt2": {}, "gemma3_text": {"use_dora": True}, "llama": {"ensure_weight_tying": True}}


@pytest.mark.parametrize("architecture", EMBEDDINGS)
@pytest.mark.parametrize("with_output", [False, True])
def test_tied_embeddings_and_output_layers(tmp_path, architecture, with_output):
    model = tiny_models.model(architecture, LM, tie_word_embeddings=True)
    adapted = [model.get_input_embeddings(), *[model.get_output_embeddings()] * with_output]
    names = [n for n, m in model.named_modules() if any(m is each for each in adapted)]
    names += linear_names(model)[:1]
    config = lora_config(LM, target_modules=names, **EMBEDDINGS[architecture])
    options = {"tie_word_embeddings": True}
    compare_import(tmp_path, architecture, config, LM, atol=3e-4, std=0.05, **options)
