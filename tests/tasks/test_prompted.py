"""Prompts with a place for the answer: templates, words, few-shot examples, equal beginnings."""

import json
import random
from dataclasses import replace

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.errors import ConfigError, DataError
from adapterhub.inference.open import open_adapter
from adapterhub.serving import Engine, GenerationOptions
from adapterhub.tasks import Setting, dump_task, parse_task
from adapterhub.tasks.causal_lm import Chat
from adapterhub.tasks.common import shared_prefix
from adapterhub.tasks.common.language_models import generate, text_before, token_loss
from adapterhub.tasks.common.shared_prefix import PrefixStore, answer_scores, keeping_prefix
from adapterhub.tasks.prompted import Prompted
from tests.kit import tiny_models
from tests.kit.data import (
    CHAT_TEMPLATE,
    WORDS,
    sentences,
    word_tokenizer,
    words_of,
    write_json_lines,
)
from tests.kit.selection import long_table
from tests.kit.session import succeeded

PROMPT = "prompted(template='{text} is {mask}', words={'pos': 'good', 'neg': 'bad'}, model=%s)"
BACKBONES = {"masked-lm": "bert", "causal-lm": "llama"}


@pytest.mark.parametrize("kind", ["masked-lm", "causal-lm"])
def test_the_label_word_is_predicted_at_the_mask(backbones, kind):
    tokenizer = AutoTokenizer.from_pretrained(backbones(BACKBONES[kind]))
    task = parse_task(PROMPT % kind)
    example = Example("the movie was very dull " * 9, None, "neg")
    (row,) = task.encode([example], Setting(tokenizer, 12), labelled=True).rows
    words = words_of(tokenizer, row["input_ids"])
    assert len(words) <= 12, "the text is cut, not the prompt"
    end = "is [MASK] [SEP]" if kind == "masked-lm" else "is bad"
    assert " ".join(words).endswith(end)
    assert words_of(tokenizer, row["labels"]) == ["bad"]
    (row,) = task.encode([example], Setting(tokenizer, 12), labelled=False).rows
    asked = words_of(tokenizer, row["input_ids"])[row["position"]]
    assert asked == ("[MASK]" if kind == "masked-lm" else "is")


LABEL_WORDS = {"0": "very bad", "1": "good", "2": "a dull film"}
TEXTS = ("the movie was", "a plot", "the actor is very very")


@pytest.mark.parametrize("kind", ["masked-lm", "causal-lm"])
def test_a_word_of_several_tokens_has_their_likelihood(backbones, kind):
    """By the log softmax of transformers' own model; of a masked one, at a mask for each token."""
    causal = kind == "causal-lm"
    model, tokenizer = ah.load_backbone(str(backbones(BACKBONES[kind])), task=kind)
    template, mask = "{text} is {mask}", tokenizer.mask_token
    options = {"template": template, "words": LABEL_WORDS, "model": kind}
    setting, examples = Setting(tokenizer, 32), [Example(text) for text in TEXTS]
    expected = []
    for text in TEXTS:
        for word in LABEL_WORDS.values():
            answer = tokenizer(word, add_special_tokens=False)["input_ids"]
            ids = tokenizer(f"{text} is {word}")["input_ids"]
            ids = ids if causal else tokenizer(f"{text} is {f' {mask}' * len(answer)}")["input_ids"]
            first = len(ids) - len(answer) - 1 if causal else ids.index(tokenizer.mask_token_id)
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            each = [logits[first + i, token] for i, token in enumerate(answer)]
            expected.append([sum(each), sum(each) / len(each)])
    sums = torch.tensor(expected).view(3, 3, 2).softmax(1)
    for normalized in (False, True):
        task = parse_task({"prompted": {**options, "length_normalized": normalized}})
        data = task.encode(examples, setting, labelled=False)
        scores = [[*p.scores.values()] for p in task.predict(model, data, 2)]
        torch.testing.assert_close(torch.tensor(scores), sums[..., int(normalized)])
    (row,) = task.encode([Example(TEXTS[0], None, "2")], setting, labelled=True).rows
    assert words_of(tokenizer, row["labels"]) == ["a", "dull", "film"]
    masks = row["input_ids"].count(tokenizer.mask_token_id)
    assert masks == (0 if causal else 3)


def test_labels_may_be_numbers():
    """In YAML, Python and on the command line; labels without a word are named."""
    words = {"0": "bad", "1": "very good"}
    for spec in (
        "prompted(words={0: bad, 1: very good})",
        {"prompted": {"words": {0: "bad", 1: "very good"}}},
        Prompted(words={0: "bad", 1: "very good"}),
        yaml.safe_load("prompted: {words: {0: bad, 1: very good}}"),
    ):
        assert parse_task(spec).words == words
    with pytest.raises(DataError) as error:
        parse_task(spec).check((), [Example("a", None, label) for label in ("1", "2", "2")])
    assert error.value.offenders == ("'2': 2 times",)
    assert "words={2: WORD, ...}" in str(error.value)


@pytest.mark.parametrize("kind", ["masked-lm", "causal-lm"])
def test_few_shot_examples_precede_the_prompt(backbones, kind):
    tokenizer = AutoTokenizer.from_pretrained(backbones(BACKBONES[kind]))
    train = [Example(f"movie {i}", None, label) for i in range(6) for label in ("neg", "pos")]
    task = parse_task(PROMPT % kind).with_shots(train, 2, seed=3)
    assert [e[-1] for e in task.examples] == ["pos", "neg"] * 2, "the labels take turns"
    assert len(set(task.examples)) == 4
    assert task == parse_task(PROMPT % kind).with_shots(train, 2, seed=3)
    assert task != parse_task(PROMPT % kind).with_shots(train, 2, seed=4)
    assert parse_task(dump_task(task)) == task, "they are a part of the task's options"
    example = Example("the movie was very dull " * 9, None, "neg")
    setting = Setting(tokenizer, 12)
    (row,) = task.encode([example], setting, labelled=False).rows
    (bare,) = parse_task(PROMPT % kind).encode([example], setting, labelled=False).rows
    words, asked = words_of(tokenizer, row["input_ids"]), words_of(tokenizer, bare["input_ids"])
    tail = [w for w in asked if w not in ("[CLS]", "<s>")]
    assert words[-len(tail) :] == tail, "they do not take the room of the text"
    worked = words[len(asked) - len(tail) : -len(tail)]
    assert [w for w in worked if w in ("good", "bad")] == ["good", "bad"] * 2
    assert row["position"] - bare["position"] == len(worked)
    # An example is not in front of itself.
    two = [Example("movie 0", None, "neg"), Example("movie 1", None, "pos")]
    task = parse_task(PROMPT % kind).with_shots(two, 1, seed=0)
    rows = task.encode([*two, Example("a film")], Setting(tokenizer, 40), labelled=False).rows
    found = [" ".join(words_of(tokenizer, row["input_ids"])) for row in rows]
    assert [text.count("movie") for text in found] == [2, 2, 2]


def test_words_and_few_shot_examples_that_do_not_fit(backbones):
    tokenizer = AutoTokenizer.from_pretrained(backbones("bert"))
    for word in ("good", "unheard", "bad unheard"):
        task = parse_task({"prompted": {"words": {"pos": "good", "neg": word}}})
        with pytest.raises(ConfigError, match="a different word"):
            task.encode([Example("a film", None, "pos")], Setting(tokenizer, 32), labelled=True)
    task = parse_task(PROMPT % "masked-lm")
    train = [Example("dull movie", None, "neg")] * 9 + [Example("movie", None, "pos")]
    with pytest.raises(DataError, match="too few") as error:
        task.with_shots(train, 2, seed=0)
    assert error.value.offenders == ("pos: 1",)
    long = task.with_shots(train[:9] + [Example("movie", None, "pos")] * 9, 9, seed=0)
    setting = Setting(tokenizer, 12, positions=40)
    with pytest.raises(ConfigError, match="leave no room"):
        long.encode([Example("a film", None, "pos")], setting, labelled=False)
    with pytest.raises(ConfigError, match="do not fit the template"):
        parse_task({"prompted": {"examples": [["a film", "2"]]}})
    with pytest.raises(ConfigError, match="takes no few-shot examples"):
        parse_task("classification").with_shots(train, 1, seed=0)


TRAIN = [Example(f"movie {n}", None, word) for n, word in enumerate(["good", "bad", "fine"])]
CHATS = [Chat((("system", "film"), ("user", e.text), ("assistant", e.label))) for e in TRAIN] + [
    Chat((("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")))
]
PLAIN = "causal-lm(template='{text} is ')"
CASES = {
    "plain": (PLAIN, "llama", TRAIN, "movie 0 is good movie 1 is bad movie 2 is"),
    "template": ("causal-lm", "chat", TRAIN, "user : movie 0 </s> assistant : good </s> "
                 "user : movie 1 </s> assistant : bad </s> user : movie 2 </s> assistant :"),
    "chats": ("causal-lm(data=chat)", "chat", CHATS,
              "system : film </s> user : movie 0 </s> assistant : good </s> user : movie 1 </s> "
              "assistant : bad </s> user : movie 2 </s> assistant :"),
    "seq2seq": ("seq2seq(template='the {text}')", "t5", TRAIN,
                "the movie 0 good the movie 1 bad the movie 2"),
    "unified-qa": ("unified-qa", "t5", TRAIN, "movie 0 good movie 1 bad movie 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_examples_are_in_front_of_generated_answers(backbones, case):
    spec, kind, train, expected = CASES[case]
    tokenizer = AutoTokenizer.from_pretrained(backbones("llama" if kind == "chat" else kind))
    if kind == "chat":
        tokenizer.chat_template = CHAT_TEMPLATE
    task, setting = parse_task(spec), Setting(tokenizer, 12)
    drawn = task.with_shots(train, 2, seed=3)
    assert parse_task(dump_task(drawn)) == drawn, "they are a part of the task's options"
    assert len({text for text, _ in drawn.examples} & {"movie 0", "movie 1", "movie 2"}) == 2
    fixed = replace(task, examples=tuple((e.text, e.label) for e in TRAIN))
    (row,) = fixed.encode([train[2]], setting, labelled=False).rows
    special = set(tokenizer.all_special_tokens) - {"<unk>"}
    found = [w for w in words_of(tokenizer, row["input_ids"]) if w not in special]
    known = [w for w in expected.split() if w != "</s>"]
    unknown = [w if w in tokenizer.get_vocab() else "<unk>" for w in known]
    assert found == unknown, "all but the row's own"
    (row,) = fixed.encode([train[2]], setting, labelled=True).rows
    assert [w for w in words_of(tokenizer, row["labels"]) if w not in special] == ["fine"]


def test_texts_are_cut_and_examples_are_not(backbones):
    """Nor are they more than there are; a chat of four messages is not one."""
    for few, rows in (("seq2seq", TRAIN), ("causal-lm(data=chat)", CHATS)):
        with pytest.raises(DataError, match="too few"):
            parse_task(few).with_shots(rows, 4, seed=0)
    assert parse_task("causal-lm(data=chat)").with_shots(CHATS, 3, seed=0)
    for spec, kind in (("seq2seq", "t5"), (PLAIN, "llama")):
        tokenizer = AutoTokenizer.from_pretrained(backbones(kind))
        long = Example("the film was very dull " * 9, None, "bad")
        task = parse_task(spec).with_shots(TRAIN, 3, seed=0)
        lengths = []
        for each in (parse_task(spec), task):
            (row,) = each.encode([long], Setting(tokenizer, 12, positions=60), labelled=False).rows
            lengths.append(len(row["input_ids"]))
        assert lengths[0] <= 12
        assert lengths[0] + 6 < lengths[1] < 40
        with pytest.raises(ConfigError, match="leave no room"):
            task.encode([long], Setting(tokenizer, 12, positions=9), labelled=False)


def test_a_model_that_goes_on_is_stopped_between_examples(backbones):
    setting = Setting(AutoTokenizer.from_pretrained(backbones("llama")), 12)
    task = parse_task(PLAIN)
    assert task.stop_texts(setting) == ()
    assert task.with_shots(TRAIN, 1, seed=0).stop_texts(setting) == ("\n\n",)
    lines = parse_task({"causal-lm": {"examples": [["a", "one\n\ntwo"]]}})
    assert lines.stop_texts(setting) == (), "an answer has it"
    assert text_before("good\n\nmovie 1 is", ("\n\n",)) == "good"


SERVED = {
    "scores": "prompted(model=causal-lm, template='a 0 {text} is {mask}', shots=1, "
    "words={0: bad plot, 1: good film})",
    "generated": "causal-lm(template='{text} is ', shots=2, new_tokens=4, generate=true)",
}


@pytest.mark.parametrize("key", SERVED)
def test_examples_of_the_training_rows_are_kept_and_served(
    key, train, adapterhub, backbones, tmp_path
):
    """With labels of several tokens, whose prefix is kept between requests, and written ones."""
    rows = [
        {"text": text, "label": int(label == "pos") if key == "scores" else text.split()[-1]}
        for text, label in sentences(24)
    ]
    file, run = write_json_lines(tmp_path / "rows.jsonl", rows), tmp_path / "run"
    words = ("--task", SERVED[key], "train.epochs=1")
    succeeded(train(*words, folder=backbones("llama"), file=file))
    kept = open_adapter(run).task.examples
    assert len(kept) == 2
    assert {text for text, _ in kept} <= {row["text"] for row in rows}
    prompt = "the film was dull"
    expected = json.loads(succeeded(adapterhub("predict", run, "--json", prompt)))[key]
    with Engine(backbones("llama")) as engine:
        served = [engine.submit(str(run / "adapter"), prompt).result(30)[key] for _ in range(3)]
        if key == "scores":
            assert served == [pytest.approx(expected, abs=1e-4)] * 3
            (model,) = engine.adapters.models.classes.values()
            assert model._prefix[1].prefix.length > 15
            return
        assert served == [expected] * 3
        messages = [{"role": "user", "content": prompt}]
        options = GenerationOptions(max_tokens=4, temperature=0)
        written = engine.generate(str(run / "adapter"), messages, options).result(30)
        assert written.text.strip() == expected


# What prompts have in common is computed once, with the results of computing all of it

SIZE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.15,
    "head_dim": 8, "vocab_size": tiny_models.VOCAB, "pad_token_id": 1, "eos_token_id": 2,
    "bos_token_id": 3,
}  # fmt: skip
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
FAMILIES = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},  # learned positions
    "bloom": {"n_layer": 2, "n_head": 4},  # distances, counted from the mask
    "mistral": {"sliding_window": 8},
    "gemma3_text": TWO_KINDS,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1],
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "num_experts": 0,
    },
}  # fmt: skip
WITHOUT = {  # no cache, states of another kind, and states that only one token at a time continues
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"state_size": 4, "use_mambapy": False},
    "jamba": {
        "mamba_d_state": 4, "mamba_d_conv": 3, "mamba_dt_rank": 4, "num_experts": 2,
        "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False,
    },
}  # fmt: skip

RANDOM = random.Random(0)
SHOTS = [[" ".join(RANDOM.choices(WORDS, k=9)), label] for label in "0101"]
EXAMPLES = [Example(" ".join(RANDOM.choices(WORDS, k=2 + i % 5)), None, "2") for i in range(12)]
ANSWERS = {0: "very good", 1: "bad", 2: "a dull film"}
TEMPLATE = {"model": "causal-lm", "template": "{text} is {mask}"}
TASK = parse_task({"prompted": TEMPLATE | {"words": ANSWERS, "examples": SHOTS}})
TOKENIZER = word_tokenizer("<s>")
SETTING = Setting(TOKENIZER, 64)


def counted_tokens(model):
    """Return a list that gets the number of tokens of each pass."""
    counts = []
    model.register_forward_pre_hook(
        lambda _, args, inputs: counts.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    return counts


def tiny(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZE | (FAMILIES | WITHOUT)[family])
    return AutoModelForCausalLM.from_config(config).eval()


def computed(model):
    """Return scores of answers and of words, losses and texts, and the tokens of each."""
    answers = [*TASK.answer_ids(TOKENIZER).values()]
    prompts, labelled = (TASK.encode(EXAMPLES, SETTING, labelled=known) for known in (False, True))
    rows = [{k: v for k, v in row.items() if k != "position"} for row in prompts.rows]
    writes = parse_task("causal-lm(new_tokens=4, beams=2)")
    texts = replace(writes.encode(EXAMPLES, SETTING, labelled=False), rows=rows)
    short = replace(TASK, words={"0": "good", "1": "bad", "2": "dull"})
    counts = counted_tokens(model)
    found, tokens = [], []
    for compute in (
        lambda: answer_scores(model, prompts, answers, 64),
        lambda: [[*p.scores.values()] for p in short.predict(model, prompts, 64)],
        lambda: token_loss(model, labelled, 64, shifted=True)["loss"],
        lambda: generate(model, texts, 64, writes),
    ):
        counts.clear()
        found.append(compute())
        tokens.append(sum(counts))
    return found, tokens


@long_table("family", [*FAMILIES, *WITHOUT], 3)
def test_results_are_those_of_all_tokens(family, monkeypatch):
    found, tokens = computed(tiny(family))
    monkeypatch.setattr(shared_prefix, "_tried_cache", lambda *_: None)
    expected, all_tokens = computed(tiny(family))
    for some, others in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(torch.tensor(some), torch.tensor(others), atol=1e-5, rtol=0)
    assert found[3] == expected[3]
    for some, others in zip(tokens, all_tokens, strict=True):
        assert family in WITHOUT or some < others / 3


@pytest.mark.parametrize("method", ["lora", "prefix(length=3)", "prompt(length=3)", "loreft", None])
def test_adapters_apply_to_all_tokens(method, monkeypatch):
    """Those that depend on the place of a token are computed as a whole, if they must be."""
    model = tiny("llama")
    if method:
        tiny_models.scramble(ah.attach(model, method))
    (scores, *_), _ = computed(model)
    monkeypatch.setattr(shared_prefix, "_tried_cache", lambda *_: None)
    (expected, *_), _ = computed(model)
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(expected), atol=1e-5, rtol=0)


def test_rows_without_the_prefix_are_computed_whole():
    model = tiny("llama")
    own = Example(SHOTS[0][0], None, "1")  # its own example is not in front of it
    alone = TASK.predict(model, TASK.encode([own], SETTING, labelled=False), 64)
    counts = counted_tokens(model)
    encoded = TASK.encode([own, *EXAMPLES], SETTING, labelled=False)
    together = TASK.predict(model, encoded, 64)
    assert together[0].scores == pytest.approx(alone[0].scores, abs=1e-5)
    assert sum(counts) < sum(encoded.lengths) / 2


def test_a_store_keeps_the_prefix_between_calls():
    model, store = tiny("llama"), PrefixStore()
    counts, tokens = counted_tokens(model), []
    for example in EXAMPLES:
        data = TASK.encode([example], SETTING, labelled=False)
        (expected,) = TASK.predict(model, data, 1)
        counts.clear()
        with keeping_prefix(store):
            (kept,) = TASK.predict(model, data, 1)
        tokens.append(sum(counts))
        assert kept.scores == pytest.approx(expected.scores, abs=1e-5)
    assert max(tokens[4:]) < 20 < min(tokens[:2])
