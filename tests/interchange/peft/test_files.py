"""Options and tensors of peft checkpoints are read strictly and written canonically."""

from __future__ import annotations

import peft
import pytest
import torch
from safetensors.torch import load_file

import adapterhub as ah
from adapterhub.errors import FileError, OutputError
from adapterhub.interchange.peft import files
from tests.kit import tiny_models
from tests.kit.peers import edit, edit_tensors, exported

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_unknown_neutral_fields_are_accepted(checkpoint):
    expected = ah.load(tiny_models.model("bert"), checkpoint).tensors()
    edit(checkpoint, use_hyperlora=False, hyper_config=None, hyper_names=[], note="")
    found = ah.load(tiny_models.model("bert"), checkpoint).tensors()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


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


def test_an_empty_file_is_refused(checkpoint):
    edit_tensors(checkpoint, lambda tensors: {n: t[:0] for n, t in tensors.items()})
    with pytest.raises(FileError, match="empty"):
        ah.load(tiny_models.model("bert"), checkpoint)
    (checkpoint / "adapter_model.safetensors").write_bytes(b"x" * 443)
    with pytest.raises(FileError, match="cannot be read"):
        ah.load(tiny_models.model("bert"), checkpoint)


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
