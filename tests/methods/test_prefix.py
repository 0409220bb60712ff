"""Prefix tuning: its equation and its network, with padding; MAM, which has one; LLaMA-Adapter."""

from dataclasses import replace

import every_type
import pytest
import torch

import adapterhub as ah
from adapterhub.anatomy.backbone import CHILD
from adapterhub.backbones.weights import read_bias, read_weight
from adapterhub.errors import SiteError
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.methods import METHODS
from adapterhub.methods.prefix import Prefix
from adapterhub.recipe.recipe import TrainOptions
from tests.kit import tiny_models
from tests.kit.selection import long_table
from tests.kit.tiny_adapters import attention_tensors


def test_attention_reads_the_prefix_before_keys_and_values():
    """attention(Q, [P_k; K], [P_v; V])."""
    model = tiny_models.model("bert", "features")
    adapter = ah.attach(model, "prefix(length=3)")
    tiny_models.scramble(adapter, std=0.5)
    seen = attention_tensors(model, model.encoder.layer[0].attention.self)
    prefix = adapter.tensors()["encoder.0.attn.kv.prefix.prefix"].detach()
    rows, _, width = seen["query"].shape

    def heads(tensor):
        return tensor.unflatten(-1, (4, -1)).transpose(1, 2)

    key = heads(torch.cat([prefix[0].expand(rows, -1, -1), seen["key"]], dim=1))
    value = heads(torch.cat([prefix[1].expand(rows, -1, -1), seen["value"]], dim=1))
    shares = (heads(seen["query"]) @ key.transpose(2, 3) / (width / 4) ** 0.5).softmax(-1)
    expected = (shares @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(seen["output"], expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def latent():
    """Return a model whose keys have 10 features in each head, and its values 8."""
    return every_type.build("deepseek_v3", "AutoModelForCausalLM", tiny=True)


def test_latent_attention_reads_keys_and_values_of_two_sizes(latent, monkeypatch):
    adapter = ah.attach(latent, "prefix(length=3)")
    tiny_models.scramble(adapter, std=0.5)
    attention = latent.model.layers[0].self_attn
    slot, seen = attention._modules[CHILD], []
    eager = slot.eager
    monkeypatch.setattr(
        slot, "eager", lambda *given, **options: seen.append(given) or eager(*given, **options)
    )
    ids = torch.randint(5, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    latent.set_attn_implementation("eager")
    with torch.no_grad():
        latent(input_ids=ids)
    _, _, key, value, *_ = seen[0]
    tensors, heads = adapter.tensors(), attention.num_heads
    for kind, own in (("keys", key), ("values", value)):
        prefix = tensors[f"decoder.0.attn.kv.prefix.{kind}"].detach()
        assert prefix.shape == (3, heads * own.shape[-1])
        assert own.shape[2] == 3 + 7
        expected = prefix.unflatten(-1, (heads, -1)).transpose(0, 1).expand(2, -1, -1, -1)
        assert torch.equal(own[:, :, :3], expected)
    assert key.shape[-1] != value.shape[-1]
    assert adapter.count() == Prefix(length=3).count(adapter.anatomy)


def test_prefixes_of_two_sizes_are_saved_as_plain_ones_and_differ_between_rows(latent, tmp_path):
    ids = torch.randint(5, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    networks = [Prefix(length=n, reparametrize=True, middle=4) for n in (2, 4)]
    expected = []
    with torch.no_grad():
        for name, method in zip(("one", "two"), networks, strict=True):
            adapter = ah.attach(latent, method, name=name)
            tiny_models.scramble(adapter, std=0.5)
            assert adapter.count() == method.count(adapter.anatomy)
            expected.append(latent(input_ids=ids).logits[len(expected)])
            adapter.save(tmp_path / name)
            adapter.detach()
        for name in ("one", "two"):
            assert not ah.load(latent, tmp_path / name).methods[0].reparametrize
        with ah.route(latent, ["one", "two"]):
            found = latent(input_ids=ids).logits
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_a_network_computes_the_reparametrized_prefix():
    """[P_k; P_v] = W_site tanh(W P' + b) + b_site."""
    spec = "prefix(length=3, reparametrize=true, middle=5)"
    adapter = ah.attach(tiny_models.model("bert", "features"), spec)
    tiny_models.scramble(adapter)
    tensors = {name: tensor.detach() for name, tensor in adapter.tensors().items()}
    trunk, path = "encoder.0.attn.kv.prefix.trunk", "encoder.1.attn.kv.prefix.outer"
    inner = tensors[f"{trunk}.prefix"] @ tensors[f"{trunk}.inner.weight"].T
    middle = (inner + tensors[f"{trunk}.inner.bias"]).tanh()
    both = middle @ tensors[f"{path}.weight"].T + tensors[f"{path}.bias"]
    (module,) = (p.module for p in adapter.placed if p.site.id == "encoder.1.attn.kv")
    expected = torch.stack([both[:, :32], both[:, 32:]])
    torch.testing.assert_close(torch.stack(module()), expected, atol=1e-5, rtol=1e-5)


def test_a_reparametrized_prefix_has_a_lower_learning_rate():
    def rate(spec):
        adapter = ah.attach(tiny_models.model("bert"), spec)
        (group,) = (
            g for g in AdapterTrainee(adapter).param_groups(TrainOptions()) if g["name"] != "head"
        )
        return group["lr"]

    assert rate("prefix(reparametrize=true, middle=4)") == pytest.approx(rate("prefix") / 30)


PADDED_METHODS = ("prefix", "llama-adapter", "prompt", "p-tuning")
PADDED = (
    "llama", "exaone4_5", "hyperclovax_vision_v2", "moss_transcribe_diarize", "gemma3", "qwen2_vl",
    "afmoe", "apertus", "aria", "audioflamingo3", "qwen3", "mistral", "phi", "t5", "bart", "gptj",
)  # fmt: skip
# Windows, tables and buckets of positions, states beside attention.
PADDED_BEHIND_A_PROMPT = (
    "gemma3_text", "modernbert", "mpnet", "m2m_100", "roformer", "bamba", "falcon_h1", "jamba",
    "lfm2", "qwen3_next",
)  # fmt: skip


def padded(model, ids, side):
    """Return the outputs of a text with three tokens of padding on a side, without those."""
    padding, one = torch.ones(1, 3, dtype=torch.long), torch.ones_like(ids)
    parts = {"left": (padding, ids), "right": (ids, padding), "none": (ids,)}[side]
    masks = [torch.zeros_like(part) if part is padding else one for part in parts]
    given = {"input_ids": torch.cat(parts, 1), "attention_mask": torch.cat(masks, 1)}
    decodes = model.config.is_encoder_decoder
    with torch.no_grad():
        scores = model(**given, **({"decoder_input_ids": ids} if decodes else {})).logits
    return scores if decodes or side != "left" else scores[:, 3:]


@long_table(
    ("model_type", "method"),
    [(t, m) for t in PADDED for m in PADDED_METHODS]
    + [(t, "prompt") for t in PADDED_BEHIND_A_PROMPT],
    6,
    nightly=4,
)
def test_padding_changes_no_text(model_type, method):
    """Positions start behind padding: a prefix has none, and what is read of it depends on them."""
    auto = every_type.autos(model_type, every_type.ADAPTED)[0]
    model = every_type.build(model_type, auto, tiny=True)
    ids = torch.arange(6, 13)[None]
    bare = padded(model, ids, "none")
    if not torch.allclose(padded(model, ids, "left"), bare, atol=1e-5):
        pytest.skip("padding on the left changes the bare model: it has learned positions")
    try:
        adapter = ah.attach(model, method)
    except ah.AdapterhubError as error:
        pytest.skip(error.problem)
    tiny_models.scramble(adapter, std=0.5)
    expected = padded(model, ids, "none")
    assert not torch.allclose(expected, bare, atol=1e-4)
    for side in ("left", "right"):
        found = padded(model, ids, side)[:, : expected.shape[1]]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_stack_that_counts_padding_itself_refuses_it_on_the_left():
    model = every_type.build("roformer", "AutoModelForMaskedLM", tiny=True)
    ah.attach(model, "prefix")
    ids = torch.arange(6, 13)[None]
    padded(model, ids, "right")
    with pytest.raises(SiteError, match="counts padding on the left") as error:
        padded(model, ids, "left")
    assert "padding_side" in str(error.value)
    with ah.disabled(model):
        padded(model, ids, "left")


PARTS = ["prefix(length=3)", "scaled-parallel(size=4, scale=2)"]


def test_mam_is_the_composition_of_its_two_methods():
    logits = []
    for method in ("mam(length=3, size=4, scale=2)", PARTS):
        model = tiny_models.model("bert")
        torch.manual_seed(0)
        adapter = ah.attach(model, method)
        tiny_models.scramble(adapter)
        with torch.no_grad():
            logits.append((set(adapter.tensors()), model(**tiny_models.batch()).logits))
    (names, outputs), (expected_names, expected) = logits
    assert names == expected_names
    assert torch.equal(outputs, expected)


# Without rotary positions, so that queries are those of the projection.
WITHOUT_ROTATION = ("bert", "gpt2", "openai-gpt", "bloom", "mpt")


def seen(model, site):
    """Return what the first layer's attention reads, and what it attends to."""
    found = []
    hosts = [model.get_submodule(anatomy_site(model, site, name).host) for name in ("q", "o")]
    handles = [h.register_forward_pre_hook(lambda _, a: found.append(a[0])) for h in hosts]
    with torch.no_grad():
        model(**tiny_models.batch())
    for handle in handles:
        handle.remove()
    return found


def anatomy_site(model, site, name):
    return ah.anatomy_of(model).sites[f"{site.id.removesuffix('kv')}{name}"]


def projected(model, site, name, x):
    own = anatomy_site(model, site, name)
    host = model.get_submodule(own.host)
    y = torch.nn.functional.linear(x, read_weight(host, own.part), read_bias(host, own.part))
    return y.unflatten(-1, (model.config.num_attention_heads, -1)).transpose(-2, -3)


def expected_change(model, placed, x):
    """Compute g softmax(s q (W_k P + b_k)^T) (W_v P + b_v), (batch, tokens, d)."""
    prompt, gate = placed.module.P.detach(), placed.module.g.detach()
    q = projected(model, placed.site, "q", x)
    key, value = (projected(model, placed.site, name, prompt) for name in ("k", "v"))
    weights = (q @ key.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    return (gate * weights @ value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("together", ["", "prefix(length=2)"], ids=["alone", "with a prefix"])
@pytest.mark.parametrize("architecture", WITHOUT_ROTATION)
def test_what_llama_adapter_adds_is_its_equation(architecture, together):
    model = tiny_models.model(architecture)
    if together:
        tiny_models.scramble(ah.attach(model, together, name="other"))
    adapter = ah.attach(model, "llama-adapter(length=3)", name="own")
    ah.activate(model, *(["other"] if together else []))
    placed = adapter.placed[0]
    x, before = seen(model, placed.site)
    ah.activate(model, *(["other"] if together else []), "own")
    assert torch.equal(seen(model, placed.site)[1], before) or together
    tiny_models.scramble(adapter, std=1.0)
    _, after = seen(model, placed.site)
    change = expected_change(model, placed, x)
    assert change.abs().max() > 0.05
    torch.testing.assert_close(after, before + change, atol=2e-5, rtol=1e-4)


def test_an_attention_without_projections_of_its_own_is_refused():
    model = tiny_models.model("bert")
    anatomy = ah.anatomy_of(model)
    fused = {name: site for name, site in anatomy.sites.items() if not name.endswith("attn.k")}
    with pytest.raises(SiteError, match="projections of keys") as error:
        list(METHODS["llama-adapter"]().plan(replace(anatomy, sites=fused)))
    assert error.value.offenders == ("encoder.0.attn.kv", "encoder.1.attn.kv")
