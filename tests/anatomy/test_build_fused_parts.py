"""Fused projections: each part is the features that the backbone uses for it, and an update of a
part equals the update of its dense rows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import adapterhub as ah
from adapterhub.anatomy import FAMILIES
from tests.kit import tiny_models
from tests.kit.selection import long_table
from tests.kit.tiny_models import logits

HEADS, HEAD_DIM, HIDDEN, FFN = 4, 8, 32, 48
FUSED = tuple(a for a, family in FAMILIES.items() if {"attn.qkv"} & family.stacks[0].sites.keys())
GATED = tuple(
    a for a, family in FAMILIES.items() if {"ffn.gate_up"} & family.stacks[0].sites.keys()
)
PER_HEAD = tuple(a for a in FUSED if "heads" in FAMILIES[a].stacks[0].fused.values())
# The sizes of q, k and v where they differ: two key-value heads, or one.
GROUPED = {"phi3": (32, 16, 16), "falcon": (32, 8, 8), "gpt_bigcode": (32, 8, 8)}
ON_INTERFACE = ("gpt2", "gpt_neox", "phi3", "modernbert", "gpt_bigcode")
ROW = {"q": 0, "k": 1, "v": 2}


def dense_rows(architecture, role):
    """Compute the rows of a fused weight that belong to a role, independently of the package."""
    rows = torch.arange(3 * HIDDEN)
    name = role.split(".")[1]
    if name in ("gate", "up"):
        return torch.arange(2 * FFN).view(2, FFN)[("gate", "up").index(name)]
    if architecture in GROUPED:
        return torch.arange(sum(GROUPED[architecture])).split(GROUPED[architecture])[ROW[name]]
    if architecture in PER_HEAD:
        return rows.view(HEADS, 3, HEAD_DIM)[:, ROW[name]].flatten()
    return rows.view(3, HIDDEN)[ROW[name]]


PARTS = [(a, f"attn.{name}") for a in FUSED for name in "qkv"]
PARTS += [(a, f"ffn.{name}") for a in GATED for name in ("gate", "up")]


def model_of(architecture):
    """Make a model without relative positions: DeBERTa's attention is then content to content."""
    options = {"relative_attention": False} if architecture == "deberta" else {}
    return tiny_models.model(architecture, **options)


@long_table(("architecture", "role"), PARTS, 4)
def test_an_update_of_a_part_equals_the_update_of_its_rows(architecture, role):
    model = model_of(architecture)
    reference = copy.deepcopy(model)
    adapter = ah.attach(model, {"lora": {"rank": 4, "alpha": 12, "sites": [role]}})
    tiny_models.scramble(adapter)
    rows = dense_rows(architecture, role)
    assert adapter.placed
    for placed in adapter.placed:
        assert placed.site.d_out == len(rows)
        weight = reference.get_submodule(placed.site.host).weight.data
        weight = weight if weight.shape[0] > weight.shape[1] else weight.T  # Conv1D
        weight[rows] += 3.0 * placed.module.B.data @ placed.module.A.data
    for name, module in adapter.head.own.items():
        reference.get_submodule(name).load_state_dict(module.state_dict())
    torch.testing.assert_close(logits(model), logits(reference), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(logits(model), logits(model_of(architecture)), atol=1e-3)


@long_table(("architecture", "role"), PARTS, 4)
def test_a_changed_input_of_a_part_is_that_of_its_rows_alone(architecture, role):
    """W_part (l * x), in a stack, in an average, in the rows of a route, and merged."""
    model = model_of(architecture)
    scaling = ah.attach(model, {"ia3": {"sites": [role], "inputs": [role]}}, name="scale")
    updating = ah.attach(model, {"lora": {"rank": 2, "sites": [role]}}, name="update")
    for adapter in (scaling, updating):
        tiny_models.scramble(adapter, std=0.5)
    site, update = updating.placed[0].site, updating.placed[0].module
    factors = scaling.placed[0].module.scale.detach()
    host, rows = model.get_submodule(site.host), dense_rows(architecture, role)
    weight, x = host.weight.detach().clone(), torch.randn(4, 3, site.d_in)
    weight = weight if weight.shape[0] > weight.shape[1] else weight.T  # Conv1D

    def output(factors, share):
        y, changed = F.linear(x, weight, host.bias), factors * x
        y[..., rows] += F.linear(changed - x, weight[rows])
        y[..., rows] += share * update.scale * changed @ update.A.T @ update.B.T
        return y

    stack, mean = ("scale", "update"), ah.Average(["scale", "update"])
    terms = {"scale": (factors, 0), stack: (factors, 1), None: (torch.ones(()), 0)}
    terms[mean] = (factors + 1) / 2, 0.5
    with torch.no_grad():
        expected = {composition: output(*each) for composition, each in terms.items()}
        for routed in ([*terms], ["scale", stack, None, stack]):  # in groups, and as stacks of rows
            with ah.route(model, routed):
                for n, (y, composition) in enumerate(zip(host(x), routed, strict=True)):
                    close(y, expected[composition][n])
        for composition in terms:
            ah.activate(model, *([] if composition is None else [composition]))
            close(host(x), expected[composition])
        ah.merge(model, *stack)
        close(host(x), expected[stack])


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def recorded(model, path, inputs):
    """Record the input or the output of a module during a forward pass."""
    records = {}
    hook = model.get_submodule(path).register_forward_hook(
        lambda _, args, output: records.update(value=args[0] if inputs else output)
    )
    logits(model)
    hook.remove()
    return records["value"]


def change_part(model, site, change):
    """Apply a function to a part of the backbone's output."""
    return model.get_submodule(site.host).register_forward_hook(
        lambda _, args, y: site.part.write(y, change(site.part.read(y)))
    )


def attended_without_values(architecture, **options):
    """Compute what attention returns if the value features of the row are zero."""
    model = tiny_models.model(architecture, **options) if options else model_of(architecture)
    sites = ah.anatomy_of(model).sites
    change_part(model, sites[next(s for s in sites if s.endswith("0.attn.v"))], torch.zeros_like)
    output = sites[next(s for s in sites if s.endswith("0.attn.o"))].host
    # DeBERTa adds its value bias after the projection; it is zero in a new model.
    return recorded(model, output, inputs=True).abs().max()


def test_value_features_are_those_attention_uses(subtests):
    """Attention over zeros is zero."""
    assert {"gpt_neox", "bloom", "deberta"} <= set(PER_HEAD)
    assert {"phi3", "gpt2", "openai-gpt", "modernbert", "mpt", *ON_INTERFACE} <= set(FUSED)
    assert set(GATED) >= {"phi3", "modernbert"}
    for architecture in FUSED:
        with subtests.test(architecture=architecture):
            assert attended_without_values(architecture) == 0


VARIANTS = {  # the sizes of q, k and v
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, (32, 16, 16)),
    "falcon-rw": ("falcon", {"multi_query": False}, (32, 32, 32)),
    "falcon-alibi": ("falcon", {"multi_query": False, "alibi": True}, (32, 32, 32)),
    "starcoder, multi-head": ("gpt_bigcode", {"multi_query": False}, (32, 32, 32)),
    "mpt, clipped": ("mpt", {"attn_config": {"clip_qkv": 2.0}}, (32, 32, 32)),
}


def test_the_variants_of_a_family_have_parts_of_their_own_sizes(subtests):
    for variant in VARIANTS:
        with subtests.test(variant=variant):
            architecture, options, sizes = VARIANTS[variant]
            sites = ah.anatomy_of(tiny_models.model(architecture, **options)).sites
            assert tuple(sites[f"decoder.0.attn.{name}"].d_out for name in "qkv") == sizes
            assert attended_without_values(architecture, **options) == 0


def test_the_queries_of_falcon_are_those_it_splits():
    """Its own function of all variants, on distinct numbers."""
    for options in ({}, *(options for a, options, _ in VARIANTS.values() if a == "falcon")):
        model = tiny_models.model("falcon", **options)
        attention = model.transformer.h[0].self_attention
        fused = torch.arange(attention.query_key_value.weight.shape[0])[None, None]
        sites = ah.anatomy_of(model).sites
        for name, part in zip("qkv", attention._split_heads(fused), strict=True):
            ours = sites[f"decoder.0.attn.{name}"].part.read(fused)
            assert ours.unique().tolist() == part.unique().tolist()


@pytest.mark.parametrize("architecture", ["gpt2", "openai-gpt", "bloom", "deberta"])
def test_query_and_key_features_are_those_attention_uses(architecture):
    """Without rotary positions, softmax ignores a constant added to all keys, not to queries."""
    model = model_of(architecture)
    before, sites = logits(model), ah.anatomy_of(model).sites
    for name, same in (("k", True), ("q", False)):
        site = sites[next(s for s in sites if s.endswith(f"0.attn.{name}"))]
        constant = torch.randn(site.d_out)
        hook = change_part(model, site, lambda y, c=constant: y + c)
        assert torch.allclose(logits(model), before, atol=1e-5) is same
        hook.remove()


@pytest.mark.parametrize("architecture", ON_INTERFACE)
def test_attention_receives_the_parts(architecture):
    """The first token's query, key and value are not rotated, so they equal the parts."""
    seen = []

    def probe(module, query, key, value, mask, **options):
        seen.append([t[:, :, 0].flatten(1) for t in (query, key, value)])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)

    AttentionInterface.register("adapterhub_test_probe", probe)
    AttentionMaskInterface.register("adapterhub_test_probe", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = tiny_models.model(architecture, attn_implementation="adapterhub_test_probe")
    sites = ah.anatomy_of(model).sites
    fused = sites[next(s for s in sites if s.endswith("0.attn.qkv"))]
    y = recorded(model, fused.host, inputs=False)
    assert seen
    for name, received in zip("qkv", seen[0], strict=True):
        part = sites[fused.id.replace("qkv", name)].part
        torch.testing.assert_close(part.read(y)[:, 0], received)


@pytest.mark.parametrize("architecture", GATED)
def test_gate_and_up_features_are_those_the_network_uses(architecture):
    """The network is linear in up and not in gate."""
    model = tiny_models.model(architecture)
    sites = ah.anatomy_of(model).sites
    named = {s.split(".", 2)[2]: s for s in sites if ".0.ffn." in s}
    down = sites[named["ffn.down"]].host
    before = recorded(model, down, inputs=True)
    for name, linear in (("up", True), ("gate", False)):
        hook = change_part(model, sites[named[f"ffn.{name}"]], lambda y: 2 * y)
        assert torch.allclose(recorded(model, down, inputs=True), 2 * before) is linear
        hook.remove()
