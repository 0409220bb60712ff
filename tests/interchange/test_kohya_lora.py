"""Kohya's and LyCORIS's files of Stable Diffusion: equal weights here, in diffusers, by formula."""

import itertools
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.errors import FileError, MismatchError
from adapterhub.interchange.pipeline_files import FILE
from tests.kit import tiny_models
from tests.kit.pipelines import pipeline
from tests.kit.selection import long_table

pytestmark = pytest.mark.filterwarnings("ignore")
SD, XL = "StableDiffusionPipeline", "StableDiffusionXLPipeline"
PARTS = {
    "unet": ("lora_unet_", "lora_unet_"),
    "text_encoder": ("lora_te_", "lora_te1_"),
    "text_encoder_2": ("", "lora_te2_"),
}
PLACES = {  # sites of two kinds, so that they can have other ranks
    "linear": ["unet.*.to_q", "unet.*.to_out.0"],
    "conv 1x1": ["unet.*.conv_shortcut", "unet.conv_out"],
    "conv 3x3": ["unet.*.conv1", "unet.*.conv"],
    "feed forward": ["unet.*.ff.net.0.proj", "unet.*.ff.net.2"],
    "time": ["unet.*.time_emb_proj", "unet.time_embedding.*"],
    "te1 attention": ["text_encoder.*.q_proj", "text_encoder.*.v_proj"],
    "te1 mlp": ["text_encoder.*.fc1", "text_encoder.*.fc2"],
    "te2 attention": ["text_encoder_2.*.q_proj", "text_encoder_2.*.out_proj"],
    "te2 k alone": ["text_encoder_2.*.k_proj"],
    "te2 mlp": ["text_encoder_2.*.fc1", "text_encoder_2.*.fc2"],
    "added": ["unet.add_embedding.linear_1", "unet.add_embedding.linear_2"],
    "all": ["unet.*.to_k", "text_encoder*.q_proj", "text_encoder*.fc1"],
}
KINDS = {SD: [p for p in PLACES if "te2" not in p and p != "added"], XL: [*PLACES]}
CELLS = [
    (kind, place, how, style)
    for kind, places in KINDS.items()
    for place in places
    for how in ("one rank", "several", "dora")
    for style in ("diffusers", "kohya")
]


def weights(pipe):
    """Return the weights of the parts of a pipeline."""
    found = {}
    for part in PARTS:
        module = getattr(pipe, part, None)
        for name, tensor in module.state_dict().items() if module is not None else ():
            if "lora" not in name:
                found[f"{part}.{name.replace('.base_layer', '')}"] = tensor.clone()
    return found


def close(found, expected, far=1e-05):
    """Check that weights are equal."""
    assert found.keys() >= expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=far, rtol=1e-4)


def names(pipe):
    """Return the modules of a pipeline by the names that kohya's scripts give them."""
    several, found = hasattr(pipe, "text_encoder_2"), {}
    for part, prefixes in PARTS.items():
        for path, module in getattr(pipe, part, torch.nn.Module()).named_modules():
            inside = path
            if part != "unet" and not path.startswith(("text_model.", "text_projection")):
                inside = f"text_model.{path}"
            found[prefixes[several] + inside.replace(".", "_")] = f"{part}.{path}.weight", module
    return found


def by_formula(pipe, stored):
    """Return the weights after kohya's formula, with the magnitudes of LyCORIS."""
    whole, of = weights(pipe), names(pipe)
    for name in {name.partition(".")[0] for name in stored}:
        own = {
            n.partition(".")[2]: t.float() for n, t in stored.items() if n.startswith(f"{name}.")
        }
        path, module = of[name]
        low, high = own["lora_down.weight"], own["lora_up.weight"]
        rank = len(low)
        if (mid := own.get("lora_mid.weight")) is not None:
            low = torch.einsum("rskl,sixy->rikl", mid, low)
            rank = len(mid)
        scale = float(own.get("alpha", torch.tensor(rank))) / rank
        weight = module.weight.detach() + scale * (high.flatten(1) @ low.flatten(1)).reshape(
            module.weight.shape
        )
        if (size := own.get("dora_scale")) is not None:
            rows = [-1, *[1] * (weight.dim() - 1)]
            weight = weight * size.reshape(rows) / weight.flatten(1).norm(dim=1).reshape(rows)
        whole[path] = weight
    return whole


def merged(pipe):
    """Return the weights with the adapter of a pipeline."""
    ah.merge(pipe)
    return weights(pipe)


def in_diffusers(kind, folder):
    """Return the weights with a file that diffusers has read."""
    pipe = pipeline(kind=kind)
    pipe.load_lora_weights(folder)
    pipe.fuse_lora(components=[part for part in PARTS if hasattr(pipe, part)])
    return weights(pipe)


@long_table(("kind", "place", "how", "style"), CELLS, 24, nightly=10)
def test_files_have_the_weights_of_the_adapter(kind, place, how, style, tmp_path):
    sites = PLACES[place]
    specs: dict[str, Any] = {
        "one rank": [{"lora": {"sites": sites, "rank": 2, "alpha": 3}}],
        "several": [
            {"lora": {"sites": sites[:1], "rank": 2, "alpha": 1}},
            {"lora": {"sites": sites[1:] or ["unet.*.to_v"], "rank": 4, "alpha": 6}},
        ],
        "dora": [{"dora": {"sites": sites, "rank": 2, "alpha": 3}}],
    }
    pipe = pipeline(kind=kind)
    bare, adapter = weights(pipe), ah.attach(pipe, specs[how], name="style")
    tiny_models.scramble_parameters(adapter, std=0.2)
    if how == "dora" and (style == "kohya" or "te" in place.split()[0] or place == "all"):
        with pytest.raises(MismatchError, match="magnitudes") as error:
            adapter.export(tmp_path, format=style)
        assert "diffusers leaves the magnitudes" in str(error.value)
        return
    adapter.export(tmp_path, format=style)
    expected = merged(pipe)
    assert any(not torch.equal(expected[name], bare[name]) for name in bare)
    close(in_diffusers(kind, tmp_path), expected)
    here = pipeline(kind=kind)
    ah.load(here, tmp_path)
    close(merged(here), expected)
    if style == "kohya" and place != "added":
        close(by_formula(pipeline(kind=kind), load_file(tmp_path / FILE)), expected)


def drawn(pipe, chosen, **more):
    """Return a file of kohya's with an update of each chosen module, of another rank each."""
    torch.manual_seed(5)
    found, of = {}, names(pipe)
    for number, name in enumerate(chosen):
        weight, rank = of[name][1].weight, 2 + number
        low = torch.randn(rank, *weight.shape[1:]) * 0.2
        if more.get("mid") and weight.dim() == 4:
            low = torch.randn(rank, weight.shape[1], 1, 1) * 0.3
            found[f"{name}.lora_mid.weight"] = torch.randn(rank, rank, *weight.shape[2:]) * 0.3
        found[f"{name}.lora_down.weight"] = low
        ones = [1] * (weight.dim() - 2)
        found[f"{name}.lora_up.weight"] = torch.randn(len(weight), rank, *ones) * 0.2
        if more.get("alpha", True):
            found[f"{name}.alpha"] = torch.tensor(1.0 + number)
        if number in more.get("dora", ()):
            found[f"{name}.dora_scale"] = torch.rand(len(weight), 1, *ones) + 0.5
    return {name: tensor.to(more.get("dtype", torch.float32)) for name, tensor in found.items()}


UNET = [
    "lora_unet_up_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q",
    "lora_unet_down_blocks_1_resnets_0_conv1",
    "lora_unet_up_blocks_0_resnets_1_conv_shortcut",
    "lora_unet_down_blocks_0_downsamplers_0_conv",
]
TE1 = [f"text_model_encoder_layers_0_{each}" for each in ("self_attn_q_proj", "mlp_fc1")]
OF_KIND = {
    SD: [*UNET, *(f"lora_te_{each}" for each in TE1)],
    XL: [
        *UNET,
        *(f"lora_te1_{each}" for each in TE1),
        *(f"lora_te2_{each}" for each in TE1),
        "lora_te2_text_projection",
    ],
}
FORMS: dict[str, dict[str, Any]] = {
    "alphas": {},
    "no alphas": {"alpha": False},
    "fp16": {"dtype": torch.float16},
    "bf16": {"dtype": torch.bfloat16},
    "dora": {"dora": range(99)},
    "dora in places": {"dora": (0, 2, 5)},
    "dora, fp16": {"dora": range(99), "dtype": torch.float16},
    "locon with a kernel": {"mid": True},
    "locon with a kernel, dora": {"mid": True, "dora": range(99)},
}


@long_table(("kind", "form"), itertools.product(OF_KIND, FORMS), 4, nightly=2)
def test_files_of_scripts_are_read_as_they_compute(kind, form, tmp_path):
    pipe = pipeline(kind=kind)
    stored = drawn(pipe, OF_KIND[kind], **FORMS[form])
    save_file(stored, tmp_path / FILE)
    expected = by_formula(pipe, stored)
    here = pipeline(kind=kind)
    ah.load(here, tmp_path)
    close(merged(here), expected, 1e-4)


def test_names_of_the_authors_of_a_unet(tmp_path):
    """SDXL's files have the blocks of its authors' code."""
    pipe = pipeline(kind=XL)
    attention = "transformer_blocks_0_attn1_to_v"
    theirs = {
        "input_blocks_1_0_in_layers_2": "down_blocks_0_resnets_0_conv1",
        "input_blocks_1_0_emb_layers_1": "down_blocks_0_resnets_0_time_emb_proj",
        "input_blocks_2_0_op": "down_blocks_0_downsamplers_0_conv",
        "middle_block_0_out_layers_3": "mid_block_resnets_0_conv2",
        f"output_blocks_0_1_{attention}": f"up_blocks_0_attentions_0_{attention}",
        "output_blocks_0_0_skip_connection": "up_blocks_0_resnets_0_conv_shortcut",
        "input_blocks_0_0": "conv_in",
        "out_2": "conv_out",
        "time_embed_0": "time_embedding_linear_1",
        "label_emb_0_2": "add_embedding_linear_2",
    }
    stored = drawn(pipe, [f"lora_unet_{name}" for name in theirs.values()], dora=(1, 4))
    back = {f"lora_unet_{name}": f"lora_unet_{other}" for other, name in theirs.items()}
    parts = ((name.partition("."), tensor) for name, tensor in stored.items())
    renamed = {f"{back[module]}.{rest}": tensor for (module, _, rest), tensor in parts}
    save_file(renamed, tmp_path / FILE)
    here = pipeline(kind=XL)
    ah.load(here, tmp_path)
    close(merged(here), by_formula(pipe, stored), 1e-4)


Q = UNET[0]
REFUSED = {
    "LoHa": {f"hada_w{n}_{side}": (2, 2) for n in (1, 2) for side in "ab"},
    "LoKr": {"lokr_w1": (4, 4), "lokr_w2": (4, 4)},
    "(IA)^3": {"weight": (16,), "on_input": (1,)},
    "a full update": {"diff": (16, 16)},
    "a norm": {"w_norm": (16,), "b_norm": (16,)},
    "OFT": {"oft_blocks": (2, 8, 8)},
    "GLoRA": {"a1.weight": (2, 16), "a2.weight": (16, 2)},
    "": {"reference": (1,)},
}  # fmt: skip


@pytest.mark.parametrize("method", REFUSED)
def test_tensors_of_other_methods_are_refused_by_their_names(method, tmp_path):
    pipe = pipeline()
    stored = drawn(pipe, OF_KIND[SD])
    more = {f"{UNET[1]}.{name}": torch.ones(shape) for name, shape in REFUSED[method].items()}
    save_file(stored | more, tmp_path / FILE)
    with pytest.raises(MismatchError, match="not read") as error:
        ah.load(pipe, tmp_path)
    assert method in str(error.value)
    assert all(name in str(error.value) for name in more)
    assert ah.adapters(pipe) == {}


FLUX = "lora_unet_double_blocks_0_img_attn_proj"
SHAPES = {"lora_down.weight": (2, 16), "lora_up.weight": (16, 2), "dora_scale": (16, 1)}
UNFIT = [
    ({f"{Q}.dora_scale": torch.ones(1, 16)}, "wd_on_output=False"),
    ({f"{Q}.dora_scale": torch.ones(7, 1)}, "dora_scale"),
    ({f"{Q}.alpha": torch.ones(2)}, "alpha"),
    ({f"{Q}.lora_down.weight": torch.ones(2, 9)}, "lora_down.weight"),
    ({f"{Q}.lora_up.weight": torch.ones(16, 9)}, "lora_up.weight"),
    ({f"{Q}.lora_mid.weight": torch.ones(2, 2, 3, 3)}, "lora_mid.weight"),
    ({f"{Q[:-1]}k.lora_down.weight": torch.ones(2, 16)}, "no lora_up.weight"),
    ({f"{Q[:-1]}k.dora_scale": torch.ones(16, 1)}, "no lora_down.weight"),
    ({"lora_unet_nothing.lora_down.weight": torch.ones(2, 2)}, "lora_unet_nothing"),
    ({"lora_te2_text_projection.alpha": torch.ones(())}, "lora_te2_text_projection"),
    ({f"{FLUX}.{name}": torch.ones(shape) for name, shape in SHAPES.items()}, "magnitudes of DoRA"),
]


@pytest.mark.parametrize(("change", "problem"), UNFIT)
def test_what_does_not_fit_is_refused_by_its_name(change, problem, tmp_path):
    of_flux = f"{FLUX}.dora_scale" in change
    pipe = pipeline(kind="FluxPipeline" if of_flux else SD)
    save_file(change if of_flux else drawn(pipe, OF_KIND[SD]) | change, tmp_path / FILE)
    with pytest.raises((FileError, MismatchError)) as error:
        ah.load(pipe, tmp_path)
    assert problem in str(error.value)
    assert ah.adapters(pipe) == {}
