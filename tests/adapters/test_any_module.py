"""Adapters at modules that are not of transformers: one's own networks, each kind of host."""

import copy
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import adapterhub as ah
from adapterhub.errors import AttachError, MergeError, MismatchError, SiteError
from adapterhub.methods import METHODS
from adapterhub.methods.alora import ALoRA
from adapterhub.methods.common.projections import ProjectionMethod
from tests.kit.compare import difference
from tests.kit.own_models import KINDS, Everything, network
from tests.kit.selection import long_table
from tests.kit.tiny_adapters import check_life, check_rows
from tests.kit.tiny_models import scramble_parameters

TOLERANCE = 5e-6
AT_PROJECTIONS = [
    name
    for name, method in sorted(METHODS.items())
    if issubclass(method, ProjectionMethod) and not issubclass(method, ALoRA)  # of texts
]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Everything().eval()


IDS = torch.randint(0, 20, (4, 7), generator=torch.Generator().manual_seed(1))


def test_an_attention_whose_batch_is_second_has_one_adapter_and_roles():
    module, x = network("attention, tokens first")
    for name in ("default", "other"):
        ah.attach(module, "lora(sites=['host.q'])", name=name)
    rows = ["default", "other", "other", "default", None]
    with ah.route(module, rows), pytest.raises(AttachError, match="first dimension"):
        module(x)
    # Weights that the module around reads.
    roles = {name: site.role for name, site in ah.anatomy_of(Stack()).sites.items()}
    assert (roles["blocks.1.qkv"], roles["blocks.1.qkv.v"]) == ("attn.qkv", "attn.v")
    assert roles["attention.qkv"] == "qkv"  # outside of layers: nothing by default
    assert "attn" not in roles.values()


SPECS = (
    "lora", "lora(sites=['conv', 'depthwise', 'table'])",
    "lora(sites=['layers.*.linear1'], layers='top 1')", "dora(sites=['conv', 'depthwise'])",
    "oft(sites=['conv', 'attn.o'])", "lora(sites=['*'])", "pfeiffer", "norms", "bitfit", "full",
    "unfreeze(every=1)", "freeze(top=1)",
)  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_the_life_of_an_adapter(net, spec, tmp_path):
    """Beside what holds for every module: gradients, copies, and a model that is as before."""
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    bare, keys = net(IDS), set(vars(net))
    merged = None if spec == "pfeiffer" else TOLERANCE
    start = 0.1 if spec == "pfeiffer" else 1e-6
    options = {"head": ["fc"], "start": start, "merged": merged, "batch": (IDS,)}
    check_life(net, lambda net: net(IDS), spec, tmp_path / "a", **options)
    assert set(vars(net)) == keys
    after = net.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.requires_grad for parameter in net.parameters())
    loaded = ah.load(net, tmp_path / "a", name="b")
    net.train()(IDS).sum().backward()
    assert all(p.grad is not None for p in loaded.parameters())
    adapted = net.eval()(IDS)
    with ah.disabled(net):
        assert difference(net(IDS), bare) <= TOLERANCE
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert difference(copied(IDS), adapted) <= TOLERANCE
        ah.detach(copied)
        assert torch.equal(copied(IDS), bare)
    assert ah.adapters(net) == {"b": loaded}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_a_kernel_that_is_computed_of_others_is_no_site(norm):
    """As in the vocoders and the codecs for sound of diffusers; a projection is one."""
    torch.manual_seed(0)
    net = nn.Sequential(norm(nn.Conv1d(4, 8, 3)), nn.Conv1d(8, 4, 1), norm(nn.Linear(6, 3)))
    x = torch.randn(2, 4, 8)
    bare = net(x)
    assert set(ah.anatomy_of(net).sites) == {"1", "2"}
    scramble_parameters(ah.attach(net, "lora(sites=['*'])"))
    assert difference(net(x), bare) > 1e-3
    with pytest.raises(MergeError, match=r"2\.weight: it is not stored as one parameter"):
        ah.merge(net)
    ah.detach(net)
    assert torch.equal(net(x), bare)


def test_rows_have_their_own_adapters_and_stacks_averages(net):
    for name, spec in (("a", "lora(sites=['conv', 'attn.v'])"), ("b", "dora(sites=['conv'])")):
        scramble_parameters(ah.attach(net, spec, name=name))
    check_rows(net, ["a", None, "b", "a"], lambda: net(IDS))
    ah.activate(net, "a")
    alone = net(IDS)
    ah.activate(net, ah.Average(["a", "a"]))
    assert difference(net(IDS), alone) <= TOLERANCE


class Configured(nn.Sequential):
    """A module with attributes of transformers' names, and contents of its own."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 5))
        self.config = SimpleNamespace(model_type="bert", is_encoder_decoder=True)
        self.num_labels, self.generation_config = 5, None

    def get_input_embeddings(self):
        return self[0]

    def forward(self, x, labels=None):
        return super().forward(x)[:, : self.num_labels]


def test_attributes_of_other_libraries_have_no_meaning_here(tmp_path):
    net, x = Configured(), torch.randn(3, 8)
    before, bare = dict(vars(net)), net(x)
    for name in ("a", "b"):
        adapter = ah.attach(net, "lora", sites=["0", "1"], name=name)
        scramble_parameters(adapter)
    assert adapter.model is net
    assert ah.anatomy_of(net).model is net
    ah.activate(net, ah.Average(["a", "b"]))
    assert (net.num_labels, net(x).shape) == (5, (3, 5))  # labels of a head are of transformers
    with ah.route(net, ["a", None, "b"]):
        assert torch.equal(net(x, labels=x)[1], bare[1])
    adapter.save(tmp_path / "b")
    ah.detach(net)
    assert vars(net) == before
    ah.load(net, tmp_path / "b")
    assert not torch.equal(net(x), bare)
    manifest = json.loads((tmp_path / "b/adapter.json").read_text(encoding="utf-8"))
    assert manifest["backbone"]["model_type"] == "Configured"


@pytest.mark.parametrize("kind", KINDS)
@long_table("method", ["lora", "dora", "loha", "ia3", "oft", "bitfit"], 3)
def test_each_kind_of_host(kind, method, tmp_path):
    module, x = network(kind)
    sites = ["host.q", "host.o"] if "attention" in kind else ["host"]
    spec = method if method == "bitfit" else {method: {"sites": sites}}
    if "embedding" in kind and method in ("dora", "ia3", "oft"):
        with pytest.raises(SiteError, match="only what adds to the table can"):
            ah.attach(module, spec)
        return
    try:
        check_life(module, lambda module: module(x), spec, tmp_path / "a", batch=(x,))
    except MergeError:
        assert "no bias" in kind


@pytest.mark.parametrize("method", AT_PROJECTIONS)
def test_every_method_at_a_convolution_is_that_of_its_matrix(method):
    """A convolution of one place is a projection of its patch: the same adapter, equal outputs."""
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Identity(), nn.Conv2d(8, 16, 2), nn.Flatten())
    matrix = nn.Sequential(nn.Flatten(), nn.Linear(32, 16))
    with torch.no_grad():
        matrix[1].weight.copy_(conv[1].weight.flatten(1))
        matrix[1].bias.copy_(conv[1].bias)
    x = torch.randn(6, 8, 2, 2)
    other = ah.attach(matrix, f"{method}(sites=['1'])")
    if not other.placed[0].module.affine:
        with pytest.raises(SiteError, match="not a change of its weight"):
            ah.attach(conv, f"{method}(sites=['1'])")
        return
    one = ah.attach(conv, f"{method}(sites=['1'])")
    tensors = zip(one.tensors().values(), other.tensors().values(), strict=True)
    with torch.no_grad():
        for mine, its in tensors:
            if mine.is_floating_point():
                mine.add_(torch.randn(mine.shape) * 0.05)
            its.copy_(mine)
    conv.eval()
    matrix.eval()
    assert difference(conv(x), matrix(x)) <= 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_are_not_rounded_away_in_low_precision(dtype):
    module, x = (each.to(dtype) for each in network("conv2d"))
    bare = module.host(x)
    adapter = ah.attach(module, "lora(sites=['host'])")
    with torch.no_grad():
        adapter.placed[0].module.B.fill_(1e-4)
    assert not torch.equal(module.host(x), bare)
    assert module(x).dtype == dtype


def test_what_reads_projections_refuses_kernels_by_name():
    module, _ = network("conv2d")
    adapter = ah.attach(module, "lora(sites=['host'])")
    for call, names in ((ah.to_lora, "default"), (ah.combine, ["default"])):
        with pytest.raises(MergeError, match="not projections cannot be combined") as error:
            call(module, names, rank=2)
        assert error.value.offenders == ("host.host",)
    assert ah.adapters(module) == {"default": adapter}


@pytest.mark.parametrize("method", ["lora", "dora", "loha", "oft"])
def test_held_modules_at_a_kernel_compute_the_same(method):
    module, x = network("conv2d")
    scramble_parameters(adapter := ah.attach(module, f"{method}(sites=['host', 'last'])"))
    expected = module(x)
    adapter.hold()
    with torch.no_grad(), ah.route(module, ["default"] * 4):
        assert difference(module(x), expected) <= TOLERANCE


def test_the_head_is_what_the_caller_names(net, tmp_path):
    with pytest.raises(SiteError, match="no such module") as error:
        ah.attach(net, "lora", head=["fcc"])
    assert "fc" in error.value.offenders[0]
    assert ah.adapters(net) == {}
    adapter = ah.attach(net, "lora", head=["fc"])
    heads = {name for name in adapter.tensors() if name.startswith("head.")}
    assert heads == {"head.fc.weight", "head.fc.bias"}
    with pytest.raises(AttachError, match="have the head"):
        ah.attach(net, "lora", name="b", head=["norm"])
    scramble_parameters(adapter)
    y = net(IDS)
    adapter.save(tmp_path / "a")
    ah.detach(net)
    ah.load(net, tmp_path / "a")
    assert difference(net(IDS), y) <= TOLERANCE


def test_what_needs_a_model_of_transformers_is_refused_by_name(net):
    for method in ("prompt", "prefix", "p-tuning", "cartridge", "llama-adapter", "madx"):
        with pytest.raises(SiteError, match=method):
            ah.attach(net, method)
    with pytest.raises(SiteError, match="it is not a change of its weight"):
        ah.attach(net, "lily(sites=['conv'])")
    with pytest.raises(SiteError, match="no modules inside"):
        ah.attach(nn.Linear(2, 2), "lora")
    assert ah.adapters(net) == {}


class Reads(nn.Module):
    """An attention that adds a bias of its own to a fused projection, as that of BEiT in timm."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.q_bias = nn.Parameter(torch.randn(8))
        self.mix = nn.Conv1d(8, 8, 3, padding=1, groups=2)
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        bias = torch.cat([self.q_bias, torch.zeros(16)])
        q, k, v = nn.functional.linear(x, self.qkv.weight, bias).chunk(3, -1)
        weights = torch.softmax(q @ k.mT, -1)
        weight = self.mix.weight.to(x.dtype)
        mixed = nn.functional.conv1d(v.mT, weight, self.mix.bias, padding=1, groups=2).mT
        return self.proj(weights @ mixed)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Reads() for _ in range(2))
        self.attention = Reads()

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.attention(x)


class TwoWidths(nn.Module):
    """Attention to keys and values of another width, whose weights torch keeps apart."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)
        nn.init.normal_(self.attention.in_proj_bias)

    def forward(self, x, keys, values):
        return self.attention(x, keys, values)[0]


WIDTHS = tuple(
    torch.randn(2, 5, size, generator=torch.Generator().manual_seed(size)) for size in (8, 6, 4)
)
OF_ATTENTION = [
    (TwoWidths, WIDTHS, ["attention.q", "attention.k", "attention.v", "attention.o"]),
    *((Stack, WIDTHS[:1], [site])  # the module around reads their weights
      for site in ("blocks.0.qkv.q", "blocks.1.qkv", "attention.qkv", "blocks.1.mix")),
]  # fmt: skip


@pytest.mark.parametrize("method", ["lora", "dora", "loha", "oft", "ia3"])
@pytest.mark.parametrize(("build", "batch", "sites"), OF_ATTENTION)
def test_weights_of_an_attention(method, build, batch, sites, tmp_path):
    torch.manual_seed(0)
    net = build().eval()
    spec, options = {method: {"sites": sites}}, {"batch": batch, "merged": 2e-5, "std": 0.3}
    check_life(net, lambda net: net(*batch), spec, tmp_path / "a", **options)
    with pytest.raises(ah.AdapterhubError, match="cannot"):
        ah.attach(net, spec).export(tmp_path / "theirs")


class Codebook(nn.Module):
    """A quantizer that averages its codes while it trains."""

    def __init__(self):
        super().__init__()
        self.register_buffer("embed_avg", torch.ones(8))
        self.register_buffer("cluster_size", torch.ones(1))

    def forward(self, x):
        if self.training:
            self.embed_avg.mul_(0.9)
            self.cluster_size.add_(1)
        return x + self.embed_avg


class Normed(nn.Module):
    """What has buffers that training passes change, beside two projections."""

    def __init__(self, kind):
        super().__init__()
        self.q, self.v, self.inner = nn.Linear(8, 8), nn.Linear(8, 8), BUFFERS[kind]()

    def forward(self, x):
        return self.q(x) * self.v(x) + self.inner(x)


BUFFERS = {
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "spectral norm in a hook": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "codebook": Codebook,
}


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("spec", ["lora(rank=2, sites=['q', 'v'])", "bitfit"])
def test_buffers_of_a_frozen_module_stay_those_of_the_backbone(kind, training, spec, tmp_path):
    """They are no part of an adapter: it would be on another backbone, and change it for good."""
    model, x = Normed(kind).train(training), torch.randn(5, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = {"train" in vars(module) for module in model.modules()}
    adapter = ah.attach(model, spec)
    for mode in (adapter.train_mode, model.train):
        mode()
        assert kind != "batch norm" or not model.inner.training
        model(x).sum().backward()
    scramble_parameters(adapter)
    adapted = model.eval()(x)
    adapter.save(tmp_path / "a")
    computed = kind in ("spectral norm", "weight norm")  # which torch does not pickle
    copied = copy.deepcopy(model) if computed else pickle.loads(pickle.dumps(model))
    for each in (model.train(), copied.train()):
        ah.detach(each)
        assert all(torch.equal(value, before[name]) for name, value in each.state_dict().items())
        assert all(module.training for module in each.modules())  # as `train` has left it
        assert {"train" in vars(module) for module in each.modules()} == plain
    ah.load(model.eval(), tmp_path / "a")
    assert difference(model(x), adapted) <= TOLERANCE


def by_weight(x, layer):
    return F.linear(x, layer.weight, layer.bias)


class Reading(nn.Module):
    """Projections whose weights others read; they are never called."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        return self.o(self.queries(x) * self.k(x) + self.v(x))


class ByLinear(Reading):
    def queries(self, x):
        return F.linear(x, self.q.weight, self.q.bias)


class ByProduct(Reading):
    def queries(self, x):
        return torch.matmul(x, self.q.weight.t()) + self.q.bias


class ByName(Reading):
    def queries(self, x):
        layer = self.q
        weight, bias = layer.weight, layer.bias
        return F.linear(x, weight, bias)


class ByFunction(Reading):
    def queries(self, x):
        return by_weight(x, self.q)


class ByGetattr(Reading):
    def queries(self, x):
        return by_weight(x, layer=getattr(self, "q"))  # noqa: B009


class ByLoop(Reading):
    def forward(self, x):
        q, k, v = [F.linear(x, each.weight, each.bias) for each in (self.q, self.k, self.v)]
        return self.o(q * k + v)


class ByCat(Reading):
    def forward(self, x):
        weight = torch.cat([self.q.weight, self.k.weight, self.v.weight])
        q, k, v = F.linear(x, weight).chunk(3, -1)
        return self.o(q * k + v)


class ByAttention(Reading):
    def forward(self, x):
        x = x.transpose(0, 1)
        bias = torch.cat((self.q.bias, self.k.bias, self.v.bias))
        y, _ = F.multi_head_attention_forward(
            x, x, x, 8, 2, None, bias, None, None, False, 0.0, self.o.weight, self.o.bias,
            self.training, use_separate_proj_weight=True, q_proj_weight=self.q.weight,
            k_proj_weight=self.k.weight, v_proj_weight=self.v.weight,
        )  # fmt: skip
        return y.transpose(0, 1)


READING = (ByLinear, ByProduct, ByName, ByFunction, ByGetattr, ByLoop, ByCat, ByAttention)


@pytest.mark.parametrize("method", ["lora", "dora", "oft", "ia3"])
@pytest.mark.parametrize("cls", READING)
def test_a_weight_that_a_helper_reads_has_its_adapter(cls, method):
    """Each module has an effect and a gradient, and computes what merged weights compute."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), cls()).eval(), torch.randn(2, 5, 4)
    bare = model(x)
    spec = {"lora": ah.LoRA(rank=2, sites=["q", "v"]), "ia3": "ia3(sites=['q', 'v'], inputs=[])"}
    adapter = ah.attach(model, spec.get(method, f"{method}(sites=['q', 'v'])"))
    assert len(adapter.placed) == 2
    for placed in adapter.placed:
        before = model(x)
        with torch.no_grad():
            for parameter in placed.module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        assert not torch.equal(model(x), before), placed.site.id
    model(x).pow(2).sum().backward()
    for placed in adapter.placed:
        assert any(p.grad is not None and p.grad.any() for p in placed.module.parameters())
    adapted = model(x).detach()
    adapter.detach()
    assert torch.equal(model(x), bare)
    assert not torch.allclose(adapted, bare, atol=1e-4)


class Windows(nn.Module):
    """Attention whose trained bias torch's kernel takes as a mask, behind convolutions: MaxViT."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.GELU())
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(7, 2))
        places = torch.arange(16)
        self.register_buffer("places", (places[:, None] - places).clamp(-3, 3) + 3)

    def forward(self, x):
        x = self.stem(x).permute(0, 2, 3, 1).unflatten(2, (-1, 4)).unflatten(1, (-1, 4))
        x = x.transpose(2, 3).flatten(0, 2).flatten(1, 2)
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        bias = self.table[self.places].permute(2, 0, 1)[None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(y.transpose(1, 2).flatten(2)) + x


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("method", ["lora", "dora", "ia3", "oft", "norms", "full"])
def test_a_bias_that_chooses_the_kernel_of_attention_is_as_before(method, layout):
    """Torch computes attention with a mask that requires gradients by another kernel."""

    def state():
        each = [*model.named_parameters(), *model.named_buffers()]
        return [(n, v.stride(), v.requires_grad, v.clone()) for n, v in each]

    torch.manual_seed(0)
    model, x = Windows().to(memory_format=layout).eval(), torch.randn(2, 3, 16, 16)
    bare, before = model(x), state()
    adapter = ah.attach(model, method if method in ("norms", "full") else f"{method}(sites=['*'])")
    model.train()
    model(x).pow(2).sum().backward()
    torch.optim.SGD(adapter.parameters(), lr=0.1).step()
    model.eval()
    ah.merge(model, batch=(x,))
    ah.unmerge(model)
    adapter.detach()
    assert torch.equal(model(x), bare)
    for (*facts, value), (*known, own) in zip(state(), before, strict=True):
        assert facts == known
        assert torch.equal(value, own), known[0]


def test_other_weights_and_classes_are_other_backbones(net, tmp_path):
    ah.attach(net, "lora").save(tmp_path / "a")
    torch.manual_seed(5)
    with pytest.raises(MismatchError, match="different backbone"):
        ah.load(Everything().eval(), tmp_path / "a")
