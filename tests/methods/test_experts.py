"""Methods at the weights of routed experts and of routers: an update for each, or one for all."""

import contextlib
import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import adapterhub as ah
from adapterhub.errors import AdapterhubError, SiteError
from adapterhub.methods import METHODS
from adapterhub.methods.common.experts import AtExperts
from adapterhub.methods.common.projections import ProjectionMethod
from tests.kit.own_models import IMPLEMENTATIONS, TYPES, expert_logits, expert_model, redraw
from tests.kit.selection import long_table
from tests.kit.tiny_adapters import EQUATIONS

SITES = ["ffn.experts.*"]
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "experts.md"
ABLE = sorted(
    name for name, cls in METHODS.items() if issubclass(cls, AtExperts) and "weight" in cls.kinds
)
REFUSING = ["pfeiffer", "compacter", *sorted(
    name for name, cls in METHODS.items() if name not in ABLE and issubclass(cls, ProjectionMethod)
)]  # fmt: skip


@pytest.fixture(params=["mixtral", "gpt_oss", "nemotron_h"])
def model(request):
    model = expert_model(request.param)
    yield model
    if ah.adapters(model):
        ah.detach(model)


@pytest.fixture
def mixtral():
    model = expert_model("mixtral")
    yield model
    if ah.adapters(model):
        ah.detach(model)


def attach(model, method, name="default", **options):
    spec = {method: {"sites": SITES, **EQUATIONS[method][1], **options}}
    adapter = ah.attach(model, spec, name=name)
    redraw(adapter)
    return adapter


@contextlib.contextmanager
def merged(mixtral):
    """Merge the adapters into the mixtral, in a block."""
    ah.merge(mixtral, tolerance=1e-2)
    yield
    ah.unmerge(mixtral)


def test_the_guide_lists_the_methods_that_have_updates_of_experts():
    text = " ".join(GUIDE.read_text(encoding="utf-8").split())
    (listed,) = re.findall("have the same option: (.*?)[.] ", text)
    assert re.findall("`(.*?)`", listed) == ABLE


def test_experts_are_no_default_sites_of_any_method():
    """Peers adapt experts only where they are named."""
    anatomy = ah.anatomy_of(expert_model("mixtral"))
    tried = 0
    for method in METHODS.values():
        try:
            steps = list(method.example().plan(anatomy))
        except (AdapterhubError, NotImplementedError):
            continue
        tried += 1
        placed = [step.site for step in steps if hasattr(step, "site")]
        assert not [site.id for site in placed if site.kind == "weight"], method.name
    assert tried > 10


@pytest.mark.parametrize("ranks", [{}, {"ffn.experts.down": 2}])
def test_wildcards_select_experts_beside_projections(model, ranks):
    adapter = ah.attach(model, {"lora": {"sites": ["attn.q", *SITES], "ranks": ranks}})
    found = {placed.site.role: placed.module.A.shape[-2] for placed in adapter.placed}
    roles = {s.role for s in adapter.anatomy.sites.values() if s.held and s.held.experts}
    assert found == dict.fromkeys({"attn.q", *roles}, 8) | ranks


@long_table("model_type", TYPES, 3)
def test_the_router_learns_and_nothing_else(model_type):
    model = expert_model(model_type)
    adapter = ah.attach(model, "lora(sites=[ffn.router], rank=2)")
    redraw(adapter)
    expert_logits(model).square().sum().backward()
    gradients = [p.grad for p in adapter.parameters()]
    routers = [s for s in ah.anatomy_of(model).sites.values() if s.role == "ffn.router"]
    assert len(gradients) == 2 * len(routers) > 0
    assert any(g is not None and g.any() for g in gradients)
    others = set(model.parameters()) - set(adapter.parameters())
    assert others
    assert all(p.grad is None for p in others)
    adapter.detach()


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_the_own_weight_of_a_router_can_train(model_type):
    model = expert_model(model_type)
    anatomy = ah.anatomy_of(model)
    path = next(f"{s.host}.weight" for s in anatomy.sites.values() if s.role == "ffn.router")
    adapter = ah.attach(model, {"chosen": {"names": [anatomy.key(path)]}})
    assert adapter.count() == model.get_parameter(path).numel()
    expert_logits(model).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in adapter.parameters())
    adapter.detach()


@pytest.mark.parametrize("experts", ["each", "shared"])
@long_table("method", ABLE, 4)
def test_the_weight_of_each_expert_is_that_of_the_equation(mixtral, method, experts):
    equation, options = EQUATIONS[method]
    adapter = attach(mixtral, method, experts=experts, layers="0..0")
    assert adapter.count() == adapter.methods[0].count(adapter.anatomy)
    for placed in adapter.placed:
        held = placed.site.held
        host = mixtral.get_submodule(placed.site.host)
        before = host.get_parameter(held.parameter).clone()
        with torch.no_grad(), merged(mixtral):
            after = host.get_parameter(held.parameter).clone()
        for number in (0, held.experts - 1):
            module = placed.module.module_of(number)
            for name, own in module.named_parameters():
                whole = placed.module.get_parameter(name)
                assert torch.equal(own, whole if experts == "shared" else whole[number])
            if method == "randlora":
                module.fixed = module.shared[0]
            with torch.no_grad():
                expected = equation(before[number], module, **options)
            torch.testing.assert_close(after[number], expected, atol=2e-4, rtol=2e-4)


@long_table("method", ABLE, 6, nightly=2)
def test_all_ways_to_multiply_compute_what_the_merged_weights_do(method):
    for experts in ("each", "shared"):
        gradients = []
        for way in IMPLEMENTATIONS:
            mixtral = expert_model("mixtral", way)
            torch.manual_seed(0)
            adapter = attach(mixtral, method, experts=experts)
            output = expert_logits(mixtral)
            output.square().sum().backward()
            gradients.append([p.grad.clone() for p in adapter.parameters()])
            with torch.no_grad(), merged(mixtral):
                torch.testing.assert_close(expert_logits(mixtral), output, atol=2e-4, rtol=2e-3)
            adapter.detach()
        for other in gradients[1:]:
            for one, same in zip(gradients[0], other, strict=True):
                torch.testing.assert_close(one, same, atol=2e-3, rtol=2e-3)
                assert one.any()


@pytest.mark.parametrize("method", ["loha", "lokr", "miss"])
def test_experts_that_are_computed_at_once(method):
    model = expert_model("llama4_text")
    with torch.no_grad():
        bare = expert_logits(model)
        adapter = attach(model, method)
        output = expert_logits(model)
        assert not torch.equal(output, bare)
        with merged(model):
            torch.testing.assert_close(expert_logits(model), output, atol=2e-4, rtol=2e-3)
    adapter.detach()


FILES = [*((method, "mixtral") for method in ABLE), ("lora", "gpt_oss"), ("lora", "nemotron_h")]


@long_table(("method", "model_type"), FILES, 4)
def test_files_have_the_stacked_tensors_and_copies_compute_the_same(method, model_type, tmp_path):
    model = expert_model(model_type)
    with torch.no_grad():
        bare = expert_logits(model)
        torch.manual_seed(0)
        adapter = ah.attach(model, {method: {"sites": SITES, **EQUATIONS[method][1]}})
        assert torch.equal(expert_logits(model), bare)  # the start is that of the method
        drawn = [p for p in adapter.parameters() if p.any()]
        assert all(not torch.equal(p[0], p[1]) for p in drawn if method == "loha")
        redraw(adapter)
        expected = expert_logits(model)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(expert_logits(copied), expected)
        adapter.save(tmp_path / "a")
        tensors = load_file(tmp_path / "a" / "adapter.safetensors")
        assert sum(tensor.numel() for tensor in tensors.values()) == adapter.count()
        for placed in adapter.placed:
            for name, parameter in placed.module.named_parameters():
                stored = tensors[f"{placed.site.id}.{method}.{name}"]
                assert torch.equal(stored, parameter)
                assert len(stored) == placed.site.held.experts
        ah.detach(model)
        ah.load(model, tmp_path / "a")
        assert torch.equal(expert_logits(model), expected)
    ah.detach(model)


def test_fixed_numbers_of_an_import_are_stored_once(mixtral, tmp_path):
    adapter = attach(mixtral, "vera", stored=True)
    with torch.no_grad():
        expected = expert_logits(mixtral)
    adapter.save(tmp_path / "a")
    names = load_file(tmp_path / "a" / "adapter.safetensors").keys()
    assert sum(name.endswith(".fixed.A") for name in names) == 1
    ah.detach(mixtral)
    ah.load(mixtral, tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(expert_logits(mixtral), expected)


@pytest.mark.parametrize("method", REFUSING)
def test_others_refuse_the_weights_of_experts_by_name(mixtral, method):
    with pytest.raises(SiteError, match=f"{method} does not support these sites") as error:
        ah.attach(mixtral, {method: {"sites": SITES}})
    assert any(role.startswith("ffn.experts.") for role in error.value.offenders)
    assert not ah.adapters(mixtral)
