"""Options, targets and tensors of peft checkpoints are read strictly and written canonically."""

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

import adapterhub as ah
from adapterhub.errors import FileError, MismatchError, OutputError
from adapterhub.interchange.peft import files
from adapterhub.interchange.peft.targets import Targets, modules_of
from adapterhub.interchange.peft.updates import subtracted_factors
from tests.kit import tiny_models
from tests.kit.peers import (
    compare_import,
    edit,
    edit_tensors,
    exported,
    linear_names,
    lora_config,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


CHANGING = {
    "use_hyperlora": True, "lora_bias": "yes", "use_qalora": True, "kasa_config": {"beta": "1"},
    "target_parameters": "experts.gate_up_proj", "trainable_token_indices": [-1, 2],
    "layer_replication": [[0, 2]], "alora_invocation_tokens": [-7], "megatron_config": {"a": 1},
    "arrow_config": {"top_k": 3}, "use_bdlora": {"nblocks": 0},
    "monteclora_config": {"num_samples": 2},
}  # fmt: skip


def test_one_error_lists_all_unsupported_options(checkpoint):
    edit(checkpoint, **CHANGING)
    with pytest.raises(FileError) as caught:
        ah.load(tiny_models.model("bert"), checkpoint)
    for name in CHANGING:
        assert any(name in offender for offender in caught.value.offenders), name


def test_every_option_of_peft_is_listed():
    """Each option is read, refused, or ignored because it only affects training."""
    assert len(files.KINDS) >= 22
    for kind in files.KINDS:
        config = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
        assert set(config.__dataclass_fields__) <= set(files._FIELDS[kind]), kind


def test_a_pickle_is_opened_only_on_request(checkpoint):
    """test_hostile_foreign.py tries what runs code."""
    tensors = load_file(checkpoint / "adapter_model.safetensors")
    (checkpoint / "adapter_model.safetensors").unlink()
    torch.save(tensors, checkpoint / "adapter_model.bin")
    with pytest.raises(FileError, match="allow_pickle"):
        ah.load(tiny_models.model("bert"), checkpoint)
    assert ah.load(tiny_models.model("bert"), checkpoint, allow_pickle=True).count() > 0


def test_exports_are_byte_identical(tmp_path):
    adapter, _ = exported(tmp_path / "one", "bert", {"lora": {"ranks": {"attn.q": 2}}})
    adapter.export(tmp_path / "two")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_tensor_name_with_and_without_the_prefix_is_refused(checkpoint):
    def duplicate(tensors):
        name = next(iter(tensors))
        return tensors | {name.removeprefix("base_model.model."): tensors[name].clone()}

    edit_tensors(checkpoint, duplicate)
    with pytest.raises(FileError, match="duplicate tensors"):
        files.read_peft(checkpoint)


def test_values_that_are_no_numbers_are_not_written(tmp_path):
    config = files.neutral("LORA") | {"peft_type": "LORA", "r": 2, "target_modules": ["query"]}
    bad = files.PeftFiles("LORA", config, {"a.b": torch.tensor([float("nan")])})
    with pytest.raises(OutputError, match="cannot be exported"):
        files.write_peft(tmp_path / "bad", bad)
    assert not (tmp_path / "bad").exists()


# The modules that a configuration names are found in the model.

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("targets", [["query", "value"], ["value"], r".*layer\.0.*query"])
def test_targets_and_tensors_must_agree(checkpoint, targets):
    edit(checkpoint, target_modules=targets)
    with pytest.raises(MismatchError, match="target_modules"):
        ah.load(tiny_models.model("bert"), checkpoint)


RENAMED = {
    "another class": ("bert.encoder", "encoder"),
    "another wrapper": ("bert.encoder", "text_model.bert.encoder"),
    "another version": ("bert.encoder.layer", "model.transformer.layers"),
}


@pytest.mark.parametrize("case", RENAMED)
def test_modules_that_were_renamed_are_found(checkpoint, case):
    expected = ah.load(tiny_models.model("bert"), checkpoint).tensors()
    old, new = RENAMED[case]
    edit_tensors(checkpoint, lambda tensors: {n.replace(old, new): t for n, t in tensors.items()})
    found = ah.load(tiny_models.model("bert"), checkpoint).tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_all_linear_names_the_same_modules(tmp_path):
    folder = trained(tmp_path / "theirs", "llama", lora_config(target_modules="all-linear"))
    expected = ah.load(tiny_models.model("llama"), folder).tensors()
    edit(folder, target_modules="all-linear")
    assert ah.load(tiny_models.model("llama"), folder).tensors().keys() == expected.keys()


def matched(**config):
    model = tiny_models.model("bert")
    found = Targets(files.neutral("LORA") | config, model)
    return sorted(path for path in modules_of(model) if path in found)


LAYER = "bert.encoder.layer"
MATCHES = {
    "names": ({"target_modules": ["query"]}, [0, 1]),
    "expression": ({"target_modules": r".*layer\.1.*query"}, [1]),
    "layers": ({"target_modules": ["query"], "layers_to_transform": 1}, [1]),
    "pattern": (
        {"target_modules": ["query"], "layers_to_transform": [0], "layers_pattern": "layer"},
        [0],
    ),
    "excluded": ({"target_modules": ["query"], "exclude_modules": r".*layer\.0.*"}, [1]),
    "saved": ({"target_modules": ["query"], "modules_to_save": ["query"]}, []),
    "none": ({"target_modules": None}, []),
}


def test_the_named_modules_are_targets(subtests):
    for case in MATCHES:
        with subtests.test(case=case):
            config, layers = MATCHES[case]
            assert matched(**config) == [f"{LAYER}.{n}.attention.self.query" for n in layers]


# Updates: their biases, and what an initialization subtracts.


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_biases_of_updates(tmp_path, architecture):
    """Also at the pooler of BERT and the head of BART, which are not sites."""
    model = tiny_models.model(architecture)
    names = [n for n in linear_names(model) if model.get_submodule(n).bias is not None]
    names = [n for n in names if not n.startswith(("classifier", "score"))]
    config = lora_config(target_modules=names, lora_bias=True)
    adapter = compare_import(tmp_path, architecture, config, std=0.1, atol=1e-4)
    assert {"lora", "chosen"} <= {method.name for method in adapter.methods}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("initialization", ["pissa", "olora"])
@pytest.mark.parametrize("rank", [3, 9])
def test_the_subtracted_part_is_that_of_peft(initialization, kind, rank):
    """A rank above that of the weight takes all of its components."""
    torch.manual_seed(0)
    module = nn.Sequential(kind(6, 6))
    weight = module[0].weight.detach().clone()
    expected = weight.T if kind is Conv1D else weight
    left, right = subtracted_factors(initialization, module[0], expected, min(rank, 6), 2.0)
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, init_lora_weights=initialization, target_modules=["0"]
    )
    changed = peft.get_peft_model(module, config).base_model.model[0].base_layer.weight.detach()
    changed = changed.T if kind is Conv1D else changed
    torch.testing.assert_close(expected - 2.0 * left @ right, changed, atol=1e-5, rtol=0)
