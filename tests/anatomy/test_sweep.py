"""The sweep over all model types: what it finds is seen, and counted."""

import functools
import itertools
import re

import every_type
import pytest
import sweep
import sweep_cells
import sweep_page
import torch
import transformers

from adapterhub.methods import METHODS
from tests.kit import media
from tests.kit.matrix import AT_EMBEDDINGS, OF_TEXTS
from tests.kit.selection import long_table


@pytest.fixture
def model():
    return every_type.build("llama", "AutoModelForCausalLM", tiny=True)


# Latent attention, experts, one key-value head, sound.
COMMON = ("deepseek_v3", "gpt_oss", "falcon", "wav2vec2")
METHODS_OF_EACH_KIND = ("lora", "pfeiffer", "ia3", "prefix", "bitfit", "norms", "full", "unfreeze")
REFUSED = {
    ("deepseek_v3", "bitfit"): "this deepseek_v3 backbone has none",
    ("reformer", "scalar-mix"): "scalar-mix does not fit a reformer backbone",  # two streams
    # Token ids are read next to embeddings, or parts of the text model are called.
    **{(each, "prompt"): "prompt does not fit" for each in (
        "deepseek_v4", "fsmt", "speech_to_text", "bridgetower"
    )},
}  # fmt: skip


@functools.cache
def built(model_type):
    """Build a model with its inputs once; each cell leaves it as it was, or is no `ok`."""
    auto = every_type.autos(model_type, every_type.ADAPTED)[0]
    found = every_type.build(model_type, auto, tiny=True)
    return found, sweep_cells.inputs_for(found)


def outcome(model_type, method):
    found, inputs = built(model_type)
    return sweep_cells.cell(found, method, inputs)


@long_table(
    ("model_type", "method"),
    [
        *(each for each in itertools.product(COMMON, METHODS_OF_EACH_KIND) if each not in REFUSED),
        *((each, "prompt") for each in ("higgs_audio_v2", "pocket_tts")),
        ("zamba2", "pfeiffer"),
        ("deepseek_v4", "lora"),
        ("jamba", "houlsby"),  # a mixer whose input is named
        ("mamba", "pfeiffer"),  # a mixer in place of a feed-forward network
        ("internvl", "lora"),  # two stacks
        ("kimi_linear", "ia3"),  # latent and linear attention
        ("recurrent_gemma", "prefix"),  # attention in some layers
        ("informer", "lora"),  # a list of modules with None in it
        ("dinov3_vit", "lora"),  # a base model with a module around its layers
        ("encoder-decoder", "lora"),  # no class of AutoModel
        ("funnel", "full"),  # two classes of AutoModel
        ("gemma4_text", "lora"),  # options that differ between layers
        ("mobilebert", "full"),  # an empty parameter
        ("parakeet_ctc", "lora"),  # integer buffers
        ("qianfan_ocr", "lora"),  # other names in a checkpoint of the base model
        ("convnext", "pfeiffer"),  # stages of several sizes, networks alone
        ("mgp-str", "lora"),  # a sequence of layers, no list
        ("swin", "pfeiffer"),  # stages of several sizes
        ("pp_lcnet", "head"),  # modules without parameters behind the encoder
        ("pvt", "freeze"),  # a number of labels without names
        ("rwkv", "lora"),  # states that are changed in place, unless it trains
        ("wavlm", "lora"),  # attention that hands its weights to a function
        ("wavlm", "houlsby"),
        ("wavlm", "ia3"),
        # Outputs of zero at the start, in each sublayer: the weights are drawn again.
        ("neomme", "lora"),
        # Pictures with text, and experts, that many people use.
        ("gemma3", "lora"),
        ("qwen2_vl", "pfeiffer"),
        ("glm4_moe", "prefix"),
        ("llama4_text", "ia3"),
        ("qwen3_moe", "lora"),
        # Usual architectures without a row.
        *zip(
            ("cohere", "data2vec-text", "ernie", "glm", "granite", "nemotron", "olmoe", "phi",
             "qwen2_moe", "rembert", "stablelm", "starcoder2"),
            ("lora", "houlsby", "prefix", "mam", "prompt", "parallel") * 2,
            strict=True,
        ),
    ],
    4,
    nightly=4,
)  # fmt: skip
def test_a_method_works_on_a_common_or_irregular_architecture(model_type, method):
    not_run = model_type in ("informer", "mgp-str")
    assert outcome(model_type, method) == ("ok, not run" if not_run else "ok")


@pytest.mark.parametrize(("model_type", "method"), REFUSED)
def test_a_method_without_a_place_is_refused(model_type, method):
    found = outcome(model_type, method)
    assert found.startswith("refused: ")
    assert REFUSED[model_type, method] in found


# A ViT has no tokens, nor the encoder of Whisper, which has no task head.
NOT_APPLICABLE = {("vit", method) for method in (*AT_EMBEDDINGS, *OF_TEXTS)}
NOT_APPLICABLE |= {("whisper", "head"), ("whisper", "alora")}
SEEN_AND_HEARD = list(itertools.product(("vit", "whisper"), sorted(METHODS)))


@functools.cache
def seeing_or_hearing(model_type):
    """Build a smaller model than the sweep's, with inputs: a picture has 200 tokens there."""
    torch.manual_seed(0)
    if model_type == "vit":
        model = transformers.ViTForImageClassification(media.vit_config()).eval()
        return model, sweep_cells.inputs_for(model)
    config = media.sound_config("whisper")
    sound = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions)
    ids = torch.arange(5, 15).view(2, 5)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    return model, {"input_features": sound, "decoder_input_ids": ids}


@long_table(("model_type", "method"), SEEN_AND_HEARD, 16, nightly=8)
def test_pictures_and_speech(model_type, method):
    model, inputs = seeing_or_hearing(model_type)
    found = sweep_cells.cell(model, method, inputs)
    if (model_type, method) in NOT_APPLICABLE:
        assert re.match(r"refused: .*(does not fit|nothing would train)", found)
    else:
        assert found == "ok"


def test_what_a_random_model_does_not_compute_is_no_failure():
    """MRA's attention is zero without its kernel."""
    cells = {"lora": "ok, not run", "prompt": "ok, not run", "pfeiffer": "ok"}
    found = every_type.build("mra", "AutoModelForMaskedLM", tiny=True)
    inputs = sweep_cells.inputs_for(found)
    assert {method: sweep_cells.cell(found, method, inputs) for method in cells} == cells


def test_a_module_that_gets_no_gradient_is_seen_where_the_backbone_would_learn(model, monkeypatch):
    monkeypatch.setattr(sweep_cells, "_learning", lambda *rest: set())
    inputs = sweep_cells.inputs_for(model)
    for method in ("lora", "prefix", "prompt", "full"):
        assert sweep_cells.cell(model, method, inputs).startswith("wrong: gradients")


@pytest.mark.parametrize("broken", ["start", "changes", "detach"])
def test_a_broken_invariant_is_named(model, monkeypatch, broken):
    """Outputs that are wrong in one place: after attaching, after a change, after detaching."""
    calls = iter(range(99))
    wrong = {"start": lambda n: n == 1, "changes": lambda n: False, "detach": lambda n: n == 4}
    first = []

    def outputs(model, inputs):
        found = real(model, inputs)
        first.append(found)
        if broken == "changes":
            return first[0]
        return found + 1 if wrong[broken](next(calls)) else found

    inputs, real = sweep_cells.inputs_for(model), sweep_cells.outputs
    monkeypatch.setattr(sweep_cells, "outputs", outputs)
    monkeypatch.setattr(sweep_cells, "_check_cache", lambda *rest: None)
    monkeypatch.setattr(sweep_cells, "_check_effects", lambda *rest: None)
    assert sweep_cells.cell(model, "lora", inputs) == f"wrong: {broken}"


def test_a_type_runs_in_a_process_of_its_own_for_some_time(monkeypatch):
    found = sweep._in_a_process("bert", ("lora", "head"), False)
    assert found["class"] == "BertForMaskedLM"
    assert found["inputs"]
    assert found["cells"]["lora"] == "ok"
    assert found["cells"]["head"].startswith("refused: ")
    monkeypatch.setattr(sweep, "SECONDS", 0.0)
    assert sweep._in_a_process("bert", ("lora",), False)["reason"] == "more than 0.0 s"


def test_the_page_in_the_documentation_is_whole():
    found = sweep_page.read(sweep.PAGE.read_text("utf-8"))
    assert found.columns == (*sweep.METHODS, *sweep_page.PEFT)
    assert len(found.rows) >= 530
    words = [cell.word for row in found.rows.values() for cell in row.values()]
    assert words.count("works") > len(words) / 2
    assert set(sweep.METHODS) <= set(METHODS)
