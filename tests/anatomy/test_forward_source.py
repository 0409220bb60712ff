"""What a forward calls, in which order, and what it returns, from its source."""

from __future__ import annotations

import every_type
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.llama4.modeling_llama4 import Llama4Router

import adapterhub as ah
from adapterhub.anatomy.projections import (
    call_order,
    is_called_whole,
    is_projection,
    multiplies_otherwise,
    own_methods,
    reads_token_ids,
    returns_tuple,
)
from adapterhub.errors import SiteError


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
    assert call_order(Layer()) == ("first", "second", "after", "last")
    assert call_order(nn.Linear(2, 2)) == ()


def test_a_forward_that_is_replaced_is_read_again(monkeypatch):
    """A class is read once, for a model is read for each attachment."""
    assert call_order(Layer())[0] == "first"
    monkeypatch.setattr(Layer, "forward", lambda self, x: x)
    assert call_order(Layer()) == ()


def test_a_method_that_is_passed_on_is_followed():
    """BERT's feed-forward runs in chunks of the sequence."""
    config = transformers.BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    layer = transformers.BertModel(config).encoder.layer[0]
    assert call_order(layer) == ("attention", "intermediate", "output")


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

    assert returns_tuple(Annotated())
    assert returns_tuple(Pair())
    assert not returns_tuple(One())
    assert not returns_tuple(nn.Linear(2, 2))
    assert not returns_tuple(nn.ModuleList())


def test_the_methods_of_a_class_are_its_own_and_those_it_inherits():
    class Base(nn.Module):
        def forward(self, x):
            return self.helper(x)

    class Derived(Base):
        def helper(self, x):
            return x

    assert [each.name for each in own_methods(Derived())] == ["helper", "forward"]
    assert own_methods(nn.Module()) == []


def test_a_linear_of_a_model_may_compute_another_product():
    """DeepSeek-V4 multiplies groups of features by blocks of the weight; Llama 4 routes after."""
    grouped = DeepseekV4GroupedLinear(4, 6, n_groups=2)
    assert multiplies_otherwise(grouped)
    assert not is_projection(grouped)
    config = CONFIG_MAPPING["llama4_text"](hidden_size=8, num_local_experts=2)
    assert not multiplies_otherwise(Llama4Router(config))
    assert not multiplies_otherwise(FalconLinear(4, 6))  # x @ self.weight.T
    assert not multiplies_otherwise(nn.Linear(4, 6))
    assert is_projection(nn.Linear(4, 6))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.positions = nn.Embedding(4, 2), nn.Embedding(4, 2)

    def forward(self, input_ids=None, inputs_embeds=None, position_ids=None):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        return inputs_embeds + self.positions(input_ids, position_ids)


class StackOfIds(Stack):
    def forward(self, input_ids=None, inputs_embeds=None):
        inputs_embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return inputs_embeds + self.positions(input_ids)


class LayerOfIds(nn.Module):
    def forward(self, x, input_ids=None):
        return x


def test_a_stack_may_need_token_ids_beside_embeddings():
    plain = nn.Linear(2, 2)
    assert not reads_token_ids(Stack(), plain)
    assert reads_token_ids(StackOfIds(), plain)
    assert reads_token_ids(Stack(), LayerOfIds())


class Tower(nn.Module):
    """A stack, which `whole` calls, and of which `parts` calls the children alone."""

    def __init__(self):
        super().__init__()
        self.embeddings, self.layer = nn.Embedding(4, 2), nn.Linear(2, 2)

    def forward(self, ids):
        return self.layer(self.embeddings(ids))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = Tower()

    def forward(self, ids):
        return self.tower(ids) + self.tower.embeddings(ids)


class InParts(Whole):
    def forward(self, ids):
        return self.tower.layer(self.tower.embeddings(ids))


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(ids)


@pytest.mark.parametrize("kind", [Whole, InParts])
def test_a_stack_of_which_parts_alone_are_called_is_not_called_whole(kind):
    assert is_called_whole(kind(), "tower") == (kind is Whole)
    assert is_called_whole(Around(kind()), "inner.tower") == (kind is Whole)
    assert is_called_whole(Around(kind()), "inner")
    assert is_called_whole(kind(), "")


def test_bridge_tower_takes_no_prompt_as_it_calls_parts_of_its_text_model():
    model = every_type.build("bridgetower", "AutoModel", tiny=True)
    with pytest.raises(SiteError):
        ah.attach(model, "prompt")
