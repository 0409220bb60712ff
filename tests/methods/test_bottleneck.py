"""Bottleneck adapters: in a BERT written by hand, by `source`, with scales, Kronecker products."""

import copy

import pytest
import test_cells as contract
import torch
from functorch.compile import make_boxed_func
from safetensors.torch import load_file
from torch._dynamo.backends.common import aot_autograd

import adapterhub as ah
from adapterhub.methods.bottleneck import Bottleneck
from adapterhub.methods.compacter import KroneckerLinear
from tests.kit import tiny_models
from tests.kit.matrix import train_save_and_load
from tests.kit.selection import long_table
from tests.kit.tiny_models import logits


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_scale_is_no_symbol_that_inductor_cannot_lower(scale):
    """With dynamic=True a float attribute is a symbol; as `alpha` of addmm it needs `item()`."""
    targets = set()

    def record(graph, inputs):
        targets.update(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    module = Bottleneck(8, 8, 2, "relu", "output", scale)
    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    compiled = torch.compile(module, backend=backend, dynamic=True)
    for tokens in (4, 7):
        x, y = torch.randn(2, tokens, 8), torch.randn(2, tokens, 8)
        torch.testing.assert_close(compiled(x, y), module(x, y))
    compiled(x, y).sum().backward()
    assert targets
    assert torch.ops.aten._local_scalar_dense.default not in targets


SPECS = ("pfeiffer(source=block)", "parallel(source=residual)", "compacter(source=block)")
# Pre-norm, post-norm, norms on the outputs of sublayers, two stacks.
CORE = ("bert", "gpt2", "gemma3_text", "t5", "bart")
ARCHITECTURES = (
    [a for a in tiny_models.ARCHITECTURES if a not in ("bloom", "gptj", "falcon")]
    if tiny_models.FULL_MATRIX
    else CORE
)
CELLS = [(spec, architecture) for spec in SPECS for architecture in ARCHITECTURES]


WITH_OPTIONS = (
    contract.padding_does_not_change_a_row,
    contract.gradient_checkpointing_gives_equal_gradients,
    contract.generation_is_independent_of_cache_padding_and_route,
)


# By default each architecture with one of the methods, and each method with some of them.
@long_table(("spec", "architecture"), CELLS, 5, nightly=2)
def test_the_contract_holds(spec, architecture, subtests, tmp_path, monkeypatch):
    cell = contract.Cell(spec, architecture)
    # A spec with options is not in the registry, where the contract looks; a route of sources is
    # in tests/hooks/test_rows.py.
    monkeypatch.setattr(contract, "is_routed", lambda cell: False)
    with subtests.test("trains, saves and detaches"), cell.checked():
        train_save_and_load(cell.model, spec, tmp_path / "adapter", 6)
    for holds, check in contract.INVARIANTS:
        if check in WITH_OPTIONS and holds(cell):
            with subtests.test(check.__name__), cell.checked():
                check(cell)


def test_on_a_post_norm_backbone_the_residual_is_the_input():
    """On a pre-norm backbone it is not."""
    for architecture, equal in (("bert", True), ("gpt2", False)):
        model = tiny_models.model(architecture)
        outputs = []
        for source in ("input", "residual"):
            torch.manual_seed(0)
            adapter = ah.attach(model, f"parallel(source={source})", name=source)
            tiny_models.scramble(adapter)
            outputs.append(logits(model))
        assert torch.equal(*outputs) == equal


def test_each_adapter_of_a_site_has_its_own_source():
    """Adapters with different sources work together, and alone compute what they did before."""
    model = tiny_models.model("gpt2")
    alone = {}
    for source in ("houlsby", *SPECS[:2], "parallel"):
        tiny_models.scramble(ah.attach(model, source, name=source))
        alone[source] = logits(model)
    ah.activate(model, *alone)
    together = logits(model)
    for name, expected in alone.items():
        assert not torch.allclose(together, expected, atol=1e-3)
        ah.activate(model, name)
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_adapterplus_is_pfeiffer_with_a_scale_for_each_feature(architecture):
    """Scales in the weights of an adapter without them give the same outputs."""
    model = tiny_models.model(architecture)
    adapter = ah.attach(model, "adapterplus(size=4)")
    tiny_models.scramble(adapter)
    found, tensors = logits(model), adapter.tensors()
    adapter.detach()
    plain = ah.attach(model, "pfeiffer(size=4, activation=gelu, source=block)")
    with torch.no_grad():
        for name, tensor in plain.tensors().items():
            theirs = tensors[name.replace("pfeiffer", "adapterplus")]
            if ".up." in name:
                scale = tensors[f"{name.partition('.pfeiffer.')[0]}.adapterplus.s"]
                theirs = theirs * (scale[:, None] if name.endswith("weight") else scale)
            tensor.copy_(theirs)
    torch.testing.assert_close(found, logits(model), atol=1e-5, rtol=1e-5)


def test_scales_train_and_are_folded_into_files(tmp_path):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "adapterplus")
    tiny_models.scramble(adapter)
    model(**tiny_models.batch()).logits.square().sum().backward()
    scales = [t for name, t in adapter.tensors().items() if name.endswith(".s")]
    assert len(scales) == 2
    assert all(scale.grad.abs().min() > 0 for scale in scales)
    live = logits(model)
    manifest = adapter.save(tmp_path / "saved")
    assert [*manifest.methods[0]] == ["pfeiffer"]
    adapter.detach()
    ah.load(model, tmp_path / "saved")
    assert torch.equal(logits(model), live)


def attached(architecture="bert", method="compacter(size=8)"):
    adapter = ah.attach(tiny_models.model(architecture), method)
    tiny_models.scramble(adapter)
    return adapter


def test_compacter_is_a_bottleneck_whose_weights_are_sums_of_kronecker_products():
    adapter = attached(method="compacter(size=8, rank=2)")
    module = adapter.placed[0].module
    x, y = torch.randn(2, 5, 32), torch.randn(2, 5, 32)

    def weight(layer):
        A = layer.shared[0].A
        return sum(torch.kron(A[i], layer.s[i] @ layer.t[i]) for i in range(len(A)))

    middle = torch.nn.functional.gelu(y @ weight(module.down) + module.down.bias)
    expected = y + middle @ weight(module.up) + module.up.bias
    torch.testing.assert_close(module(x, y), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_all_sites_of_compacter_share_one_parameter(architecture, tmp_path):
    """Also in a copy of the model, and in a file, which has it once."""
    adapter = attached(architecture)
    adapter.save(tmp_path / "adapter")
    name = "encoder.0.attn.compacter.shared.A"
    of_files = load_file(tmp_path / "adapter" / "adapter.safetensors")
    for tensors in (adapter.tensors(), of_files):
        assert [each for each in tensors if each.endswith(".A")] == [name]
    loaded = ah.load(tiny_models.model(architecture), tmp_path / "adapter")
    assert torch.equal(loaded.tensors()[name], adapter.tensors()[name])
    assert len(adapter.parameters()) == len({id(p) for p in adapter.parameters()})
    shared = set()
    for model in (adapter.model, copy.deepcopy(adapter.model), loaded.model):
        layers = [m for m in model.modules() if isinstance(m, KroneckerLinear)]
        assert len(layers) >= 8
        (own,) = {layer.shared[0].A for layer in layers}
        shared.add(own)
    assert len(shared) == 3
