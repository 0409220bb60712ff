"""Adapters of the models and of the pipelines of diffusers, from what is found to their files."""

import copy
import inspect

import peft
import pytest
import torch

import adapterhub as ah
from adapterhub.anatomy.backbone import join, loadable_in
from adapterhub.anatomy.projections import is_projection
from adapterhub.errors import AttachError, MismatchError, SiteError
from tests.kit.pipelines import KINDS, MODELS, diffusers, model, output, picture, pipeline
from tests.kit.selection import ALL, cases_of, long_table
from tests.kit.tiny_adapters import check_life
from tests.kit.tiny_models import scramble_parameters

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 2e-5
LAYERS = {"num_layers", "num_single_layers", "num_hidden_layers", "n_layers", "depth", "nlayers"}
# It multiplies by the weight of a projection, which it does not call: no site.
READS_ITSELF = {"MiniMaxH3AudioCausalAttention"}
# A network of convolutions alone.
WITHOUT_ATTENTION = {"T2IAdapter"}
# What is found in some classes, beside queries and values.
ALSO = {
    "AuraFlowTransformer2DModel": {"added.o", "ffn.gate"},
    "Flux2Transformer2DModel": {"added.q", "attn.qkv", "ffn.up", "ffn.down"},
    "HiDreamImageTransformer2DModel": {"added.q", "added.o", "ffn.gate"},
    "Kandinsky5Transformer3DModel": {"cross.o", "ffn.up", "ffn.down"},
    "Krea2Transformer2DModel": {"attn.o", "ffn.gate"},
    "LTXVideoTransformer3DModel": {"cross.k", "ffn.up"},
    "Lumina2Transformer2DModel": {"attn.o", "ffn.gate", "ffn.down"},
    "OmniGenTransformer2DModel": {"ffn.gate_up", "ffn.down"},
    "PRXTransformer2DModel": {"attn.qkv", "attn.o", "added.k", "added.v", "ffn.gate"},
    "UNet1DModel": {"attn.o"},
    "WanTransformer3DModel, image": {"cross.q", "added.k", "added.v"},
    "ZImageTransformer2DModel": {"attn.o", "ffn.gate"},
}


def difference(one, other) -> float:
    """Return the largest difference, relative where outputs are large."""
    return float((one - other).abs().max() / max(1.0, float(other.abs().max())))


def named(made):
    """Return the sites of projections in attention and feed-forward networks."""
    sites = ah.anatomy_of(made).sites.values()
    return [site for site in sites if site.kind == "linear" and "." in site.role]


def uncalled(made, name, sites):
    """Return the ids of the sites whose module is not called for an output."""
    called: set[str] = set()
    for host in {site.host for site in sites}:
        module = made.get_submodule(host)
        module.register_forward_hook(lambda *_, host=host: called.add(host))
    output(made, name)
    return [site.id for site in sites if site.host not in called]


@long_table("name", MODELS, 4)
def test_attention_and_networks_are_found_where_they_are_called(name):
    made = model(name)
    sites = named(made)
    roles = {site.role for site in sites}
    if name in WITHOUT_ATTENTION:
        assert not roles
        return
    assert roles >= {"attn.q", "attn.v"} or roles >= {"cross.q", "cross.v"}
    assert roles >= ALSO.get(name, set())
    found = (s for s in ah.anatomy_of(made).sites.values() if s.kind == "linear" and not s.inside)
    projections = {site.role for site in found}
    assert not [role for role in projections if role.startswith(("to_q", "to_v", "add_", "q_"))]
    assert uncalled(made, name, sites) == []


def test_no_attention_of_any_model_of_diffusers_is_overlooked():
    """Of those that can be built as they are by default: without numbers, and of few layers."""
    names = [name for name in dir(diffusers.models) if name[0].isupper()]
    kinds = [getattr(diffusers.models, name) for name in cases_of(names)]
    models = [kind for kind in kinds if isinstance(kind, type)]
    models = [kind for kind in models if issubclass(kind, diffusers.ModelMixin)]
    overlooked = []
    for kind in models:
        few = {n: 2 for n in inspect.signature(kind.__init__).parameters if n in LAYERS}
        try:
            with torch.device("meta"):
                made = kind(**few)
        except Exception:  # whatever a class says of options that it needs
            continue
        try:
            sites = ah.anatomy_of(made).sites.values()
        except SiteError:  # such as a codec for sound whose kernels are computed
            continue
        hosts = {site.host for site in sites if site.role.endswith((".q", ".qkv"))}
        for path, module in made.named_modules():
            names = [name for name, child in module.named_children() if is_projection(child)]
            found = hosts & {join(path, name) for name in names}
            name = type(module).__name__
            if "Att" in name and len(names) > 1 and not found and name not in READS_ITSELF:
                overlooked.append(f"{kind.__name__}.{path}: {name} {names}")
    assert overlooked == []


@long_table("name", MODELS, 16, nightly=5)
def test_the_life_of_a_lora_and_the_same_one_in_peft(name, tmp_path):
    made = model(name)
    roles = sorted({site.role for site in named(made)}) or ["conv*", "block*"]
    near = TOLERANCE * max(1.0, float(output(made, name).abs().max()))
    spec = {"lora": {"sites": roles, "rank": 2, "alpha": 3}}
    check_life(
        made, lambda made: output(made, name), spec, tmp_path / "a",
        start=near, merged=near, loaded=near,
    )  # fmt: skip
    ah.load(made, tmp_path / "a").export(tmp_path / "ours")
    trained = output(made, name)
    ah.detach(made)
    theirs = peft.PeftModel.from_pretrained(model(name), tmp_path / "ours").eval()
    assert difference(output(theirs, name), trained) <= TOLERANCE
    theirs.save_pretrained(tmp_path / "theirs")
    ah.load(made, tmp_path / "theirs", any_backbone=True)
    assert difference(output(made, name), trained) <= TOLERANCE


@long_table("name", MODELS, 4)
def test_the_default_lora_is_in_each_list_of_blocks(name):
    """Also where one projection is for all: in the single blocks of Flux 2."""
    made = model(name)
    stacks = {site.stack for site in named(made) if site.role.endswith((".q", ".v"))}
    if stacks:
        adapter = ah.attach(made, "lora")
        assert {placed.site.stack for placed in adapter.placed} == stacks


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "WanTransformer3DModel, image"])
def test_fused_projections_are_the_sites(name):
    """Those that they were made of stay in the model, and nothing calls them."""
    made = model(name)
    made.fuse_qkv_projections()
    bare = output(made, name)
    adapter = ah.attach(made, "lora(sites=['*.q', '*.k', '*.v'])", name="a")
    hosts = {placed.site.host.rpartition(".")[2] for placed in adapter.placed}
    of_wan = {"to_qkv", "to_q", "to_kv", "to_added_kv"}
    assert hosts == ({"to_qkv", "to_added_qkv"} if "Flux" in name else of_wan)
    scramble_parameters(adapter)
    trained = output(made, name)
    assert difference(trained, bare) > 1e-3
    ah.merge(made)
    assert difference(output(made, name), trained) <= TOLERANCE
    ah.unmerge(made)
    ah.detach(made)
    assert uncalled(made, name, named(made)) == []


# Adapters of each class of pipelines: UNets, and transformers of several kinds.

pytestmark = pytest.mark.filterwarnings("ignore")
ALMOST = 5e-6
# Of each class, roles that its attention and networks must have.
ROLES = {
    "StableDiffusionPipeline": {"attn.q", "cross.k", "ffn.up"},
    "StableDiffusionXLPipeline": {"attn.q", "cross.k", "ffn.up"},
    "StableDiffusion3Pipeline": {"attn.q", "added.q", "added.o", "ffn.up"},
    "FluxPipeline": {"attn.q", "added.q", "added.o", "ffn.up"},
    "PixArtAlphaPipeline": {"attn.q", "cross.k", "ffn.down"},
    "DiTPipeline": {"attn.q", "ffn.up"},
}
SPECS = (
    "lora(sites=['attn.*', '*.proj_out*', 'ffn.*', '*embed*.linear_1'])",
    "dora(sites=['attn.q', 'ffn.up'])",
    "loha(sites=['attn.*', 'ffn.*'])",
    "houlsby(size=4)",
    "ia3",
)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_networks_have_their_roles(kind):
    sites = ah.anatomy_of(pipeline(kind=kind)).sites
    roles = {site.role for site in sites.values()}
    assert roles >= ROLES[kind]
    assert not roles & {"to_q", "to_k", "to_v", "to_add_out", "add_q_proj", "net"}
    if kind == "FluxPipeline":
        block = "transformer.single_transformer_blocks.1"
        assert sites[f"{block}.proj_mlp"].role == "ffn.up"
        assert sites[f"{block}.proj_out"].role == "ffn.down"
        assert (sites[block].role, sites[block].layer) == ("ffn", 1)
        assert sites["transformer.transformer_blocks.0.ff_context"].role == "ffn"


@pytest.mark.parametrize("kind", KINDS)
@long_table("spec", SPECS, 4, nightly=2)
def test_the_life_of_an_adapter_of_a_pipeline(kind, spec, tmp_path):
    pipe, sequential = pipeline(kind=kind), "houlsby" in spec
    adapter = check_life(
        pipe, picture, spec, tmp_path / "a", again=lambda: pipeline(kind=kind), loaded=ALMOST,
        start=1e-3 if sequential else 1e-5, merged=None if sequential else 2e-5,
    )  # fmt: skip
    parts = {name.partition(".")[0] for name in adapter.tensors()}
    assert parts >= {"unet" if hasattr(pipe, "unet") else "transformer"}
    assert ("text_encoder" in parts) == (kind != "DiTPipeline")
    with pytest.raises(MismatchError, match="different backbone"):
        ah.load(pipeline(seed=1, kind=kind), tmp_path / "a")


def test_a_copy_has_adapters_of_its_own():
    pipe = pipeline()
    bare = picture(pipe)
    scramble_parameters(
        ah.attach(pipe, "lora(sites=['*.to_q', 'text_encoder.*.q_proj'])", name="a")
    )
    styled = picture(pipe)
    other = copy.deepcopy(pipe)
    assert [*ah.adapters(other)] == ["a"]
    assert ah.adapters(other)["a"] is not ah.adapters(pipe)["a"]
    ah.detach(other)
    assert torch.equal(picture(other), bare)
    assert torch.equal(picture(pipe), styled)
    again = type(pipe)(**pipe.components, requires_safety_checker=False)  # of the same parts
    assert ah.adapters(again) == ah.adapters(pipe)
    ah.detach(again)
    assert torch.equal(picture(pipe), bare)


@pytest.mark.parametrize(
    ("kind", "modules", "parts"),
    [
        ("KandinskyV22PriorPipeline", "prior image_encoder text_encoder", "prior text_encoder"),
        ("StableCascadeDecoderPipeline", "decoder text_encoder vqgan", "decoder text_encoder"),
        ("WanPipeline", "text_encoder vae transformer transformer_2", "transformer transformer_2"),
        ("StableUnCLIPPipeline", "prior text_encoder unet vae", "unet text_encoder"),
        ("PRXPipeline", "transformer text_encoder vae", "unet text_encoder transformer"),
    ],
)
def test_the_parts_are_what_its_class_names_or_what_removes_noise(kind, modules, parts):
    """That of PRX names a UNet, which it does not have."""
    found = loadable_in(getattr(diffusers, kind), modules.split())
    assert found == tuple(parts.split())


def test_other_modules_of_a_pipeline_have_adapters_of_their_own(tmp_path):
    """A T5 and a VAE are no parts: not adapted by default, and exchanged without a refusal."""
    pipe, other = pipeline(kind="FluxPipeline"), pipeline(kind="FluxPipeline")
    bare = picture(pipe)
    with pytest.raises(SiteError) as error:
        ah.attach(pipe, "lora(sites=['text_encoder_2.*.q'])")
    assert error.value.offenders == (
        "'text_encoder_2.*.q'; text_encoder_2 is not part of a FluxPipeline: "
        "ah.attach(pipe.text_encoder_2, ...)",
    )
    pictures = []
    for name in (None, "text_encoder_2", "vae"):
        scramble_parameters(ah.attach(getattr(pipe, name) if name else pipe, "lora", name="a"))
        pictures.append(picture(pipe))
    assert min(difference(*pair) for pair in zip(pictures, [bare, *pictures], strict=False)) > 1e-4
    for name in (None, "text_encoder_2", "vae"):
        here, there = ((getattr(p, name) if name else p) for p in (pipe, other))
        ah.adapters(here)["a"].save(tmp_path / str(name))
        ah.load(there, tmp_path / str(name))
        ah.detach(here)
    assert difference(picture(other), pictures[-1]) <= ALMOST
    assert torch.equal(picture(pipe), bare)
    pipe.vae = pipeline(seed=1, kind="FluxPipeline").vae
    ah.load(pipe, tmp_path / "None")


# Where a pipeline has torch.compile(part), and where the part is compiled in place.
COMPILED = {
    "another module": lambda pipe: setattr(
        pipe, "transformer", torch.compile(pipe.transformer, backend="eager")
    ),
    "in place": lambda pipe: pipe.transformer.compile(backend="eager"),
}
SWAPS = {
    "an average": lambda pipe: ah.activate(pipe, ah.Average(["a", "b"], [0.7, 0.3])),
    "one is left": lambda pipe: (ah.activate(pipe, "a"), ah.detach(pipe, "b")),
    "merged": ah.merge,
    "unmerged": ah.unmerge,
    "detached": ah.detach,
}


@pytest.mark.skipif(not ALL, reason="six compilations")
@pytest.mark.parametrize("way", COMPILED)
def test_a_compiled_part_follows_every_swap(way):
    """And takes no new adapter: torch would not see its hooks."""
    torch._dynamo.reset()
    pipes = []
    for _ in range(2):
        pipes.append(pipe := pipeline(kind="DiTPipeline"))
        scramble_parameters(ah.attach(pipe, "lora(sites=['attn.*'])", name="a"))
        scramble_parameters(ah.attach(pipe, "lora(sites=['attn.q', 'ffn.up'])", name="b"), seed=2)
    compiled, plain = pipes
    COMPILED[way](compiled)
    assert difference(picture(compiled), picture(plain)) <= ALMOST
    for name, swap in SWAPS.items():
        for pipe in pipes:
            swap(pipe)
        assert difference(picture(compiled), picture(plain)) <= ALMOST, name
    with pytest.raises(AttachError, match="compiled") as error:
        ah.attach(compiled, "lora")
    torch._dynamo.reset()
    if way == "in place":
        return
    assert "pipe.transformer = pipe.transformer._orig_mod; attach; " in error.value.hint
    compiled.transformer = compiled.transformer._orig_mod
    for pipe in pipes:
        torch.manual_seed(0)
        scramble_parameters(ah.attach(pipe, "lora(sites=['ffn.down'])"))
    COMPILED[way](compiled)
    assert difference(picture(compiled), picture(plain)) <= ALMOST
    torch._dynamo.reset()
