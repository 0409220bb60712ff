"""New tokens and the chat template are saved with an adapter."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers

import adapterhub as ah
from adapterhub.anatomy.backbone import Backbone
from adapterhub.backbones.processor import TokenizerSnapshot
from adapterhub.errors import AttachError, MismatchError
from adapterhub.files.native import Saved, write_adapter
from tests.kit import tiny_models
from tests.kit.data import word_tokenizer
from tests.kit.selection import cases_of

NEW = ["<a>", "<b>"]
BEYOND = [*(f"<n{i}>" for i in range(50)), *NEW]  # more than the embedding's unused rows
KINDS = {"bert": "masked-lm", "gpt2": "causal-lm", "llama": "causal-lm", "t5": "seq2seq",
         "bart": "seq2seq"}  # fmt: skip


@pytest.fixture(params=cases_of(sorted(KINDS), 2))
def folder(request, backbones):
    return backbones(request.param), KINDS[request.param]


def loaded(folder, **more):
    return ah.load_backbone(str(folder[0]), task=folder[1], **more)


def batch(model, tokenizer, text="the <a> movie <b>"):
    inputs = dict(tokenizer(text, return_tensors="pt"))
    inputs.pop("token_type_ids", None)
    return inputs | {"labels": inputs["input_ids"]}


def scores(model, tokenizer, text="the <a> movie <b>"):
    with torch.no_grad():
        return model(**batch(model, tokenizer, text))


@pytest.mark.parametrize("tokens", [NEW, BEYOND], ids=["spare rows", "beyond the rows"])
def test_only_new_tokens_are_trained_saved_and_loaded(folder, tokens, tmp_path):
    """And the chat template; loading restores them on an unchanged backbone, until detached."""
    torch.manual_seed(0)
    model, tokenizer = loaded(folder, new_tokens=tokens)
    original, tokenizer.chat_template = tokenizer.chat_template, "{# mine #}"
    before = copy.deepcopy(model.state_dict())
    adapter = ah.attach(model, "lora(rank=2)")
    ids = tokenizer.convert_tokens_to_ids(tokens)
    assert (max(ids) >= tiny_models.VOCAB) == (tokens is BEYOND)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for _ in range(8):
        out = model(**batch(model, tokenizer))
        losses.append(out.loss.item())
        out.loss.backward()
        assert adapter.tensors()["tokens.input"].grad[-2].any()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    expected = scores(model, tokenizer)
    copied = copy.deepcopy(model)
    assert Backbone.of(copied).tokenizer.tokenizer is tokenizer
    assert torch.equal(scores(copied, tokenizer).logits, expected.logits)
    assert expected.logits.shape[-1] >= max(ids) + 1
    adapter.save(tmp_path / "a")
    manifest, tensors = Saved.at(tmp_path / "a").read()
    assert [t.content for t in manifest.tokens] == tokens
    assert [t.id for t in manifest.tokens] == ids
    assert manifest.chat_template == "{# mine #}"
    rows = {n: tuple(t.shape) for n, t in tensors.items() if n.startswith("tokens.")}
    width = model.get_input_embeddings().weight.shape[1]
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    names = ["tokens.input"] if tied else ["tokens.input", "tokens.output"]
    assert rows == dict.fromkeys(names, (len(tokens), width))
    adapter.detach()
    again = model.state_dict()
    assert again.keys() == before.keys()
    assert all(torch.equal(again[n], before[n]) for n in before)

    fresh, plain = loaded(folder)
    old = scores(fresh, plain, "the movie").logits
    restored = ah.load(fresh, tmp_path / "a")
    assert plain.convert_tokens_to_ids(tokens) == ids
    assert plain.chat_template == restored.manifest().chat_template == "{# mine #}"
    loaded_scores = scores(fresh, plain)
    assert torch.equal(loaded_scores.logits, expected.logits)
    assert torch.equal(loaded_scores.loss, expected.loss)
    restored.detach()
    assert plain.chat_template == original
    assert torch.equal(scores(fresh, plain, "the movie").logits, old)
    assert fresh.config.vocab_size == tiny_models.VOCAB
    assert not any("adapterhub" in name for name in fresh.state_dict())


def test_a_resized_model_keeps_its_original_fingerprint(tmp_path, backbones):
    """After transformers' own resize, the adapter still belongs to the original backbone."""
    folder = (backbones("llama"), "causal-lm")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder[0])
    unused = tiny_models.VOCAB - len(tokenizer)
    filler = [f"<f{i}>" for i in range(unused)]  # their ids already have rows
    tokenizer.add_tokens([*filler, *NEW])
    model.resize_token_embeddings(len(tokenizer))
    with pytest.raises(AttachError, match="which tokens are new") as error:
        ah.attach(model, "lora")
    assert "tokenizer=tokenizer" in error.value.hint
    adapter = ah.attach(model, "lora", tokenizer=tokenizer)
    tiny_models.scramble(adapter)
    expected = scores(model, tokenizer).logits
    adapter.save(tmp_path / "a")
    manifest = Saved.at(tmp_path / "a").manifest
    assert [t.content for t in manifest.tokens] == NEW
    assert manifest.backbone.fingerprint == ah.fingerprint(folder[0])
    base = transformers.AutoModelForCausalLM.from_pretrained(folder[0])
    ah.load(base, tmp_path / "a", tokenizer=tokenizer)
    assert torch.equal(scores(base, tokenizer).logits, expected)


def test_the_vocabulary_size_follows_the_active_adapter(backbones, tmp_path):
    model, tokenizer = ah.load_backbone(str(backbones("bart")), task="seq2seq")
    ah.attach(model, "lora", name="plain")
    tokenizer.add_tokens(NEW)
    adapter = ah.attach(model, "lora", name="more")
    assert adapter.new_tokens is not None
    size = max(max(tokenizer.convert_tokens_to_ids(NEW)) + 1, tiny_models.VOCAB)
    assert scores(model, tokenizer, "the movie").logits.shape[-1] == size
    ah.activate(model, "plain")
    assert scores(model, tokenizer, "the movie").logits.shape[-1] == tiny_models.VOCAB
    ah.activate(model, "more")
    with torch.no_grad():
        made = model.generate(**tokenizer("the <a>", return_tensors="pt"), max_new_tokens=4)
    assert made.shape[0] == 1


@pytest.fixture(scope="module")
def saved(backbones, tmp_path_factory):
    """Save an adapter with new tokens; return its folder and that of the backbone."""
    folder = tmp_path_factory.mktemp("tokens") / "a"
    model, _ = ah.load_backbone(str(backbones("llama")), task="causal-lm", new_tokens=NEW)
    ah.attach(model, "lora").save(folder)
    return folder, str(backbones("llama"))


def test_another_tokenizer_is_refused(backbones, tmp_path):
    """The error names both tokenizers; `any_tokenizer` overrides it."""
    folder, backbone = tmp_path / "a", str(backbones("llama"))
    ah.attach(ah.load_backbone(backbone, task="causal-lm")[0], "lora").save(folder)
    other = word_tokenizer("<s>", "")
    other.add_tokens(["<x>"])
    plain = transformers.AutoModelForCausalLM.from_pretrained(backbone)
    other.eos_token = "<unk>"
    with pytest.raises(MismatchError, match="a different tokenizer") as error:
        ah.load(plain, folder, tokenizer=other)
    assert Saved.at(folder).manifest.tokenizer in str(error.value)
    assert TokenizerSnapshot(other, 64).identity() in str(error.value)
    assert Backbone.of(plain).tokenizer is None, "a refused load leaves nothing"
    assert not any("adapterhub" in name for name in plain.state_dict())
    ah.load(plain, folder, any_tokenizer=True)


def test_a_refused_adapter_leaves_the_tokenizer_unchanged(saved, tmp_path):
    folder, backbone = saved
    other, tokenizer = ah.load_backbone(backbone, task="causal-lm", new_tokens=["<b>", "<c>"])
    before = len(tokenizer)
    with pytest.raises(MismatchError, match="different ids") as error:
        ah.load(other, folder)
    assert len(error.value.offenders) == 2
    assert len(tokenizer) == before
    plain, tokenizer = ah.load_backbone(backbone, task="causal-lm")
    # Logits are as wide as the highest id.
    manifest, tensors = Saved.at(folder).read()
    far = replace(manifest.tokens[1], id=2**31 - 1)
    write_adapter(tmp_path / "b", replace(manifest, tokens=(manifest.tokens[0], far)), tensors)
    with pytest.raises(AttachError, match="far above"):
        ah.load(plain, tmp_path / "b")
    with torch.no_grad():
        plain.model.layers[0].mlp.up_proj.weight.add_(1)
    with pytest.raises(MismatchError, match="a different backbone"):
        ah.load(plain, folder)
    assert tokenizer.convert_tokens_to_ids("<a>") == tokenizer.unk_token_id
    assert not any("adapterhub" in name for name in plain.state_dict())
