"""torch.compile captures a model with adapters as one graph, and activation still takes effect."""

from unittest import mock

import pytest
import torch
from transformers import StaticCache

import adapterhub as ah
from adapterhub.hooks.token_positions import _RECORD
from tests.kit import tiny_models
from tests.kit.matrix import ALL_CELLS, OF_TEXTS, REFUSED, example, representatives
from tests.kit.selection import ALL, cases_of, long_table, part_of
from tests.kit.tiny_models import logits

# The full matrix also compiles an encoder.
COMPILED = ("bert", "llama") if tiny_models.FULL_MATRIX else ("llama",)
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


def compiled_model(model):
    """Compile a model as one graph."""
    return torch.compile(model, backend="eager", fullgraph=True)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Seconds each.
CELLS = [c for c in ALL_CELLS if c[1] in COMPILED and c not in REFUSED]
OF_EACH_SIGNATURE = [c for c in CELLS if c[0] == representatives()[c[0]]]
OTHERS = part_of([c for c in CELLS if c not in OF_EACH_SIGNATURE], 16) if ALL else []
RUN = CELLS if tiny_models.FULL_MATRIX else cases_of(OF_EACH_SIGNATURE, 24, nightly=12) + OTHERS
RUN += [("pfeiffer(source=block)", "bert"), ("parallel(source=residual)", "llama")][: 1 + ALL]


@pytest.mark.parametrize(("method", "architecture"), RUN)
def test_compiles_to_one_graph_with_equal_outputs(method, architecture):
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, example(method))
    tiny_models.scramble(adapter)
    expected = logits(model)
    compiled = compiled_model(model)
    output = compiled(**tiny_models.batch(), labels=torch.tensor([0, 1, 2]))
    output.loss.backward()
    torch.testing.assert_close(output.logits, expected, atol=1e-6, rtol=1e-5)
    assert all(p.grad is not None for p in adapter.parameters())


@long_table("method", ["lora", "houlsby", "mam", "prompt", "full"], parts=5, nightly=3)
def test_a_compiled_model_follows_activation(method):
    model = tiny_models.model("llama")
    bare = logits(model)
    adapter = ah.attach(model, example(method))
    tiny_models.scramble(adapter)
    adapted = logits(model)
    compiled = compiled_model(model)
    for _ in range(2):
        torch.testing.assert_close(logits(compiled), adapted, atol=1e-6, rtol=1e-5)
        ah.activate(model)
        torch.testing.assert_close(logits(compiled), bare, atol=1e-6, rtol=1e-5)
        ah.activate(model, adapter.name)


@pytest.mark.skipif(not ALL, reason="several compilations")
@pytest.mark.parametrize("method", ["lora", "mam"])
def test_a_compiled_model_follows_routes_and_averages(method):
    model = tiny_models.model("llama")
    for seed, name in enumerate("ab"):
        tiny_models.scramble(ah.attach(model, method, name=name), seed=seed)
    compiled = compiled_model(model)
    before = logits(compiled)
    with ah.route(model, ["b", "a", None]):
        torch.testing.assert_close(logits(compiled), logits(model), atol=1e-6, rtol=1e-5)
    if method == "lora":
        ah.activate(model, ah.Average(["a", "b"]))
        torch.testing.assert_close(logits(compiled), logits(model), atol=1e-6, rtol=1e-5)
    ah.activate(model, "b")
    torch.testing.assert_close(logits(compiled), before, atol=1e-6, rtol=1e-5)


class Overwritten:
    """A model that is compiled as with CUDA graphs: each call overwrites the outputs of the last.

    `graphs` counts its graphs after each call.
    """

    def __init__(self, model):
        self.compiled = torch.compile(model.__call__, backend=self.backend)
        self.outputs, self.made, self.graphs = [], 0, []

    def backend(self, graph, _):
        self.made += 1

        def run(*inputs):
            outputs = [o.clone() if isinstance(o, torch.Tensor) else o for o in graph(*inputs)]
            self.outputs += [each for each in outputs if isinstance(each, torch.Tensor)]
            return tuple(outputs)

        return run

    def __call__(self, *args, **kwargs):
        for each in self.outputs:
            each.copy_(~each) if each.dtype == torch.bool else each.fill_(7)
        self.outputs.clear()
        result = self.compiled(*args, **kwargs)
        self.graphs.append(self.made)
        return result


@long_table("method", ["lora", "alora(invocation=[8, 9])", *OF_TEXTS], parts=6, nightly=2)
def test_what_a_static_cache_holds_is_no_output_of_a_graph(method):
    """transformers compiles each step of `generate` with a static cache on a GPU."""
    model = tiny_models.language_model("llama")
    tiny_models.scramble(ah.attach(model, example(method)), std=0.3)
    ids = tiny_models.batch()["input_ids"]
    ids[0, 3:5], ids[1, 5:7] = torch.tensor([8, 9]), torch.tensor([8, 9])
    steps = Overwritten(model)

    def generated():
        cache = StaticCache(config=model.config, max_cache_len=32)
        tokens = model.generate(
            ids, past_key_values=cache, max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
        return tokens, getattr(cache, _RECORD, ())

    expected, held = generated()
    with (
        mock.patch.object(model, "_valid_auto_compile_criteria", return_value=True),
        mock.patch.object(model, "get_compiled_call", return_value=steps),
    ):
        tokens, found = generated()
    assert torch.equal(tokens, expected)
    assert len(found) == len(held) == (0 if method == "lora" else 3)
    assert all(map(torch.equal, found[:2], held[:2]))
    assert len(steps.graphs) == 7
    assert len(set(steps.graphs)) == 1, "a step compiles again"
