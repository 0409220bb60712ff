"""The texts of tokens: one decoder for evaluations, predictions, streams and servers."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.serving import Engine, GenerationOptions
from adapterhub.serving.generation.detokenize import TextPieces
from adapterhub.serving.generation.request import GeneratedToken
from adapterhub.tasks.common.language_models import WrittenPieces, cleans_up, written_text
from tests.kit import tiny_models
from tests.kit.data import write_json_lines

TEXTS = (
    "it is paris .",
    "do n't say , that 's it !",
    "well , we 've been : there ? yes .",
    "plain",
    "né à Łódź , 日本 .",
    "two  spaces , and 'm",
)
WORDS = "it is paris . do n ' t say , that s it ! well we ve been : there ? yes plain and m [UNK]"


def bytewise(clean):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={a: n for n, a in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return finished(inner, clean)


def pieces_of_sentences(clean):
    letters = sorted({c for text in TEXTS for c in text} - {" "} | {"▁"})
    inner = Tokenizer(models.BPE(vocab={a: n for n, a in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    inner.decoder = decoders.Metaspace(prepend_scheme="never")
    return finished(inner, clean)


def wordpieces(clean):
    inner = Tokenizer(
        models.WordPiece(vocab={w: n for n, w in enumerate(WORDS.split())}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=False)
    return finished(inner, clean)


def finished(inner, clean):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=clean, model_max_length=512
    )
    special = [AddedToken(t, special=True) for t in ("<s>", "</s>", "<pad>")]
    tokenizer.add_special_tokens(
        dict(zip(("bos_token", "eos_token", "pad_token"), special, strict=True))
    )
    return tokenizer


LOSSLESS = {"bytes": bytewise, "sentence pieces": pieces_of_sentences}
ALL = {**LOSSLESS, "word pieces": wordpieces}


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("kind", LOSSLESS)
def test_tokens_with_their_spaces_are_the_text(kind, clean):
    """Whatever the configuration says: else what a perfect model writes is another text."""
    tokenizer = LOSSLESS[kind](clean)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (
            written_text(tokenizer, [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]) == text
        )


def test_words_without_spaces_are_put_together_as_configured():
    for clean, expected in ((True, "it is paris."), (False, "it is paris .")):
        tokenizer = wordpieces(clean)
        assert cleans_up(tokenizer) is clean
        assert written_text(tokenizer, tokenizer("it is paris .")["input_ids"]) == expected


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("kind", ALL)
def test_pieces_together_are_the_text(kind, clean):
    tokenizer = ALL[kind](clean)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = written_text(tokenizer, ids)
        streamed = WrittenPieces(tokenizer)
        assert "".join([*(streamed.add([i]) for i in ids), streamed.end()]) == whole
        served = TextPieces(tokenizer, [])
        for i in ids:
            served.add(GeneratedToken(i, served.next_text(i)))
        served.end()
        assert served.text == whole


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("text", TEXTS[:2])
def test_a_perfect_model_matches_exactly(kind, clean, text, tmp_path, adapterhub, monkeypatch):
    """In evaluation, prediction, a stream and a server, which write the same text."""
    tokenizer = LOSSLESS[kind](clean)
    answer = tokenizer(text, add_special_tokens=False)["input_ids"]
    model = tiny_models.model("llama", "causal-lm")
    model.resize_token_embeddings(len(tokenizer))
    folder = tmp_path / "backbone"
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loaded, _ = ah.load_backbone(str(folder), task="causal-lm")
    adapter = ah.attach(loaded, "lora(rank=2)", name="perfect")
    recipe = {"task": {"causal-lm": {"template": "{text}", "generate": True, "new_tokens": 40}}}
    adapter.metadata.training = {"recipe": recipe}
    adapter.save(tmp_path / "run")
    opened = ah.open(tmp_path / "run")
    prompt = "it"
    begin = len(tokenizer(prompt)["input_ids"])
    written = [*answer, tokenizer.eos_token_id]
    perfect(monkeypatch, type(opened.model), begin, written)
    assert opened.evaluate([Example(prompt, None, text)])["exact_match"] == 1.0
    assert opened.predict(prompt).text == text
    assert "".join(opened.generate(prompt, stream=True)) == text
    file = write_json_lines(tmp_path / "e.jsonl", [{"prompt": prompt, "completion": text}])
    code, out, err = adapterhub("eval", tmp_path / "run", "--data", file, "--json")
    assert code == 0, err
    assert json.loads(out)["exact_match"] == 1.0
    with Engine() as engine:
        options = GenerationOptions(max_tokens=40, temperature=0)
        generation = engine.generate(str(tmp_path / "run"), prompt, options)
        assert generation.result(60).text == text


def perfect(monkeypatch, model_class, begin, written):
    """Let a class of models give the highest logits to one text, behind so many tokens."""
    forward = model_class.forward

    def exact(self, *args, **kwargs):
        positions, cache = kwargs.get("position_ids"), kwargs.get("past_key_values")
        if positions is None:
            past = cache.get_seq_length() if cache is not None else 0
            rows, tokens = kwargs["input_ids"].shape
            positions = past + torch.arange(tokens).expand(rows, -1)
        output = forward(self, *args, **kwargs)
        places = (positions[:, -output.logits.shape[1] :] - begin + 1).clamp(0, len(written) - 1)
        best = torch.tensor(written)[places]
        output.logits = (
            output.logits * 0
            + torch.nn.functional.one_hot(best, output.logits.shape[-1]).float() * 50
        )
        return output

    monkeypatch.setattr(model_class, "forward", exact)
