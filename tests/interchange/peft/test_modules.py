"""peft's checkpoints of modules that are not of transformers: equal outputs in both directions."""

import copy

import peft
import pytest
import torch
from torch import nn

import adapterhub as ah
from adapterhub.errors import MismatchError
from tests.kit import tiny_models
from tests.kit.compare import difference
from tests.kit.own_models import GROUPED, KINDS, OTHERWISE, network
from tests.kit.peers import compare_import, linear_names, lora_config
from tests.kit.selection import long_table

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 2e-5
LOW_RANK = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
CASES = [  # there is no DoRA at an attention in peft, nor at an embedding here
    (kind, variant) for kind in KINDS for variant in LOW_RANK
    if variant != "dora" or not ("attention" in kind or "embedding" in kind)
]  # fmt: skip


@long_table(("kind", "variant"), CASES, 4)
def test_low_rank_updates_are_equal_in_both_directions(kind, variant, tmp_path):
    module, x = network(kind)
    config = peft.LoraConfig(
        target_modules=["host", "last"], r=6, init_lora_weights=False, **LOW_RANK[variant]
    )
    torch.manual_seed(3)
    theirs = peft.get_peft_model(copy.deepcopy(module), config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    bare = copy.deepcopy(module)
    sites = ["host.q", "host.o", "last"] if "attention" in kind else ["host", "last"]
    adapter = ah.attach(module, variant, rank=2, sites=sites)
    tiny_models.scramble_parameters(adapter, std=0.2)
    if kind in (*GROUPED, *OTHERWISE):
        with pytest.raises(MismatchError, match="groups, dilates or pads"):
            ah.load(bare, tmp_path / "theirs", any_backbone=True)
        with pytest.raises(MismatchError, match="groups, dilates or pads"):
            adapter.export(tmp_path / "ours")
        return
    adapter.export(tmp_path / "ours")
    expected = theirs(x)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(bare), tmp_path / "ours").eval()
    assert difference(again(x), module(x)) <= TOLERANCE
    assert difference(bare(x), expected) > 1e-3
    ah.load(bare, tmp_path / "theirs", any_backbone=True)
    assert difference(bare(x), expected) <= TOLERANCE


CONFIGS = {
    "loha": peft.LoHaConfig(target_modules=["host"], r=2, init_weights=False),
    "hra": peft.HRAConfig(target_modules=["host"], r=2, init_weights=False),
    "ia3": peft.IA3Config(
        target_modules=["host"], feedforward_modules=[], init_ia3_weights=False
    ),
    "oft": peft.OFTConfig(target_modules=["host"], oft_block_size=3, init_weights=False),
    "lokr": peft.LoKrConfig(target_modules=["host"], r=2, init_weights=False),
    "loha, effective": peft.LoHaConfig(
        target_modules=["host"], r=2, init_weights=False, use_effective_conv2d=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_other_kinds_at_a_kernel_are_equal_or_refused(name, tmp_path):
    module, x = network("conv2d")
    torch.manual_seed(3)
    theirs = peft.get_peft_model(copy.deepcopy(module), CONFIGS[name]).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    expected = theirs(x)
    if name in ("oft", "lokr", "loha, effective"):
        with pytest.raises(MismatchError):
            ah.load(module, tmp_path / "theirs", any_backbone=True)
        return
    adapter = ah.load(module, tmp_path / "theirs", any_backbone=True)
    assert difference(module(x), expected) <= TOLERANCE
    adapter.export(tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(network("conv2d")[0], tmp_path / "ours").eval()
    assert difference(again(x), expected) <= TOLERANCE


@pytest.mark.parametrize("spec", ["lora(sites=['0', '1'], rank=2)", "dora(sites=['0'], rank=2)"])
def test_a_quantized_layer_in_both_directions(spec, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def quantized():
        torch.manual_seed(0)
        plain = nn.Linear(64, 32)
        layer = bitsandbytes.nn.Linear8bitLt(64, 32, has_fp16_weights=False)
        layer.load_state_dict(plain.state_dict())
        return nn.Sequential(layer.to("cpu"), nn.Linear(32, 4)).eval()

    module, x = quantized(), torch.randn(3, 64)
    adapter = ah.attach(module, spec)
    tiny_models.scramble_parameters(adapter, std=0.2)
    expected = module(x)
    adapter.export(tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(quantized(), tmp_path / "ours").eval()
    assert difference(theirs(x), expected) <= TOLERANCE
    theirs.save_pretrained(tmp_path / "theirs")
    adapter.save(tmp_path / "native")
    ah.detach(module)
    for folder in ("theirs", "native"):
        ah.load(module, tmp_path / folder, name=folder, any_backbone=folder == "theirs")
        assert difference(module(x), expected) <= TOLERANCE
        ah.detach(module)


# Updates of modules of transformers that are not sites.

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
