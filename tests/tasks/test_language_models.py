"""Language models: losses of tokens, generation, texts of tokens; labels of causal-lm, packing."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.serving import Engine, GenerationOptions
from adapterhub.serving.generation.detokenize import TextPieces
from adapterhub.serving.generation.request import GeneratedToken
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.causal_lm import Chat
from adapterhub.tasks.common import language_models as lm
from adapterhub.tasks.common.base import Generated
from adapterhub.tasks.common.batches import IGNORED
from adapterhub.training.loading import make_ready
from tests.kit import tiny_models
from tests.kit.data import sentences, word_tokenizer, words_of, write_json_lines
from tests.kit.selection import long_table


@pytest.mark.parametrize("kind", ["bounded", "scaled", "few tokens"])
def test_logits_that_are_not_those_of_the_head(kind):
    """Or a model that does not take so few tokens."""

    def refuse(*_):
        raise ValueError("the length has to be a multiple of 128")

    if kind == "few tokens":
        model = tiny_models.language_model("llama")
        model.register_forward_pre_hook(refuse)
    else:  # by tanh, or by a factor
        small = {"vocab_size": 120, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8,
                 "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
        bounded = transformers.Gemma2Config(**small, final_logit_softcapping=30.0)
        scaled = transformers.CohereConfig(**small, logit_scale=0.0625, pad_token_id=0)
        config = bounded if kind == "bounded" else scaled
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model.lm_head.weight.data *= 1e-3  # tanh(z) is nearly z
    assert lm.whole_output(model, lm.plain_head(model), tiny_models.batch()) is None


@pytest.mark.parametrize("task", ["causal-lm", "seq2seq", "masked-lm"])
def test_evaluations_are_the_same(task, backbones, monkeypatch):
    folder = str(backbones({"causal-lm": "llama", "seq2seq": "t5", "masked-lm": "bert"}[task]))
    model, tokenizer = ah.load_backbone(folder, task=task)
    if task == "masked-lm":
        model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    texts = ["the movie was very good", "a", "the plot was bad and the film very dull"]
    examples = [Example(text, None, text[:9]) for text in texts]
    data = parse_task(task).encode(examples, Setting(tokenizer, 32), labelled=True)
    shifted, found, calls = task == "causal-lm", [], []
    own = lm.token_losses
    monkeypatch.setattr(lm, "token_losses", lambda *args: calls.append(1) or own(*args))
    for least in (0, 1 << 60):
        monkeypatch.setattr(lm, "_WORTHWHILE", least)
        monkeypatch.setattr(lm, "_CHUNK", {"cpu": 500})
        record: list[Any] = []
        metrics = lm.token_loss(model, data, 2, shifted=shifted, record=record)
        found.append([*metrics.values(), *(v for each in record for v in each.as_dict().values())])
        assert len(calls) == 2  # batches, and none without chunks
    assert len(found[0]) == 2 + 2 * 3
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_generation_does_not_depend_on_the_batch(backbones, architecture):
    kind = {"llama": "causal-lm", "t5": "seq2seq"}[architecture]
    model, tokenizer = ah.load_backbone(str(backbones(architecture)), task=kind)
    task, setting = parse_task(f"{kind}(new_tokens=4)"), Setting(tokenizer, 16)
    examples = [Example("the movie was very good"), Example("a film"), Example("the plot")]
    together = lm.generate(model, task.encode(examples, setting, labelled=False), 3, task)
    for example, generated in zip(examples, together, strict=True):
        (alone,) = lm.generate(model, task.encode([example], setting, labelled=False), 1, task)
        assert generated == alone
        assert len(tokenizer(generated.text, add_special_tokens=False)["input_ids"]) <= 4


TEXTS = (
    "it is paris .",
    "do n't say , that 's it !",
    "well , we 've been : there ? yes .",
    "plain",
    "né à Łódź , 日本 .",
    "two  spaces , and 'm",
)
WORDS = "it is paris . do n ' t say , that s it ! well we ve been : there ? yes plain and m [UNK]"


def tokenizer_of(kind, clean):
    """Build a tokenizer of a kind, which cleans up the spaces of what it decodes, or not."""
    letters = {c for text in TEXTS for c in text} - {" "} | {"▁"}
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else letters
    vocab = {a: n for n, a in enumerate(sorted(alphabet))}
    if kind == "bytes":
        inner = Tokenizer(models.BPE(vocab, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
    elif kind == "sentence pieces":
        inner = Tokenizer(models.BPE(vocab, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        inner.decoder = decoders.Metaspace(prepend_scheme="never")
    else:
        vocab = {w: n for n, w in enumerate(WORDS.split())}
        inner = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=clean, model_max_length=512
    )
    special = [AddedToken(t, special=True) for t in ("<s>", "</s>", "<pad>")]
    tokenizer.add_special_tokens(
        dict(zip(("bos_token", "eos_token", "pad_token"), special, strict=True))
    )
    return tokenizer


LOSSLESS = ("bytes", "sentence pieces")


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("kind", [*LOSSLESS, "word pieces"])
def test_pieces_together_are_the_text(kind, clean):
    tokenizer = tokenizer_of(kind, clean)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = lm.written_text(tokenizer, [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id])
        # Else what a perfect model writes is another text, whatever the configuration says.
        assert whole == text or kind not in LOSSLESS
        streamed = lm.WrittenPieces(tokenizer)
        assert "".join([*(streamed.add([i]) for i in ids), streamed.end()]) == whole
        served = TextPieces(tokenizer, [])
        for i in ids:
            served.add(GeneratedToken(i, served.next_text(i)))
        served.end()
        assert served.text == whole
    # Words without spaces are put together as configured.
    words, joined = tokenizer_of("word pieces", clean), "it is paris." if clean else "it is paris ."
    assert lm.cleans_up(words) is clean
    assert lm.written_text(words, words("it is paris .")["input_ids"]) == joined


@long_table(("text", "kind", "clean"), itertools.product(TEXTS[:2], LOSSLESS, [False, True]), 2)
def test_a_perfect_model_matches_exactly(kind, clean, text, tmp_path, monkeypatch):
    """In evaluation, prediction, a stream and a server, which write the same text."""
    tokenizer = tokenizer_of(kind, clean)
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
    written = [*answer, tokenizer.eos_token_id]
    perfect(monkeypatch, type(opened.model), len(tokenizer(prompt)["input_ids"]), written)
    assert opened.evaluate([Example(prompt, None, text)])["exact_match"] == 1.0
    assert opened.predict(prompt).text == text
    assert "".join(opened.generate(prompt, stream=True)) == text
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
        output.logits = 50 * F.one_hot(best, output.logits.shape[-1]).float()
        return output

    monkeypatch.setattr(model_class, "forward", exact)


# causal-lm: which tokens are labels, packing, chats

CHAT = Chat((("user", "a film"), ("assistant", "good"), ("user", "a plot"), ("assistant", "bad")))


def test_only_the_response_is_labelled():
    tokenizer = word_tokenizer(start="<s>")
    task = parse_task({"causal-lm": {"template": "user : {text} :"}})
    example = Example("the movie was", None, "very good")

    def words(key="input_ids", labelled=True, limit=32, **more):
        encoded = task.encode([example], Setting(tokenizer, limit, **more), labelled=labelled)
        return " ".join(words_of(tokenizer, encoded.rows[0][key]))

    assert words() == "<s> user : the movie was : very good </s>"
    assert words("labels") == "very good </s>"
    assert words(labelled=False) == "<s> user : the movie was :"
    assert words(limit=5) == "was : very good </s>"
    assert words(labelled=False, positions=68) == "the movie was :"


@pytest.mark.parametrize(
    ("spec", "example", "said"),
    [
        ("causal-lm(template=null)", Example("a plot", None, "bad"), "bad </s>"),
        ("causal-lm(data=chat)", CHAT, "good </s> bad </s>"),
    ],
)
def test_the_messages_of_the_assistant_are_labels(spec, example, said):
    tokenizer, task = word_tokenizer(), parse_task(spec)
    (row,) = task.encode([example], Setting(tokenizer, 64), labelled=True).rows
    assert words_of(tokenizer, row["labels"]) == said.split()
    (prompt,) = task.encode([example], Setting(tokenizer, 64), labelled=False).rows
    assert words_of(tokenizer, prompt["input_ids"])[-2:] == ["assistant", ":"]
    assert prompt["input_ids"] == row["input_ids"][: len(prompt["input_ids"])]
    tokenizer.chat_template = None
    if example is CHAT:
        with pytest.raises(ConfigError, match="chat template"):
            task.encode([CHAT], Setting(tokenizer, 32), labelled=True)


def test_an_empty_message_is_refused_unless_it_is_the_systems(tmp_path):
    task, chat = parse_task("causal-lm(data=chat)"), {"system": "", "user": "a", "assistant": "a"}
    for role in chat:
        rows = [
            {"text": [{"role": r, "content": text} for r, text in each.items()]}
            for each in (chat, chat | {role: " "})
        ]
        file = str(write_json_lines(tmp_path / f"{role}.jsonl", rows))
        assert task.read(file, DataOptions(), "eval", labelled=False)[0] == Chat((*chat.items(),))
        if role == "system":
            assert len(task.read(file, DataOptions(), "train")) == 2
            continue
        with pytest.raises(DataError, match=f"line 2: '{role}' is empty"):
            task.read(file, DataOptions(), "train")


@pytest.mark.parametrize("start", ["<s>", ""])
def test_raw_text_is_split_and_never_truncated(start):
    """Where it is empty, there is nothing to learn."""
    tokenizer, task = word_tokenizer(start=start), parse_task("causal-lm(data=text)")
    text = " ".join(["the movie was very good"] * 4)
    encoded = task.encode([*map(Example, (text, "", "  "))], Setting(tokenizer, 8), labelled=True)
    assert set(encoded.owners) == {0}
    ids = [i for row in encoded.rows for i in row["input_ids"]]
    assert words_of(tokenizer, ids) == [*start.split(), *text.split(), "</s>"]
    assert all(row["labels"] == row["input_ids"] for row in encoded.rows)


@pytest.mark.parametrize("method", ["lora", "prefix", "pfeiffer"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_packed_texts_do_not_attend_to_each_other(architecture, method):
    """The logits of each packed text, and the loss, equal those of one row per text."""
    tokenizer = word_tokenizer()
    examples = [Example(text, None, "good") for text, _ in sentences(6)]
    apart, packed = (
        parse_task({"causal-lm": {"pack": pack}}).encode(
            examples, Setting(tokenizer, 24), labelled=True
        )
        for pack in (False, True)
    )
    assert len(packed.rows) < len(apart.rows) == 6
    model = tiny_models.language_model(architecture)
    tiny_models.scramble(ah.attach(model, method))
    make_ready(model)
    with torch.no_grad():
        alone = [model(**apart.batch([i])) for i in range(6)]
        batch = packed.batch(range(len(packed.rows)))
        together = model(**batch)
    logits = torch.cat([out.logits[0] for out in alone])
    real = [row[: len(p["input_ids"])] for row, p in zip(together.logits, packed.rows, strict=True)]
    torch.testing.assert_close(torch.cat(real), logits, atol=1e-5, rtol=1e-4)
    tokens = [sum(i != IGNORED for i in row["labels"]) for row in apart.rows]
    mean = sum(o.loss * n for o, n in zip(alone, tokens, strict=True)) / sum(tokens)
    torch.testing.assert_close(together.loss, mean, atol=1e-5, rtol=1e-4)


def test_the_answer_is_extracted_before_comparing():
    task = parse_task("causal-lm(answer='#### (.*)')")
    examples = [Example("how many", None, "so #### 3"), Example("how many", None, "so #### 4")]
    predictions = [Generated("1 + 2 #### 3"), Generated("four")]
    assert task.metrics(examples, predictions) == {"exact_match": 0.5}
