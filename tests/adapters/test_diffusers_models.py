"""Adapters of the models of diffusers: what is found in each, and a LoRA's life, beside peft's."""

from __future__ import annotations

import inspect

import peft
import pytest
import torch

import adapterhub as ah
from adapterhub.anatomy.backbone import join
from adapterhub.anatomy.projections import is_projection
from adapterhub.errors import SiteError
from tests.kit.pipelines import MODELS, diffusers, model, output
from tests.kit.selection import cases_of, long_table
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


@long_table("name", MODELS, 12, nightly=4)
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
