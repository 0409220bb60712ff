"""What a forward computes, from its source: projections, attention, calls, experts."""

import every_type
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.pytorch_utils import Conv1D

import adapterhub as ah
from adapterhub.anatomy import projections
from tests.kit.own_models import TRANSPOSED, TYPES, expert_model, holders


class Packed(nn.Module):
    """A layer with packed codes in place of a weight, as GPTQ has."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 3, 5
        self.register_buffer("qweight", torch.zeros(2, dtype=torch.int32))


def bare():
    """Make a module with a weight that is read as input by output."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(3, 5))
    return module


@pytest.mark.parametrize(
    ("module", "projects", "sizes"),
    [
        *((module, True, (3, 5)) for module in (nn.Linear(3, 5), Conv1D(5, 3), Packed())),
        (bare(), False, (3, 5)),
        *((m, False, None) for m in (nn.LayerNorm(3), nn.Embedding(3, 5), nn.Conv1d(3, 5, 1))),
        # DeepSeek-V4 multiplies groups of features by blocks of the weight.
        (DeepseekV4GroupedLinear(4, 6, n_groups=2), False, None),
    ],
    ids=lambda each: type(each).__name__,
)
def test_projections_and_their_sizes(module, projects, sizes):
    assert projections.is_projection(module) == projects
    if sizes:
        assert (projections.in_features(module), projections.out_features(module)) == sizes


def test_a_linear_of_a_model_may_compute_another_product():
    config = CONFIG_MAPPING["llama4_text"](hidden_size=8, num_local_experts=2)
    assert projections.multiplies_otherwise(DeepseekV4GroupedLinear(4, 6, n_groups=2))
    assert not projections.multiplies_otherwise(Llama4Router(config))  # routes afterwards
    assert not projections.multiplies_otherwise(FalconLinear(4, 6))  # x @ self.weight.T
    assert not projections.multiplies_otherwise(nn.Linear(4, 6))


class InItsMethods(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalize = nn.Softmax(dim=-1)

    def forward(self, q, k, v):
        return self.weighed(q, k).matmul(v)

    def weighed(self, q, k):
        return self.normalize(q.matmul(k))


class TwoBehindEachOther(nn.Module):
    def forward(self, q, k, v):
        if q.ndim == 3:
            q = F.softmax(q, -1)
        return F.softmax(q @ k, -1) @ v


class InALoop(nn.Module):
    def forward(self, q, k, v):
        for _ in range(2):
            q = F.softmax(q @ k, -1) @ v
        return q


class ByEinsum(nn.Module):
    def forward(self, q, k, v):
        scores = torch.einsum("qd,kd->qk", q, k)
        return torch.einsum("qk,kd->qd", F.softmax(scores, -1), v)


class NoSoftmax(nn.Module):
    def forward(self, q, k, v):
        return (q @ k) @ v


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (InItsMethods, "torch"),
        *((kind, None) for kind in (TwoBehindEachOther, InALoop, ByEinsum, NoSoftmax, nn.Identity)),
    ],
)
def test_one_softmax_of_products_on_each_path(kind, found):
    assert projections.attends(kind()) == found


@pytest.mark.parametrize(
    ("model_type", "path", "found"),
    [
        ("llama", "layers.0.self_attn", "interface"),
        ("bert", "encoder.layer.0.attention.self", "interface"),
        ("falcon", "h.0.self_attention", "torch"),
        ("bloom", "h.0.self_attention", "torch"),
        ("deberta-v2", "encoder.layer.0.attention.self", "torch"),
        ("codegen", "h.0.attn", "torch"),
        ("convbert", "encoder.layer.0.attention.self", None),
        ("longformer", "encoder.layer.0.attention.self", None),
        ("nystromformer", "encoder.layer.0.attention.self", None),
        ("llama", "layers.0.mlp", None),
    ],
)
def test_attention_of_transformers(model_type, path, found):
    model = every_type.build(model_type, "AutoModel", tiny=True)
    assert projections.attends(model.get_submodule(path)) == found


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("after", "first", "second", "unused", "last"):
            self.add_module(name, nn.Linear(2, 2))

    def forward(self, x):
        x = x + self.second(self.first(x))
        if x.ndim > 2:
            x = self.after(x)
        return self._rest(x, self.last)

    def _rest(self, x, module):
        return module(self.first(x)), x


def test_modules_are_listed_in_the_order_of_their_first_use():
    """Arguments come before the call, methods are followed, modules may be passed on."""
    assert projections.call_order(Layer()) == ("first", "second", "after", "last")
    assert projections.call_order(nn.Linear(2, 2)) == ()


def test_a_method_that_is_passed_on_is_followed():
    """BERT's feed-forward runs in chunks of the sequence."""
    config = transformers.BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    layer = transformers.BertModel(config).encoder.layer[0]
    assert projections.call_order(layer) == ("attention", "intermediate", "output")


def test_an_annotation_or_else_the_return_statements_show_a_tuple():
    class Annotated(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.other(x)

    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    class One(nn.Module):
        def forward(self, x) -> torch.Tensor:
            return x

    assert projections.returns_tuple(Annotated())
    assert projections.returns_tuple(Pair())
    assert not projections.returns_tuple(One())
    assert not projections.returns_tuple(nn.Linear(2, 2))
    assert not projections.returns_tuple(nn.ModuleList())


class Stacked(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


def test_experts_and_routers_are_sites(subtests):
    assert len(set(TYPES)) == 12
    assert set(TRANSPOSED) < set(TYPES)
    for model_type in TYPES:
        with subtests.test(model_type=model_type):
            model = expert_model(model_type)
            anatomy = ah.anatomy_of(model)
            held = [site for site in anatomy.sites.values() if site.kind == "weight"]
            experts = [site for site in held if site.held.experts]
            modules = list(holders(model))
            assert len(experts) == 2 * len(modules) > 0
            assert {site.role for site in experts} <= {
                f"ffn.experts.{n}" for n in ("gate_up", "up", "down")
            }
            for site in experts:
                parameter = model.get_submodule(site.host).get_parameter(site.held.parameter)
                assert site.held.transposed == (model_type in TRANSPOSED)
                sizes = (site.d_in, site.d_out) if site.held.transposed else (site.d_out, site.d_in)
                assert parameter.shape == (site.held.experts, *sizes)
                width = site.d_out if site.role.endswith("down") else site.d_in
                assert width == model.config.hidden_size
            routers = [site for site in anatomy.sites.values() if site.role == "ffn.router"]
            assert len(routers) == len(modules)
            assert {(s.d_in, s.d_out) for s in routers} == {
                (model.config.hidden_size, experts[0].held.experts)
            }


@pytest.mark.parametrize(
    "shapes",
    [
        {"gate_up_proj": (4, 12, 8)},  # no output
        {"gate_up_proj": (4, 12, 8), "down_proj": (3, 8, 6)},
        {"gate_up_proj": (12, 8), "down_proj": (8, 6)},
        {"weight": (4, 8, 6)},
    ],
)
def test_other_modules_hold_no_experts(shapes):
    assert projections.expert_weights(Stacked(**shapes)) == {}


def test_codes_of_a_quantization_are_no_experts():
    module = Stacked()
    for name, shape in (("gate_up_proj", (4, 12, 8)), ("down_proj", (4, 8, 6))):
        codes = torch.zeros(shape, dtype=torch.uint8)
        setattr(module, name, nn.Parameter(codes, requires_grad=False))
    assert projections.expert_weights(module) == {}


def test_an_embedding_with_a_row_apart_is_no_table():
    table = torch.nn.Embedding(4, 2)
    assert projections.is_table(table)
    table.apart = torch.nn.Parameter(torch.zeros(2))
    assert not projections.is_table(table)
