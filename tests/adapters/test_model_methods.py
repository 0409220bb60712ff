"""Methods of a model with adapters: saving, loading, resizing, and conversions of the dtype."""

import copy
import functools
import pickle
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import adapterhub as ah
from adapterhub.adapters.state import get_state
from adapterhub.errors import AttachError
from adapterhub.methods import METHODS
from tests.kit import tiny_models
from tests.kit.matrix import CELLS, example, representatives
from tests.kit.selection import ALL, long_table

# By default every method on one encoder and one encoder-decoder.
FEW = ("bert", "t5")
REPRESENTATIVES = sorted(METHODS if ALL else {*representatives().values()})
SOME_CELLS = [c for c in CELLS if tiny_models.FULL_MATRIX or c[1] in FEW]
# A method of each signature; they take turns on the architectures.
TURNS = [(m, FEW[i % len(FEW)]) for i, m in enumerate(REPRESENTATIVES)]
TURNS = SOME_CELLS if ALL else [cell for cell in TURNS if cell in SOME_CELLS]
assert {method for method, _ in SOME_CELLS} == {*METHODS}
assert {method for method, _ in TURNS} == {*REPRESENTATIVES}
some_cells = long_table(("method", "architecture"), TURNS, 8, nightly=8)
STARTS = (torch.bfloat16, torch.float32) if tiny_models.FULL_MATRIX else (torch.bfloat16,)
DTYPES = (torch.float16, torch.bfloat16, torch.float64)


def logits(model):
    with torch.no_grad():
        inputs = tiny_models.batch()
        if type(model).__name__.endswith("ForConditionalGeneration"):
            inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
        return model(**inputs).logits


def adapted(architecture, method, dtype=torch.float32):
    model = tiny_models.usual_model(architecture, **tiny_models.NO_DROPOUT).to(dtype)
    adapter = ah.attach(model, example(method))
    tiny_models.scramble(adapter)
    return model, adapter


def values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal_tensors(actual, expected):
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


@functools.cache
def supports(architecture, dtype):
    """Whether the bare backbone computes in a dtype: experts do not in fp64."""
    try:
        logits(tiny_models.usual_model(architecture).to(dtype))
    except RuntimeError:
        return False
    return True


@some_cells
@pytest.mark.parametrize("start", STARTS)
def test_a_model_with_an_adapter_can_be_converted(method, architecture, start):
    model, adapter = adapted(architecture, method, start)
    adapted_tensors = {n: t.detach().clone() for n, t in adapter.tensors().items()}
    if architecture == "openai-gpt" and start == torch.bfloat16 and adapter.changed:
        pytest.skip("its mask has the dtype of the first parameter, which trains in fp32")
    twin = copy.deepcopy(model)
    twin.train()(**tiny_models.labelled_batch(twin)).loss.backward()
    twin = get_state(twin).adapters[adapter.name]
    without_gradient = [n for n, t in twin.tensors().items() if t.grad is None]
    dtypes = [dtype for dtype in DTYPES if supports(architecture, dtype)]
    assert len(dtypes) > 1 or tiny_models.FULL_MATRIX
    for dtype in dtypes:
        converted = copy.deepcopy(model).to(dtype)
        twin = get_state(converted).adapters[adapter.name]
        for name, tensor in twin.tensors().items():
            assert tensor.dtype == (dtype if tensor.is_floating_point() else tensor.dtype), name
            assert torch.equal(tensor, adapted_tensors[name].to(tensor.dtype)), name
        assert logits(converted).isfinite().all() or dtype == torch.float16
        converted.train()(**tiny_models.labelled_batch(converted)).loss.backward()
        assert [n for n, t in twin.tensors().items() if t.grad is None] == without_gradient
        converted.eval()
        ah.detach(converted)
        bare = tiny_models.usual_model(architecture).to(start).to(dtype)
        assert_equal_tensors(converted.state_dict(), bare.state_dict())
        assert torch.equal(logits(converted), logits(bare))


@long_table("method", REPRESENTATIVES, 4, nightly=2)
def test_a_converted_model_computes_the_same_and_so_does_an_inactive_adapter(method):
    model, adapter = adapted("bert", method)
    expected = logits(model)
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 2e-1)):
        if method == "vblora" and dtype == torch.float16:
            tolerance = 2e-1  # rounded logits may choose another vector of the bank
        output = logits(copy.deepcopy(model).to(dtype)).float()
        torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    converted = copy.deepcopy(model).double()
    ah.activate(model)
    model.double()
    assert torch.equal(logits(model), logits(tiny_models.model("bert").double()))
    ah.activate(model, adapter.name)
    assert torch.equal(logits(model), logits(converted))


def test_new_tokens_are_converted(backbone):
    model, tokenizer = ah.load_backbone(str(backbone), task="masked-lm")
    tokenizer.add_tokens(["<new>"])
    ah.attach(model, "lora")
    model.double()
    logits(model)
    ah.detach(model)
    assert {t.dtype for t in model.state_dict().values() if t.is_floating_point()} == {torch.double}


def saved(model, folder):
    with pytest.warns(UserWarning, match="without its adapters"):
        model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@some_cells
def test_a_saved_model_is_the_bare_backbone(method, architecture, tmp_path):
    bare = tiny_models.usual_model(architecture, **tiny_models.NO_DROPOUT)
    bare.save_pretrained(tmp_path / "bare")
    expected = load_file(tmp_path / "bare" / "model.safetensors")
    model, adapter = adapted(architecture, method)
    outputs, before = logits(model), values(model)
    stored = saved(model, tmp_path / "saved")
    assert_equal_tensors({k: t for k, t in stored.items() if "adapterhub." not in k}, expected)
    assert torch.equal(logits(model), outputs)
    assert_equal_tensors(model.state_dict(), before)
    one, other = ((tmp_path / f / "config.json").read_text() for f in ("bare", "saved"))
    assert one == other
    assert ah.fingerprint(tmp_path / "saved") == ah.fingerprint(tmp_path / "bare")
    assert torch.equal(reloaded(model, tmp_path / "saved"), logits(bare))
    # As Trainer does to resume.
    with torch.no_grad():
        for tensor in adapter.tensors().values():
            tensor.zero_()
    model.load_state_dict(stored, strict=False)
    assert_equal_tensors(model.state_dict(), before)


def test_a_state_dict_from_the_caller_is_written(tmp_path):
    """As accelerate does for a sharded model, whose tensors it gathers."""
    model, _ = adapted("bert", "full")
    gathered = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    bare = tiny_models.model("bert").state_dict()
    with pytest.warns(UserWarning, match="without its adapters"):
        model.save_pretrained(tmp_path, True, gathered, max_shard_size="50KB")
    stored = load_file(tmp_path / "model.safetensors")
    name = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(stored[name], bare[name])
    trained = f"adapterhub.trained.{name.encode().hex()}"
    assert torch.equal(stored[trained], gathered[name])


def test_the_warning_names_the_way_to_save_an_adapter(tmp_path):
    model, _ = adapted("bert", "lora")
    with pytest.warns(UserWarning, match=re.escape("adapter.save(FOLDER)")) as record:
        model.save_pretrained(tmp_path)
    assert record[0].filename == __file__
    ah.merge(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(reloaded(model, tmp_path), logits(model))


def test_labels_of_an_adapter_are_not_saved_with_the_backbone(backbone, tmp_path):
    model, _ = ah.load_backbone(str(backbone), task="classification", labels=["a", "b"])
    ah.attach(model, "lora", name="one")
    model.config.id2label = {0: "x", 1: "y"}
    saved(model, tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).id2label == {0: "a", 1: "b"}


def test_tensors_of_an_inactive_adapter_are_not_loaded_into_the_backbone(tmp_path):
    """Also behind a save that failed, which leaves active what was."""
    model, adapter = adapted("bert", "full")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        model.save_pretrained(tmp_path / "file" / "folder")
    assert adapter.active
    stored = saved(model, tmp_path)
    ah.activate(model)
    before = values(model)
    with pytest.raises(AttachError, match="an adapter that is not active"):
        model.load_state_dict(stored, strict=False)
    assert_equal_tensors(model.state_dict(), before)
    ah.activate(model, adapter.name)
    model.load_state_dict(stored, strict=False)


@long_table(
    ("method", "architecture"),
    [(m, a) for m in ("lora", "full") for a in tiny_models.MATRIX if (m, a) in CELLS],
    4,
)
def test_another_size_of_the_embedding_is_refused(method, architecture):
    model, adapter = adapted(architecture, method)
    outputs, before = logits(model), values(model)
    model.resize_token_embeddings(tiny_models.VOCAB)
    model.resize_token_embeddings()
    model.resize_token_embeddings(tiny_models.VOCAB - 1, 8)
    for sizes in ((tiny_models.VOCAB + 2,), (None, 7), (tiny_models.VOCAB - 1,)):
        with pytest.raises(AttachError, match="cannot resize") as error:
            model.resize_token_embeddings(*sizes)
        assert "tokenizer=" in error.value.hint
    assert torch.equal(logits(model), outputs)
    assert_equal_tensors(model.state_dict(), before)
    adapter.detach()
    model.resize_token_embeddings(tiny_models.VOCAB + 2)
    assert model.get_input_embeddings().weight.shape[0] == tiny_models.VOCAB + 2


def test_detach_puts_the_methods_of_the_instance_back(tmp_path):
    model = tiny_models.model("bert")
    names = set(vars(model))
    ah.attach(model, "lora")
    ah.detach(model)
    assert set(vars(model)) == names
    saves = []
    model.save_pretrained = saves.append
    own = model.save_pretrained
    ah.attach(model, "lora")
    assert model.save_pretrained is not own
    ah.detach(model)
    assert model.save_pretrained is own
    ah.attach(model, "lora")
    model.save_pretrained = own  # replaced after attaching
    ah.detach(model)
    assert model.save_pretrained is own


def test_a_copied_or_pickled_model_saves_itself(tmp_path):
    model, adapter = adapted("bert", "bitfit")
    for number, twin in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        with torch.no_grad():
            twin.bert.embeddings.word_embeddings.weight.fill_(number)
        stored = saved(twin, tmp_path / str(number))
        assert (stored["bert.embeddings.word_embeddings.weight"] == number).all()
        assert get_state(twin).adapters[adapter.name] is not adapter


def reloaded(model, folder):
    """Load a checkpoint as a stranger does, without adapterhub's methods on the instance."""
    return logits(type(model).from_pretrained(folder).eval())


def tied_model(architecture):
    """Build a language model whose output layer is the embedding."""
    task = "seq2seq" if architecture in tiny_models.ENCODER_DECODERS else "causal-lm"
    return tiny_models.model(architecture, task, tie_word_embeddings=True, **tiny_models.NO_DROPOUT)


TIED = ("gpt2", "t5")


def usual_model(architecture):
    return tiny_models.usual_model(architecture, **tiny_models.NO_DROPOUT)


@pytest.mark.parametrize(
    ("build", "architecture"),
    [
        *((usual_model, a) for a in (tiny_models.MATRIX if tiny_models.FULL_MATRIX else FEW)),
        *((tied_model, a) for a in tiny_models.GENERATORS if tiny_models.FULL_MATRIX or a in TIED),
    ],
)
def test_a_checkpoint_reloads_as_the_bare_backbone_or_as_the_merged_model(
    build, architecture, tmp_path
):
    """Never as anything in between: active or inactive, in a route or disabled, merged."""
    bare = logits(build(architecture))
    few = build is tied_model and not ALL  # norms and heads are not tied
    for method in ("lora", "full") if few else ("lora", "full", "norms", "head"):
        if (method, architecture) not in CELLS or (method == "head" and build is tied_model):
            continue
        model = build(architecture)
        adapter = ah.attach(model, example(method))
        tiny_models.scramble(adapter)
        adapted = logits(model.eval())
        assert not torch.equal(adapted, bare)
        folder = tmp_path / method
        saved(model, folder)
        assert torch.equal(reloaded(model, folder), bare)
        with ah.disabled(model):
            saved(model, folder)
        assert torch.equal(reloaded(model, folder), bare)
        assert torch.equal(logits(model), adapted)
        ah.activate(model)
        saved(model, folder)
        assert torch.equal(reloaded(model, folder), bare)
        ah.activate(model, adapter.name)
        ah.merge(model)
        model.save_pretrained(tmp_path / f"{method}-merged")
        merged = reloaded(model, tmp_path / f"{method}-merged")
        torch.testing.assert_close(merged, logits(model), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(merged, adapted, atol=1e-3, rtol=1e-3)
