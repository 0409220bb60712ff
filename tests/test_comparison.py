"""What docs/comparison.md says about peft and adapterhub is executed here, with the installed peft.

The page names the tests in its notes. What it says about `adapters` comes from the documents of
that library.
"""

import contextlib
import copy
import importlib.metadata
import json
import pkgutil
import re
import warnings
from pathlib import Path
from typing import get_args

import held_methods as peers
import pytest
import tables
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel

import adapterhub as ah
from adapterhub.errors import AdapterhubError, FileError, MismatchError, SiteError
from adapterhub.methods import METHODS
from adapterhub.methods.common.base import parse_methods
from adapterhub.recipe.recipe import Init
from adapterhub.tasks import TASKS
from tests.kit import tiny_models
from tests.kit.tiny_models import logits

peft = pytest.importorskip("peft")
from peft import LoraConfig, PeftModel, PeftType, get_peft_model, optimizers  # noqa: E402
from peft.tuners.lora import config as lora_config  # noqa: E402
from peft.tuners.lora import variants  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
WEIGHTS = "adapter_model.safetensors"
BATCH = tiny_models.batch()


def bert(seed=0, task="classification"):
    return tiny_models.model("bert", task, seed=seed)


def lora(**options):
    return LoraConfig(target_modules=["query", "value"], r=4, **options)


def scrambled(model):
    """Give B of every LoRA random values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model.eval()


@pytest.fixture
def theirs(tmp_path):
    """Save a LoRA of peft for the first model."""
    model = scrambled(get_peft_model(bert(), lora(task_type="SEQ_CLS")))
    model.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.fixture
def ours(tmp_path):
    """Save a LoRA of adapterhub for the first model."""
    adapter = ah.attach(bert(), "lora")
    tiny_models.scramble(adapter)
    adapter.save(tmp_path / "ours")
    return tmp_path / "ours"


def test_methods():
    missing = {name for name, held in peers.PEFT.items() if not held.what}
    assert tables.written(PAGE) == PAGE
    assert tables.COUNTS["methods"]() == len(METHODS)
    assert tables.COUNTS["kinds of peft"]() == len(PeftType)
    assert {"methods", "kinds of peft"} <= set(re.findall(r"<!-- count: ([\w ]+) -->", PAGE))
    assert "bottleneck" not in " ".join(missing)
    assert "adapterfusion" not in {held.what for held in peers.PEFT.values()}


def test_all_of_peft_and_adapters():
    """Each tuner, LoRA variant, start and optimizer is held, or has a reason; the page says so."""
    assert {kind.value.lower() for kind in PeftType} == peers.PEFT.keys()
    tuners = {config.__name__ for config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.values()}
    configs = {name for name in vars(lora_config) if name.endswith("Config")} - tuners
    starts = LoraConfig.__dataclass_fields__["init_lora_weights"].type
    found = {name.removesuffix("Config") for name in configs - {"PeftConfig"}}
    found |= {
        name.removesuffix("Variant").removesuffix("Linear") if name[:4] != "Dora"
        else name.removesuffix("Variant")
        for name, value in vars(variants).items()
        if name.endswith("Variant") and value.__module__ == variants.__name__ and name[0] != "_"
    }  # fmt: skip
    found |= {word.partition("[")[0] for word in re.findall(r"'([^']+)'", str(starts))}
    found |= {module.name for module in pkgutil.iter_modules(optimizers.__path__)}
    assert {name.lower() for name in found} == {name.lower() for name in peers.LORA}
    assert {"seq_bn", "compacter++", "loreft", "MTLLoRAConfig"} <= peers.ADAPTERS.keys()
    for held in (*peers.PEFT.values(), *peers.LORA.values(), *peers.ADAPTERS.values()):
        if held.what:
            assert parse_methods(held.what.partition(", train.")[0])
        else:
            assert held.note
    for name, held in (*peers.PEFT.items(), *peers.ADAPTERS.items()):
        if not held.what:  # what a page calls missing is refused by name
            with pytest.raises(AdapterhubError, match="unknown method"):
                parse_methods(name.lower().removesuffix("config").replace("_", "-"))
    alone = {parse_methods(name)[0].name for name in peers.ALONE}
    others = {h.what for table in (peers.PEFT, peers.ADAPTERS) for h in table.values()}
    assert len(alone - others) > 10
    assert peers.written(PAGE) == PAGE


MISSING = {  # of a LoRA of peft: what its configuration has
    "Arrow": {"arrow_config": {"top_k": 2}},
    "DoraEmbedding": None,
    "LoraRuntime": None,  # of memory: nothing to import
    "Monteclora": {"monteclora_config": {"monteclora_n": 2}},
    "QALora": {"use_qalora": True},
}


def test_missing_variants_of_lora(theirs):
    """What the table of LoRA calls missing is refused by name; at an embedding there is no DoRA."""
    assert {name for name, held in peers.LORA.items() if not held.what} == MISSING.keys()
    with pytest.raises(SiteError, match="only what adds to the table"):
        ah.attach(bert(), "dora(sites=['word_embeddings'])")
    file = theirs / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for fields in filter(None, MISSING.values()):
        file.write_text(json.dumps(config | fields), encoding="utf-8")
        with pytest.raises(FileError) as error:
            ah.load(bert(), theirs, any_backbone=True)
        assert all(any(name in line for line in error.value.offenders) for name in fields)


def test_a_model_without_a_table():
    model = tiny_models.model("olmo", "causal-lm")
    with pytest.raises(ValueError, match="target_modules"):
        get_peft_model(copy.deepcopy(model), LoraConfig())
    get_peft_model(copy.deepcopy(model), LoraConfig(target_modules="all-linear"))
    ah.attach(model, "lora")


def test_any_torch_module():
    layers = nn.Sequential(nn.Linear(2, 2))
    get_peft_model(layers, LoraConfig(target_modules=["0"]))
    own = nn.Sequential(nn.Linear(2, 2))
    ah.attach(own, "lora(sites=['0'])")
    assert list(ah.adapters(own)) == ["default"]


def test_a_pipeline_of_diffusers():
    pytest.importorskip("diffusers")
    from tests.kit import pipelines

    pipe = pipelines.pipeline()
    pipe.unet.add_adapter(LoraConfig(target_modules=["to_q"]))  # peft, by diffusers
    ah.attach(pipelines.pipeline(), "lora(sites=['unet.*.to_q'])")
    assert "text-to-image" in TASKS


@pytest.mark.parametrize("architecture", ["vit", "wav2vec2", "vlm-llava"])
def test_images_and_audio(architecture, backbones):
    model = AutoModel.from_pretrained(backbones(architecture))
    theirs = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules="all-linear"))
    assert theirs.get_nb_trainable_parameters()[0] > 0
    assert ah.attach(model, "lora").count() > 0


def test_counts_of_architectures():
    """The row has the figures of `make sweep`; LoRA is attached to more types than peft's."""
    row = re.search(r"^\| Attaches LoRA without .*", PAGE, re.MULTILINE)[0]
    names = ("types", "types with lora", "types with peft", "types with peft all-linear")
    assert re.findall(r"<!-- count: ([\w -]+) -->([\d,]+)<", row) == [
        (name, f"{tables.COUNTS[name]():,}") for name in names
    ]
    assert tables.COUNTS["types with lora"]() > tables.COUNTS["types with peft"]()


def load_silently(model, folder):
    """Load a checkpoint with peft, and check that nothing is said about it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PeftModel.from_pretrained(model, folder)
    assert not [warning for warning in caught if warning.category is UserWarning]


def test_a_different_backbone(theirs, ours):
    """Equal shapes, other weights: peft loads without any warning."""
    load_silently(bert(seed=1), theirs)
    with pytest.raises(MismatchError):
        ah.load(bert(seed=1), ours)


def test_a_missing_tensor(theirs, ours):
    """peft warns, and keeps the values that it has drawn."""
    tensors = load_file(theirs / WEIGHTS)
    tensors.pop(next(name for name in tensors if "lora_B" in name))
    save_file(tensors, theirs / WEIGHTS, {"format": "pt"})
    with pytest.warns(UserWarning, match="missing adapter keys"):
        PeftModel.from_pretrained(bert(), theirs)
    with pytest.raises(MismatchError):
        ah.load(bert(), theirs, any_backbone=True)


def test_a_changed_byte(theirs, ours):
    def flip(file):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data))

    flip(theirs / WEIGHTS)
    flip(ours / "adapter.safetensors")
    load_silently(bert(), theirs)
    with pytest.raises(FileError):
        ah.load(bert(), ours)


def test_the_head_and_its_labels(theirs, ours):
    """With a task type, peft saves the head; it has no place for the names of labels."""
    assert any("classifier" in name for name in load_file(theirs / WEIGHTS))
    assert not any("label" in name for name in LoraConfig.__dataclass_fields__)
    assert ah.load(bert(), ours).labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_the_model_stays_itself():
    """peft wraps the model, and replaces modules; adapterhub replaces the head alone."""
    assert not isinstance(get_peft_model(bert(), lora()), type(bert()))
    injected = peft.inject_adapter_in_model(lora(), bert())
    assert injected.state_dict().keys() != bert().state_dict().keys()
    model = bert()
    modules = dict(model.bert.named_modules())
    ah.attach(model, "lora")
    assert all(model.bert.get_submodule(name) is module for name, module in modules.items())


def test_undoing():
    """After peft's `unload`, weights and names are as before; what was trainable is frozen."""
    before = bert()
    after = get_peft_model(bert(), lora()).unload()
    assert after.state_dict().keys() == before.state_dict().keys()
    assert all(p.requires_grad for p in before.parameters())
    assert not any(p.requires_grad for p in after.parameters())
    ah.attach(before, "lora").detach()
    assert all(p.requires_grad for p in before.parameters())


def test_merging_and_back():
    """peft subtracts what it added, which leaves rounding; the outputs stay close."""
    model = bert().bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    theirs = scrambled(get_peft_model(copy.deepcopy(model), lora()))
    theirs.merge_adapter()
    theirs.unmerge_adapter()
    plain = theirs.unload().state_dict()
    assert any(not torch.equal(plain[name], tensor) for name, tensor in before.items())
    tiny_models.scramble(ah.attach(model, "lora"), std=0.02)
    ah.merge(model)
    ah.unmerge(model)
    ah.detach(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_an_adapter_for_each_row():
    """peft: LoRA in evaluation mode, and not prefixes; adapterhub: also in training."""
    rows = ["first", "second", "__base__"]
    model = get_peft_model(bert(), lora(), adapter_name="first")
    model.add_adapter("second", lora())
    assert logits(scrambled(model), **BATCH, adapter_names=rows).shape == (3, 3)
    with pytest.raises(ValueError, match="training mode"):
        logits(model.train(), **BATCH, adapter_names=rows)
    config = peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    prefixes = get_peft_model(bert(), config, adapter_name="a").eval()
    prefixes.add_adapter("b", config)
    prefixes.set_adapter("a")
    with contextlib.suppress(TypeError, ValueError):  # refused, or ignored
        assert torch.equal(logits(prefixes, **BATCH, adapter_names=["b"] * 3), logits(prefixes))
    model = bert()
    ah.attach(model, "prefix", name="a")
    ah.attach(model.train(), "lora", name="b")
    with ah.route(model, ["a", "b", None]):
        assert model(**tiny_models.batch()).logits.requires_grad


def test_the_command_line():
    """peft installs no command; adapterhub has one that trains."""
    points = importlib.metadata.distribution("peft").entry_points
    assert not [point for point in points if point.group == "console_scripts"]
    from adapterhub.cli import COMMANDS

    assert {"train", "predict", "publish"} <= set(COMMANDS)


def test_formats(ours, tmp_path):
    """peft's format is read by others, and adapterhub writes it; peft reads only its own."""
    model = bert()
    ah.load(model, ours).export(tmp_path / "exported")
    there = PeftModel.from_pretrained(bert(), tmp_path / "exported").eval()
    torch.testing.assert_close(logits(there), logits(model), atol=1e-5, rtol=1e-5)
    with pytest.raises((ValueError, OSError)):
        PeftModel.from_pretrained(bert(), ours)


def test_quantized_layers_of_peft():
    """Methods with layers of their own for bitsandbytes; others have generic support in part."""
    tuners = Path(peft.__file__).parent / "tuners"
    own = sorted(file.parent.name for file in tuners.glob("*/bnb.py"))
    assert f"some methods ({', '.join(own)})" in PAGE


def test_starts():
    """Starts of LoRA that peft has, and those that adapterhub has not."""
    for name in ("eva", "corda", "loftq", "olora"):
        assert name in str(LoraConfig.__dataclass_fields__["init_lora_weights"].type).lower()
    assert {"eva", "eva-ranks", "corda", "lora-ga", "loftq"} == set(get_args(Init))
    with pytest.raises(AdapterhubError):
        ah.attach(bert(), "lora", init_lora_weights="loftq")


def test_the_page_names_the_tests_and_the_versions():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named == {name for name in globals() if re.match(r"test_(?!the_(page|short))", name)}
    assert f"peft {importlib.metadata.version('peft')}" in PAGE
    assert f"adapterhub {ah.__version__.rpartition('.')[0]}," in PAGE


def test_the_short_table_agrees_with_the_long_one():
    """A feature has the same marks in both tables."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    marks: dict[str, set[tuple[str, ...]]] = {}
    for feature, *cells in rows:
        marks.setdefault(feature, set()).add(
            tuple(re.sub(r"\[.*|\*", "", c).strip() for c in cells)
        )
    assert all(len(found) == 1 for found in marks.values())
