"""Modules of transformers' models that have no role: convolutions, embeddings, poolers, heads."""

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import adapterhub as ah
from adapterhub.anatomy.projections import weights_read
from adapterhub.errors import AttachError, SiteError
from tests.kit import tiny_models
from tests.kit.selection import long_table
from tests.kit.tiny_adapters import check_life
from tests.kit.tiny_models import scramble_parameters

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:peft", "ignore::FutureWarning", "ignore:the files or the model do not name"
)
WITH_WEIGHTS = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Embedding)
SMALL = {"num_labels": 3, "hidden_sizes": [8, 16], "depths": [1, 2]}
# Models of pictures and sounds: the options of a small one, a pattern, and how many sites it has.
NETWORKS = {
    "resnet": (SMALL | {"embedding_size": 8}, "convolution", 11),
    "convnext": (SMALL | {"num_stages": 2}, "dwconv", 3),
    "mobilenet_v2": ({"num_labels": 3, "depth_multiplier": 0.1}, "*.conv_3x3.convolution", 17),
    "efficientnet": (
        {"num_labels": 3, "width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
        "*.depthwise_conv",
        7,
    ),
    "vit": (
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
         "intermediate_size": 16, "patch_size": 8, "num_labels": 3},
        "embeddings.patch_embeddings.projection",
        1,
    ),
    "wav2vec2": (
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3,
         "intermediate_size": 16, "conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3],
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "classifier_proj_size": 8,
         "num_conv_pos_embedding_groups": 2},
        "conv",  # that of positions has a weight of two others
        2,
    ),
}  # fmt: skip


def network(kind: str, seed: int = 0) -> tuple[transformers.PreTrainedModel, Tensor]:
    """Return a small classifier of a kind and a batch for it."""
    config = transformers.AutoConfig.for_model(kind, **NETWORKS[kind][0])
    sound = kind == "wav2vec2"
    task = "Audio" if sound else "Image"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = getattr(transformers, f"AutoModelFor{task}Classification").from_config(config)
        batch = torch.randn(3, 1200) if sound else torch.randn(3, 3, 32, 32)
        for module in made.modules():
            if isinstance(module, nn.BatchNorm2d):  # those of a fresh model change nothing
                module.running_mean.normal_(std=0.1)
    return made.eval(), batch


def logits(model: nn.Module, batch: Tensor | dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        output = model(**batch) if isinstance(batch, dict) else model(batch)
        return output.logits if hasattr(output, "logits") else output[0]


def language_batch(model) -> dict[str, Tensor]:
    batch = tiny_models.batch()
    ids = {"decoder_input_ids": batch["input_ids"]} if model.config.is_encoder_decoder else {}
    return batch | ids


@long_table("architecture", tiny_models.MATRIX, 3)
def test_each_module_with_a_weight_that_runs_is_a_site(architecture):
    model = tiny_models.model(architecture, "features")
    anatomy = ah.anatomy_of(model)
    ran = set()
    hooked = {m: path for path, m in model.named_modules() if isinstance(m, WITH_WEIGHTS)}
    for module, path in hooked.items():
        module.register_forward_hook(lambda *_, path=path: ran.add(path))
    logits(model, language_batch(model))
    hosts = {site.host for site in anatomy.every()}
    counted = {  # tables of positions that count them themselves
        path for m, path in hooked.items()
        if isinstance(m, nn.Embedding) and type(m).forward is not nn.Embedding.forward
        and not hasattr(m, "embed_scale")
    }  # fmt: skip
    read = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in weights_read(module)
    }
    assert ran - hosts == (ran & counted) | (ran & read) - hosts


@long_table("architecture", tiny_models.MATRIX, 3)
def test_no_site_is_silent(architecture):
    """An update anywhere changes what the model computes, and a merged one computes the same."""
    model = tiny_models.language_model(architecture) if architecture in tiny_models.GENERATORS \
        else tiny_models.usual_model(architecture)  # fmt: skip
    anatomy, batch = ah.anatomy_of(model), language_batch(model)
    sites = [site.id for site in anatomy.by_path.values() if site.kind == "linear"]
    bare = logits(model, batch)
    adapter = ah.attach(model, ah.LoRA(rank=2, sites=sites))
    assert torch.allclose(logits(model, batch), bare, atol=1e-6)
    modules = {placed.site.id: placed.module for placed in adapter.placed}
    assert sorted(modules) == sorted(sites)
    for site, module in modules.items():
        with torch.no_grad():
            saved = {name: each.clone() for name, each in module.named_parameters()}
            scramble_parameters(module, std=0.2)
            assert (logits(model, batch) - bare).abs().max() > 1e-4, site
            for name, parameter in module.named_parameters():
                parameter.copy_(saved[name])
    ah.detach(model)
    assert torch.equal(logits(model, batch), bare)


@pytest.mark.parametrize("kind", NETWORKS)
@long_table("method", ["lora", "dora", "loha", "oft", "ia3", "bitfit"], 6, nightly=2)
def test_the_life_of_an_adapter_of_convolutions(kind, method, tmp_path):
    _, pattern, count = NETWORKS[kind]
    model, batch = network(kind)
    large = max(1.0, float(logits(model, batch).abs().max()))
    adapter = check_life(
        model, lambda model: logits(model, batch),
        method if method == "bitfit" else {method: {"sites": [pattern]}}, tmp_path / "a",
        again=lambda: network(kind)[0], loaded=0, merged=2e-5 * large, std=0.05, effect=1e-5,
        batch={model.main_input_name: batch},
    )  # fmt: skip
    assert len(adapter.placed) == (0 if method == "bitfit" else count)


def test_a_path_is_that_in_the_base_model_so_that_other_heads_take_the_adapter(tmp_path):
    model = tiny_models.model("bert", "tagging")
    adapter = ah.attach(model, "lora(sites=['embeddings.word_embeddings', 'query'])")
    roles = {placed.site.role for placed in adapter.placed}
    assert roles == {"word_embeddings", "attn.q"}
    scramble_parameters(adapter)
    adapter.save(tmp_path / "a")
    states = []
    for task in ("features", "tagging"):
        other = tiny_models.model("bert", task)
        other.base_model.load_state_dict(model.base_model.state_dict(), strict=False)
        ah.load(other, tmp_path / "a", head=False, any_backbone=True)
        states.append(other.base_model(**tiny_models.batch())[0])
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_names_are_roles_first_then_paths(subtests):
    model = tiny_models.model("bert")
    anatomy = ah.anatomy_of(model)
    for pattern, roles in {
        "ffn": {"ffn"},
        "query": {"attn.q"},
        "attention.self.query": {"attn.q"},
        "*.self.*": {"attn.q", "attn.k", "attn.v"},
        "dense": {"attn.o", "ffn.up", "ffn.down", "dense"},
        "pooler.dense": {"dense"},
        "*embeddings": {"word_embeddings", "position_embeddings", "token_type_embeddings"},
    }.items():
        with subtests.test(pattern):
            assert {site.role for site in anatomy.select([pattern])} == roles
    top = anatomy.select(["query", "word_embeddings"], "top 1")
    assert [site.id for site in top] == ["encoder.1.attn.q", "embeddings.word_embeddings"]
    with pytest.raises(SiteError, match="no such site") as error:
        anatomy.select(["self.query", "uery", "embeddings"])
    assert [line.split(";")[0] for line in error.value.offenders] == ["'uery'", "'embeddings'"]


@pytest.mark.parametrize(("architecture", "task"), [
    ("gpt2", "causal-lm"), ("llama", "causal-lm"), ("t5", "seq2seq"), ("bart", "seq2seq"),
])  # fmt: skip
def test_embeddings_and_output_layer_beside_new_tokens(architecture, task, backbones, tmp_path):
    """Both are at one module: new tokens have their rows, and all others the update."""
    folder = str(backbones(architecture))
    made = {}
    for name, tokens in {"with": ["<a>", *(f"<n{i}>" for i in range(50))], "without": []}.items():
        model, tokenizer = ah.load_backbone(folder, task=task, new_tokens=tokens)
        hosts = {model.get_output_embeddings(), *(
            m for m in model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == 64
        )}  # fmt: skip
        sites = [
            site.id for site in ah.anatomy_of(model).by_path.values()
            if model.get_submodule(site.host) in hosts
        ]  # fmt: skip
        torch.manual_seed(0)
        adapter = ah.attach(model, ah.LoRA(rank=2, sites=sites))
        assert len({placed.site.host for placed in adapter.placed}) >= 2
        scramble_parameters(adapter) if name == "without" else None
        made[name] = model, tokenizer, adapter
    model, tokenizer, adapter = made["with"]
    with torch.no_grad():
        for key, tensor in made["without"][2].tensors().items():
            adapter.tensors()[key].copy_(tensor)
    old = {"input_ids": tokenizer("the movie was good", return_tensors="pt")["input_ids"]}
    old |= {"decoder_input_ids": old["input_ids"]} if model.config.is_encoder_decoder else {}
    expected = logits(made["without"][0], old)
    known = tokenizer.convert_tokens_to_ids("<a>")
    torch.testing.assert_close(logits(model, old)[..., :known], expected[..., :known])
    new = {k: v.clone() for k, v in old.items()}
    for ids in new.values():
        ids[:, 1] = tokenizer.convert_tokens_to_ids("<n49>")
    found = logits(model, new)
    assert torch.isfinite(found).all()
    adapter.save(tmp_path / "a")
    fresh, _ = ah.load_backbone(folder, task=task)
    ah.load(fresh, tmp_path / "a")
    assert torch.equal(logits(fresh, new), found)
    ah.detach(fresh)
    assert not any("adapterhub" in name for name in fresh.state_dict())


def of_language(architecture, task):
    model = tiny_models.model(architecture, task)
    return model, language_batch(model)


PEFT = [
    (of_language, ("gpt2", "causal-lm"), ["wte", "c_attn"]),
    (of_language, ("bart", "seq2seq"), ["embed_tokens", "q_proj"]),  # scaled or not, and tied
    (of_language, ("gemma3_text", "causal-lm"), ["embed_tokens", "q_proj", "lm_head"]),
    (of_language, ("bert", "classification"), ["word_embeddings", "pooler.dense", "query"]),
    (network, ("resnet",), r".*\.convolution"),
    (network, ("vit",), r".*\.embeddings.patch_embeddings.projection"),
    (network, ("wav2vec2",), r".*conv_layers.\d+\.conv"),
]


@long_table(("build", "kind", "names"), PEFT, 2)
def test_what_peft_targets_by_path_is_the_same_here(build, kind, names, tmp_path):
    theirs, batch = build(*kind)
    config = peft.LoraConfig(target_modules=names, r=2, init_lora_weights=False)
    wrapped = peft.get_peft_model(theirs, config).eval()
    wrapped.save_pretrained(tmp_path / "theirs")
    expected = logits(wrapped, batch)
    model, _ = build(*kind)
    adapter = ah.load(model, tmp_path / "theirs")
    torch.testing.assert_close(logits(model, batch), expected, atol=1e-5, rtol=1e-4)
    assert not adapter.changed  # low-rank, as there
    adapter.export(tmp_path / "again")
    again = peft.PeftModel.from_pretrained(build(*kind)[0], tmp_path / "again").eval()
    torch.testing.assert_close(logits(again, batch), expected, atol=1e-5, rtol=1e-4)


def mamba():
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4, time_step_rank=4
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.MambaForCausalLM(config).eval()


def test_lora_trains_every_site_of_a_state_space_by_default():
    """Its `dt_proj` is multiplied by outside of itself: no role, and adapted where it is named."""
    model, batch = mamba(), {"input_ids": tiny_models.batch()["input_ids"]}
    adapter = ah.attach(model, "lora")
    assert {placed.site.role for placed in adapter.placed} == {
        "mixer.in_proj", "mixer.x_proj", "mixer.out_proj"
    }  # fmt: skip
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert all(parameter.grad is not None for parameter in adapter.parameters())
    ah.detach(model)
    bare = logits(model, batch)
    adapter = ah.attach(model, "lora(sites=['dt_proj', 'conv1d'])")
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert all(parameter.grad is not None for parameter in adapter.parameters())
    scramble_parameters(adapter)
    adapted = logits(model, batch)
    assert (adapted - bare).abs().max() > 1e-4
    written = model.generate(**batch, max_new_tokens=5, do_sample=False)
    ah.merge(model, batch=batch)
    torch.testing.assert_close(logits(model, batch), adapted, atol=1e-5, rtol=1e-4)
    assert torch.equal(model.generate(**batch, max_new_tokens=5, do_sample=False), written)


def test_two_kinds_of_changes_at_one_module_are_refused():
    """What is attached stays: neither takes the place of the other."""
    model, batch = mamba(), {"input_ids": tiny_models.batch()["input_ids"]}
    scramble_parameters(ah.attach(model, "pfeiffer(sites=['mixer'])", name="first"))
    expected = logits(model, batch)
    with pytest.raises(AttachError, match="is adapted") as error:
        ah.attach(model, "lora(sites=['dt_proj'])", name="second")
    assert "detach" in error.value.hint
    assert torch.equal(logits(model, batch), expected)
    assert list(ah.adapters(model)) == ["first"]
