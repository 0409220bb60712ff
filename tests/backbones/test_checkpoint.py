"""A checkpoint's tensors: read from disk, named as in files, digested, and remembered."""

import io
import json
import math
import os

import every_type
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from adapterhub.backbones import checkpoint
from adapterhub.errors import BackboneError
from tests.kit import tiny_models


def stored_tensors(folder):
    """Yield the tensors of a checkpoint; each is to be read before the next is requested."""
    for file in checkpoint.weight_files(folder):
        with checkpoint.opened_tensors(file) as tensors:
            yield from tensors


def read_all(folder):
    return {name: read([(0, math.prod(shape))]) for name, shape, read in stored_tensors(folder)}


DTYPES = (torch.float64, torch.bfloat16, torch.int8, torch.uint8, torch.bool, torch.int64)


def test_the_tensors_are_those_that_safetensors_reads(tmp_path):
    saved = {str(dtype): torch.arange(12).reshape(3, 4).to(dtype) for dtype in DTYPES}
    save_file(saved | {"empty": torch.empty(0)}, tmp_path / "model.safetensors")
    expected, found = load_file(tmp_path / "model.safetensors"), read_all(tmp_path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.reshape(-1)), name


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_runs_are_concatenated(suffix, tmp_path):
    tensor = torch.arange(20.0).reshape(4, 5)
    if suffix == "bin":
        torch.save({"a": tensor}, tmp_path / "pytorch_model.bin")
    else:
        save_file({"a": tensor}, tmp_path / "model.safetensors")
    tensors = stored_tensors(tmp_path)  # keeps the file open
    stored = next(tensors)
    assert stored.read([(1, 2), (18, 2)]).tolist() == [1, 2, 18, 19]
    assert checkpoint.take_runs(tensor, [(1, 2), (18, 2)]).tolist() == [1, 2, 18, 19]


def test_safetensors_are_preferred_and_shards_stay_in_the_folder(tmp_path):
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).touch()
    assert checkpoint.weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    assert checkpoint.weight_files(tmp_path) == [tmp_path / "pytorch_model.bin"]
    index = {"weight_map": {"a": "../2.safetensors", "b": "1.safetensors", "c": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    # An index must not lead out of the checkpoint's folder.
    assert checkpoint.weight_files(tmp_path) == [
        tmp_path / "2.safetensors",
        tmp_path / "1.safetensors",
    ]


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": [1]}', b"\xff", b"[" * 100_000,
     b'{"weight_map": {"a": "b"}}' + b" " * (100 << 20)],
    ids=lambda data: repr(data[:20]),
)  # fmt: skip
def test_a_broken_index_is_named(tmp_path, data):
    (tmp_path / "model.safetensors.index.json").write_bytes(data)
    with pytest.raises(BackboneError, match=r"model\.safetensors\.index\.json cannot be read"):
        checkpoint.weight_files(tmp_path)


@pytest.mark.parametrize(
    ("size", "problem"),
    [(1 << 40, r"header would have 1099511627776 bytes"), (None, "shorter than its shape")],
)
def test_a_header_that_claims_too_much_is_refused(size, problem, tmp_path):
    data = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    start = (size or len(data)).to_bytes(8, "little")
    (tmp_path / "model.safetensors").write_bytes(start + data + b"\0" * 8)
    with pytest.raises(BackboneError, match=problem):
        read_all(tmp_path)


def test_fused_experts_are_split():
    model = tiny_models.model("mixtral", "features")
    named, form = checkpoint.named_tensors(model), checkpoint.form_of(model.config)
    assert {tensor.ndim for name, tensor in named.items() if "experts.down" in name} == {3}
    layers = list(checkpoint.in_checkpoint_form(named, form))
    experts = [tensor.ndim for layer in layers for name, tensor in layer if ".experts." in name]
    assert experts == [2] * (2 * 4 * 3)
    assert len(layers) > 2


def test_the_prefix_is_the_one_of_most_names():
    form = checkpoint.form_of(tiny_models.model("llama", "features").config)
    names = form.names(
        ["model.norm.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight",
         "model.layers.0.self_attn.rotary_emb.inv_freq", "score.norm.weight",
         "model.layers.1.mlp.up_proj.qweight"]
    )  # fmt: skip
    assert names == {
        "model.norm.weight": "norm.weight",
        "model.layers.0.input_layernorm.weight": "layers.0.input_layernorm.weight",
        "lm_head.weight": "head.lm_head.weight",
        "score.norm.weight": "head.score.norm.weight",
        "model.layers.1.mlp.up_proj.qweight": "layers.1.mlp.up_proj.qweight",
    }


def test_a_configuration_without_a_model_is_refused():
    with pytest.raises(BackboneError, match="cannot build"):
        checkpoint.form_of(transformers.BertConfig(hidden_size=30, num_attention_heads=4))


@pytest.mark.parametrize("model_type", ["cosmos3_omni", "emu3", "qianfan_ocr"])
def test_the_base_model_has_its_own_names_whatever_a_task_model_writes(model_type):
    auto = every_type.autos(model_type, every_type.ADAPTED)[0]
    model = every_type.build(model_type, auto, tiny=True)
    form = checkpoint.form_of(model.config)
    assert form.prefix_in_memory(checkpoint.named_tensors(model)) == "model."
    assert form.prefix_in_memory(checkpoint.named_tensors(model.base_model)) == ""
    layers = checkpoint.in_checkpoint_form(checkpoint.named_tensors(model), form)
    names = {name for layer in layers for name, _ in layer}
    assert form.embedding in names
    assert sum(not name.startswith(checkpoint.HEAD_PART) for name in names) > 10


@pytest.mark.parametrize("new", [True, False], ids=["zip", "before 1.6"])
def test_tensors_of_both_formats_are_read_from_disk_and_from_memory(tmp_path, new):
    tied = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": tied, "b": tied, "c": torch.ones(2, dtype=torch.bfloat16), "d": tied.T}
    torch.save(tensors, tmp_path / "x.bin", _use_new_zipfile_serialization=new)
    for source in (tmp_path / "x.bin", io.BytesIO((tmp_path / "x.bin").read_bytes())):
        read = checkpoint.load_torch_file(source)
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": torch.zeros(1).expand(10**12)}, "more values than are stored"),
        ({"a": torch.zeros(1).expand(4)}, "more values than are stored"),
        ({"a": torch.eye(2).to_sparse()}, "not a plain tensor"),
        ({"a": 3}, "not a mapping"),
        ([torch.ones(2)], "not a mapping"),
        ({1: torch.ones(2)}, "not a mapping"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_plain_tensor_is_refused(tmp_path, value, words):
    torch.save(value, tmp_path / "x.bin")
    with pytest.raises(ValueError, match=words):
        checkpoint.load_torch_file(tmp_path / "x.bin")


def digests_of(tensor, sampled=False):
    (digests,) = checkpoint.digest_table(
        [checkpoint.reader_of("a", tensor)], sampled=sampled
    ).values()
    return digests


@given(seed=st.integers(0, 2**31), scale=st.floats(1e-6, 1e4))
def test_copies_share_a_digest(seed, scale):
    values = torch.randn(999, generator=torch.Generator().manual_seed(seed)) * scale
    original = digests_of(values)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        copy = values.to(dtype)
        assert original.same(digests_of(copy)), dtype
        assert original.same(digests_of(copy.float())), dtype
    assert not original.same(digests_of(values * 1.02))


@given(rows=st.integers(1, 3_000), width=st.integers(1, 300), pad=st.sampled_from([8, 64, 128]))
def test_padding_does_not_change_a_sample(rows, width, pad):
    padded = -(-rows // pad) * pad
    samples = [
        checkpoint.sample_of(checkpoint.TensorReader("a", (n, width), None, is_table=True))
        for n in (rows, padded)
    ]
    assert rows > pad or samples[0] == samples[1][: len(samples[0])]
    if rows > pad:
        assert samples[0] == samples[1]


@pytest.mark.parametrize(
    "numel", [1, checkpoint.RUN * checkpoint.RUNS, checkpoint.RUN * checkpoint.RUNS + 1, 10**9]
)
def test_a_sample_is_within_its_tensor(numel):
    runs = checkpoint.sample_of(checkpoint.TensorReader("a", (numel,), None))
    assert runs[0][0] == 0
    assert sum(runs[-1]) == numel
    assert sum(count for _, count in runs) <= checkpoint.RUN * checkpoint.RUNS


def test_names_and_shapes_count():
    values = torch.arange(6.0)
    tables = [
        checkpoint.digest_table([checkpoint.reader_of(name, values.reshape(shape))], sampled=False)
        for name, shape in (("a", (6,)), ("b", (6,)), ("a", (2, 3)))
    ]
    assert len({checkpoint.combined(table) for table in tables}) == 3
    codes = torch.arange(9, dtype=torch.uint8)  # digested as bytes
    assert digests_of(codes) == digests_of(codes.clone()) != digests_of(codes.flip(0))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint, "TICK", 0)
    return tmp_path / "cache" / "adapterhub" / "weights"


@pytest.fixture
def count(tmp_path, cache):
    """Return a function that says how often a result was computed."""
    file, calls = tmp_path / "a", []
    file.write_bytes(b"one")

    def run(key="k"):
        checkpoint.remembered([file], key, lambda: calls.append(1) or file.read_text())
        return len(calls)

    run.file = file
    return run


def _same_size_and_time(file):
    times = os.stat(file)
    file.write_bytes(b"two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def _another_file(file):
    (file.parent / "b").write_bytes(b"one")
    os.replace(file.parent / "b", file)


def test_a_file_that_changes_meanwhile_is_not_remembered(tmp_path, cache):
    file = tmp_path / "a"
    file.write_bytes(b"one")
    assert (
        checkpoint.remembered([file], "k", lambda: file.write_bytes(b"other") and "stale")
        == "stale"
    )
    assert checkpoint.remembered([file], "k", lambda: "fresh") == "fresh"


def test_a_result_is_computed_once_until_a_file_changes(count, monkeypatch):
    assert [count(), count(), count("other key"), count()] == [1, 1, 2, 2]
    for number, change in enumerate((_same_size_and_time, _another_file), 3):
        change(count.file)
        assert [count(), count()] == [number, number]
    # Another change may follow a change within the same tick of the clock.
    monkeypatch.setattr(checkpoint, "TICK", 2_000_000_000)
    assert [count("third"), count("third")] == [5, 6]


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff"])
def test_a_damaged_or_unwritable_cache_does_no_harm(count, cache, damage):
    assert count() == 1
    (path,) = cache.iterdir()
    path.write_bytes(damage)
    assert count() == 2
    assert count() == 2
    path.unlink()
    cache.rmdir()
    cache.write_text("in the way")
    assert count() == 3
