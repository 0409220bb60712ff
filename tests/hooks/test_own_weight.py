"""Modules at weights of experts and of routers, however multiplied by; rows of new tokens."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  registers grouped_mm_fallback
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

import adapterhub as ah
from adapterhub.anatomy.projections import HeldWeight
from adapterhub.errors import AttachError
from adapterhub.files.manifest import NewToken
from adapterhub.hooks.new_tokens import new_token_rows
from adapterhub.hooks.own_weight import AdaptedWeight, HeldWeightSlot, call_host
from adapterhub.hooks.weight_host import TokenRows
from tests.kit import own_models, tiny_models
from tests.kit.own_models import EXPERTS, TYPES, expert_logits, expert_model, holders, redraw
from tests.kit.selection import cases_of
from tests.kit.tiny_adapters import check_rows

SPECS = (
    EXPERTS,
    "lora(sites=[ffn.experts.*], rank=3, experts=shared)",
    "ia3(sites=[ffn.experts.*])",
    "lora(sites=[ffn.router], rank=2)",
)
# One type of each form of weights, and some of the others.
FORMS = ("mixtral", "gpt_oss", "llama4_text", "nemotron_h")
TRIED = (*FORMS, *cases_of(each for each in TYPES if each not in FORMS))


@pytest.fixture(params=TRIED)
def model(request):
    model = expert_model(request.param)
    yield model
    if ah.adapters(model):
        ah.detach(model)


def changed_parameters(model):
    """Return (module, name, value) for each weight as the active adapters change it."""
    found = []
    for module in model.modules():
        slot = module._modules.get("adapterhub")
        if isinstance(slot, HeldWeightSlot):
            composition = slot.keys if slot.plan is None else slot.plan.groups[0]
            weights = slot.weights(module, composition)
            found += [(module, name, weight.changed()) for name, weight in weights.items()]
    return found


@contextlib.contextmanager
def replaced(values):
    """Put parameters in place of others, in a block."""
    originals = [(module, name, module._parameters[name]) for module, name, _ in values]
    try:
        for module, name, value in values:
            module._parameters[name] = nn.Parameter(value)
        yield
    finally:
        for module, name, original in originals:
            module._parameters[name] = original


@pytest.mark.parametrize("spec", SPECS)
def test_it_computes_what_changed_weights_compute(model, spec, monkeypatch):
    """From the products alone: no changed copy of a weight is made; detached, all is as before."""
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    with torch.no_grad():
        bare = expert_logits(model)
        adapter = ah.attach(model, spec)
        assert "forward" in vars(next(holders(model))) or "router" in spec
        assert [k for k in model.state_dict() if "adapterhub" not in k] == keys
        assert torch.equal(expert_logits(model), bare)
        redraw(adapter)
        changed = changed_parameters(model)
        with monkeypatch.context() as context:
            context.setattr(AdaptedWeight, "changed", lambda self: pytest.fail("a copy"))
            adapted = expert_logits(model)
        assert not torch.equal(adapted, bare)
        adapter.detach()
        assert torch.equal(expert_logits(model), bare)
        assert {name: set(vars(module)) for name, module in model.named_modules()} == before
        assert list(model.state_dict()) == keys
        with replaced(changed):
            torch.testing.assert_close(adapted, expert_logits(model), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS[:3])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_all_implementations_agree(model_type, spec):
    outputs, gradients = [], []
    for name in own_models.IMPLEMENTATIONS:
        model = expert_model(model_type, name)
        torch.manual_seed(0)
        adapter = ah.attach(model, spec)
        redraw(adapter)
        output = expert_logits(model)
        output.square().sum().backward()
        outputs.append(output.detach())
        gradients.append([p.grad.clone() for p in adapter.parameters()])
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        adapter.detach()
    assert len(outputs) == 3
    for output, gradient in zip(outputs[1:], gradients[1:], strict=True):
        torch.testing.assert_close(output, outputs[0], atol=2e-5, rtol=1e-4)
        for one, other in zip(gradient, gradients[0], strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_gradients_are_those_of_the_weights(model):
    """The gradient of a shared A is Bᵀ times that of the whole weights, summed over experts."""
    if model.config.model_type in ("llama4_text", "gpt_oss"):
        pytest.skip("transposed")
    adapter = ah.attach(model, SPECS[1])
    redraw(adapter)
    expert_logits(model).square().sum().backward()
    placed = adapter.placed[0]
    expected_name, host = placed.site.held.parameter, model.get_submodule(placed.site.host)
    found = placed.module.A.grad
    values = [(m, n, v.detach().requires_grad_()) for m, n, v in changed_parameters(model)]
    scale, B = placed.module.scale, placed.module.B.detach()
    adapter.detach()
    with replaced(values):
        expert_logits(model).square().sum().backward()
        whole = host._parameters[expected_name].grad
    expected = scale * torch.einsum("or,eoi->ri", B, whole)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_a_route_gives_each_row_its_own(model):
    for number, spec in enumerate((EXPERTS, SPECS[3])):
        redraw(ah.attach(model, spec, name=str(number)), seed=number)
    expected = contextlib.nullcontext()
    if model.config.model_type not in own_models.ROUTED:
        expected = pytest.raises(AttachError, match="all experts at once")
    with expected:
        check_rows(model, ["0", "1", None], lambda: expert_logits(model))


def test_stacks_and_averages(model):
    """The updates of two adapters add up; in an average, half of each."""
    spec = "lora(sites=[ffn.experts.down], rank=3, layers={})"
    last = max(s.layer for s in ah.anatomy_of(model).sites.values() if s.held and s.held.experts)
    with torch.no_grad():
        bare = expert_logits(model)
        single = []
        for number in range(2):
            adapter = ah.attach(model, spec.format(last), name=str(number))
            redraw(adapter, seed=number)
            single.append(changed_parameters(model)[0][2])
        ah.activate(model, "0", "1")
        (_, _, both), *_ = changed_parameters(model)
        host = model.get_submodule(adapter.placed[0].site.host)
        down = host.get_parameter("down_proj")
        torch.testing.assert_close(both - down, sum(single) - 2 * down, atol=1e-5, rtol=1e-4)
        ah.activate(model, ah.Average(["0", "1"]))
        (_, _, mean), *_ = changed_parameters(model)
        torch.testing.assert_close(mean - down, (both - down) / 2, atol=1e-5, rtol=1e-4)
        assert not torch.equal(expert_logits(model), bare)


def test_two_threads_have_two_routes():
    model, expected = expert_model("mixtral"), {}
    with torch.no_grad():
        for name in "01":
            redraw(ah.attach(model, EXPERTS, name=name), seed=int(name))
            expected[name] = expert_logits(model)

    def run(name):
        with torch.no_grad(), ah.route(model, [name] * 3):
            return torch.equal(expert_logits(model), expected[name])

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(run, "01" * 5))
    ah.detach(model)


def test_a_forward_that_accelerate_wraps():
    model = expert_model("mixtral")
    hosts = list(holders(model))
    for host in hosts:
        add_hook_to_module(host, ModelHook())
    try:
        with torch.no_grad():
            bare = expert_logits(model)
            adapter = ah.attach(model, EXPERTS)
            redraw(adapter)
            assert not torch.equal(expert_logits(model), bare)
            adapter.detach()
            assert torch.equal(expert_logits(model), bare)
    finally:
        for host in hosts:
            remove_hook_from_module(host)


def test_a_replaced_forward_is_refused():
    model = expert_model("mixtral")
    host = next(holders(model))
    host.forward = lambda *args: args[0]
    try:
        with pytest.raises(AttachError, match="has been replaced"):
            ah.attach(model, EXPERTS)
        assert not ah.adapters(model)
    finally:
        del host.forward


def test_a_compiled_model_is_refused(monkeypatch):
    model = expert_model("mixtral")
    adapter = ah.attach(model, EXPERTS)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    host = next(holders(model))
    with pytest.raises(AttachError, match=r"torch\.compile cannot trace"):
        call_host(host, type(host).forward)
    monkeypatch.undo()
    adapter.detach()


NUMBER, D_IN, D_OUT = 3, 8, 4
NUMBERS = torch.tensor([2, 0, 2, 1, 1])
ENDS = torch.tensor([1, 3, 5], dtype=torch.int32)


def adapted(transposed, monkeypatch=None):
    """Return a weight whose outputs are doubled and then get x Cᵀ, and the weight it stands for."""
    torch.manual_seed(0)
    shape = (NUMBER, D_IN, D_OUT) if transposed else (NUMBER, D_OUT, D_IN)
    tensor, change = torch.randn(shape), torch.randn(NUMBER, D_OUT, D_IN)

    def apply(x, product, rows):
        return 2 * product(x) + rows.product(x, change)

    weight = AdaptedWeight(tensor, HeldWeight("w", NUMBER, transposed), apply)
    expected = 2 * tensor + (change.transpose(1, 2) if transposed else change)
    if monkeypatch:
        monkeypatch.setattr(AdaptedWeight, "changed", lambda self: pytest.fail("a changed copy"))
    return weight, expected


@pytest.mark.parametrize("transposed", [False, True])
def test_the_changed_weight(transposed):
    weight, expected = adapted(transposed)
    for view in (lambda w: w, lambda w: w[1], lambda w: w[NUMBERS], lambda w: w.mT):
        torch.testing.assert_close(view(weight).changed(), view(expected))
    assert (weight.shape, weight.dtype, len(weight)) == (expected.shape, expected.dtype, NUMBER)


ONES = torch.ones(5, D_IN)
PRODUCTS = {  # whether the matrices are transposed, and the product
    "linear": (False, lambda w: F.linear(ONES[:2], w[1])),
    "linear of a cast": (False, lambda w: F.linear(ONES[:2], w[1].type(torch.float32))),
    "batched columns": (False, lambda w: torch.bmm(w[NUMBERS], ONES[..., None])),
    "grouped": (False, lambda w: F.grouped_mm(ONES, w.transpose(-2, -1), offs=ENDS)),
    "in a loop": (False, lambda w: torch.ops.transformers.grouped_mm_fallback(
        ONES, w.transpose(-2, -1), ENDS
    )),
    "matmul": (False, lambda w: ONES[:2] @ w[2].T),
    "transposed, matmul": (True, lambda w: ONES[:2] @ w[1]),
    "transposed, batched rows": (True, lambda w: torch.bmm(ONES[:, None], w[NUMBERS])),
    "transposed, all experts": (True, lambda w: torch.bmm(ONES[:2].expand(NUMBER, 2, D_IN), w)),
    "transposed, linear": (True, lambda w: F.linear(ONES[:2], w[1].mT)),
    "transposed, grouped": (True, lambda w: F.grouped_mm(ONES, w, offs=ENDS)),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_an_adapted_weight_make_no_copy(name, monkeypatch):
    transposed, product = PRODUCTS[name]
    weight, expected = adapted(transposed, monkeypatch)
    torch.testing.assert_close(product(weight), product(expected))


def test_any_other_use_gets_a_changed_copy(subtests):
    cases = [
        lambda w: torch.einsum("eoi,ri->reo", w, torch.ones(2, D_IN)),
        lambda w: w[:2] + 1,
        lambda w: w.sum(),
        lambda w: torch.bmm(w[NUMBERS], torch.ones(5, D_IN, 2)),
        lambda w: w @ torch.ones(D_IN, 2),
        lambda w: torch.cat([w, w]),
        lambda w: w.transpose(0, 1),
        lambda w: torch.addmm(torch.ones(2, D_OUT), torch.ones(2, D_IN), w[1].T),
    ]
    for number, use in enumerate(cases):
        with subtests.test(number=number):
            weight, expected = adapted(False)
            torch.testing.assert_close(use(weight), use(expected))


# Rows of new tokens: look-up, logits, initialization, and limits.

VOCAB = tiny_models.VOCAB
TOKENS = (NewToken("<a>", VOCAB - 1), NewToken("<b>", VOCAB + 1))


def test_scores_of_new_ids_are_products_with_their_rows():
    module = TokenRows(torch.tensor([1, 4]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    x, y = torch.tensor([[2.0, 3.0]]), torch.tensor([[7.0, 7.0, 7.0]])
    logits = module.score(x, y)[0].tolist()
    lowest = torch.finfo(torch.float32).min
    assert logits == [7, 2, 7, lowest, 3], "id 3 has no token"


def test_new_rows_start_as_the_mean_of_the_known_ones_or_as_they_are():
    model = tiny_models.model("llama", "causal-lm")
    rows = new_token_rows(model, TOKENS, VOCAB - 1, "default-0")
    table = model.get_input_embeddings().weight.detach()
    expected = table[: VOCAB - 1].mean(0)
    for row in rows.input.rows.detach():
        assert row.shape == (32,)
    torch.testing.assert_close(rows.input.rows[1].detach(), expected)
    assert torch.equal(rows.input.rows[0].detach(), table[VOCAB - 1]), "a resized model has it"


def test_an_embedding_that_is_no_table_is_refused():
    model = tiny_models.model("llama", "causal-lm")
    model.get_input_embeddings().register_forward_hook(lambda module, args, y: y + 1)
    with pytest.raises(AttachError):
        new_token_rows(model, TOKENS, VOCAB - 1, "default-0")
