"""SmolLM2: what training, merging, quantization and generation promise, on a model that answers."""

import json

import pytest
import torch

import adapterhub as ah
from adapterhub.data.examples import Example
from adapterhub.inference.open import open_backbone
from adapterhub.loop.report import reporter_for
from adapterhub.recipe.recipe import read
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.shared_prefix import answer_scores
from adapterhub.training.loading import make_ready
from adapterhub.training.run import run

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Weng earns $12 an hour for babysitting. Yesterday, she did 50 minutes of babysitting.",
    "def area(width, height):\n    return width * height\n",
)
REVIEWS = (
    "a dull plot, and two hours of it",
    "a joy to watch from the first scene to the last",
    "the actors try hard, and nothing helps",
    "warm, witty and moving",
    "i slept well in it",
    "what a film",
)
QUESTIONS = ("What is the capital of France?", "Name three colours.", "What is 2 + 3?")


@pytest.fixture(scope="module")
def model_and_tokenizer(smollm2):
    return ah.load_backbone(smollm2, task="causal-lm", dtype="fp32")


@pytest.fixture(scope="module")
def learned(smollm2, tickets, tmp_path_factory):
    """The folder of a run that learned the form of answers to tickets."""
    folder = tmp_path_factory.mktemp("runs") / "lora"
    recipe = read(
        flags={
            "backbone": smollm2, "method": "lora(sites=['attn.*'])", "output": str(folder),
            "task": "causal-lm(generate=true, new_tokens=40)", "dtype": "fp32",
            "data": {"train": str(tickets[0]), "eval": str(tickets[1])},
            "train": {"epochs": 2, "batch_size": 8, "tensorboard": False, "report": False},
        }
    )  # fmt: skip
    return run(recipe, reporter_for(folder, recipe.train, quiet=True))


@pytest.fixture(scope="module")
def opened(learned):
    return ah.open(learned.folder)


def prompts(tokenizer, questions=QUESTIONS):
    """Return the ids of chats with one question each."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    return [
        tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        for chat in chats
    ]


def written(model, inputs, **options):
    """Return the ids that follow a prompt."""
    defaults = {"max_new_tokens": 24, "do_sample": False}
    with torch.no_grad():
        ids = model.generate(**inputs, **(defaults | options))
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def test_the_bare_model_answers(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    assert "Paris" in tokenizer.decode(written(model, prompts(tokenizer)[0]))


def test_the_loss_of_the_bare_model_is_that_of_transformers(smollm2, tickets):
    """Of the tokens of the answers, and of what the template writes behind them."""
    opened = open_backbone(smollm2, parse_task("causal-lm(data=chat)"))
    examples = opened.task.read(str(tickets[1]), opened.data, "eval")
    ours = opened.evaluate(examples)["loss"]
    total = count = 0.0
    for line in tickets[1].read_text(encoding="utf-8").splitlines():
        *asked, answer = json.loads(line)["messages"]
        prompt = opened.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, tokenize=False
        )
        start = len(opened.tokenizer(prompt)["input_ids"])
        whole = f"{prompt}{answer['content']}<|im_end|>\n"
        ids = opened.tokenizer(whole, return_tensors="pt")["input_ids"]
        labels = ids.clone()
        labels[:, :start] = -100
        with torch.no_grad():
            loss = opened.model(input_ids=ids, labels=labels).loss
        learned = ids.shape[1] - start
        total, count = total + loss.item() * learned, count + learned
    assert ours == pytest.approx(total / count, rel=1e-4)


@pytest.mark.parametrize("method", sorted(ah.METHODS))
def test_a_method_begins_with_the_backbone_and_leaves_it(method, model_and_tokenizer):
    """Logits of an attached adapter that begins with the identity, and those after detaching."""
    model, tokenizer = model_and_tokenizer
    inputs = tokenizer(TEXTS[1], return_tensors="pt")
    with torch.no_grad():
        before = model(**inputs).logits
        try:
            adapter = ah.attach(model, method)
        except ah.AdapterhubError as error:
            pytest.skip(str(error).splitlines()[0])
        with ah.disabled(model):
            off = model(**inputs).logits
        adapter.detach()
        after = model(**inputs).logits
    assert torch.equal(before, off)
    assert torch.equal(before, after)


def test_tickets_are_learned(learned, opened, tickets):
    """Answers are the form, on tickets about other products in other sentences."""
    assert learned.metrics["exact_match"] >= 0.5
    answer = json.loads(opened.predict("My scooter does not start. It is urgent.").text)
    assert answer == {"team": "repair", "product": "scooter", "urgency": "high"}


def test_an_answer_ends_with_the_turn(opened):
    """The end of the turn was learned: the next token is not written, and no length is reached."""
    for question in ("My kettle is broken.", "Where is my parcel?"):
        (inputs,) = prompts(opened.tokenizer, [question])
        ids = written(opened.model, inputs, max_new_tokens=64)
        assert len(ids) < 64
        assert opened.tokenizer.decode(ids[-1]) == "<|im_end|>"


@pytest.mark.parametrize("how", ["no cache", "static cache", "left padding"])
@pytest.mark.parametrize("with_adapter", [True, False])
def test_the_same_tokens_are_written(how, with_adapter, opened):
    """With a cache of either kind, alone or in a padded batch."""
    model, tokenizer = opened.model, opened.tokenizer
    questions = [*QUESTIONS, "My kettle is broken, and I do not know what to do about it."]
    alone = prompts(tokenizer, questions)
    context = torch.no_grad() if with_adapter else ah.disabled(model)
    with context:
        expected = [written(model, inputs) for inputs in alone]
        if how == "left padding":
            found = padded(model, tokenizer, alone)
        else:
            options = {"use_cache": False}
            if how == "static cache":
                options = {"cache_implementation": "static"}
            found = [written(model, inputs, **options) for inputs in alone]
    assert [without_padding(ids, tokenizer) for ids in found] == [
        without_padding(ids, tokenizer) for ids in expected
    ]


def padded(model, tokenizer, alone):
    batch = tokenizer.pad(
        {"input_ids": [each["input_ids"][0].tolist() for each in alone]},
        padding_side="left", return_tensors="pt",
    )  # fmt: skip
    width = batch["input_ids"].shape[1]
    with torch.no_grad():
        ids = model.generate(**batch, max_new_tokens=24, do_sample=False)
    return ids[:, width:].tolist()


def without_padding(ids, tokenizer):
    """Return ids up to the end of the turn."""
    return ids[: ids.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in ids else ids


def test_beams_write_the_same_with_and_without_a_cache(opened):
    (inputs,) = prompts(opened.tokenizer, ["The box with the saw is lost."])
    found = [
        written(opened.model, inputs, num_beams=3, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert found[0] == found[1]


def test_packed_chats_are_read_as_if_alone(opened, tickets):
    """The loss of several chats in one row is that of a row for each."""
    make_ready(opened.model)
    examples = opened.task.read(str(tickets[1]), opened.data, "eval")[:8]
    losses = {}
    for pack in (False, True):
        task = parse_task({"causal-lm": {"data": "chat", "pack": pack}})
        encoded = task.encode(examples, Setting(opened.tokenizer, 512), labelled=True)
        assert (len(encoded.rows) < len(examples)) == pack
        total = count = 0.0
        for number, row in enumerate(encoded.rows):
            learned = sum(label != -100 for label in row["labels"][1:])
            with torch.no_grad():
                total += opened.model(**encoded.batch([number])).loss.item() * learned
            count += learned
        losses[pack] = total / count
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


def test_a_merged_model_answers_as_its_adapter(learned, tickets):
    opened = ah.open(learned.folder)
    examples = opened.task.read(str(tickets[1]), opened.data, "eval")[:50]
    with_adapter = [each.text for each in opened.predict_examples(examples)]
    ah.merge(opened.model)
    merged = [each.text for each in opened.predict_examples(examples)]
    assert merged == with_adapter


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_quantized_backbone_still_answers(quantize, smollm2):
    pytest.importorskip("bitsandbytes")
    # In bf16 two tokens may have the same logit, and which one is written is chance.
    model, tokenizer = ah.load_backbone(smollm2, task="causal-lm", quantize=quantize, dtype="fp32")
    adapter = ah.attach(model, "lora")
    (inputs,) = prompts(tokenizer, QUESTIONS[:1])
    ids = written(model, inputs)
    assert "Paris" in tokenizer.decode(ids)
    assert written(model, inputs, cache_implementation="static") == ids
    assert adapter.name


def test_labels_of_several_tokens_have_transformers_likelihood(model_and_tokenizer):
    """With examples in front, which are computed once for all rows and labels."""
    model, tokenizer = model_and_tokenizer
    words = {0: "awful and boring", 1: "a wonderful film"}
    shots = [[text, str(label)] for label, text in enumerate(REVIEWS[:2])] * 2
    options = {"model": "causal-lm", "template": "Review: {text} Sentiment: {mask}"}
    task = parse_task({"prompted": options | {"words": words, "examples": shots}})
    setting = Setting(tokenizer, 256)
    data = task.encode([Example(text) for text in REVIEWS[2:] * 3], setting, labelled=False)
    tokens = []
    hook = model.register_forward_pre_hook(
        lambda _, __, inputs: tokens.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    found = answer_scores(model, data, [*task.answer_ids(tokenizer).values()], 16)
    hook.remove()
    assert sum(tokens) < sum(data.lengths) / 2
    before = "".join(f"Review: {text} Sentiment: {words[int(n)]}\n" for text, n in shots)
    for text, scores in zip(REVIEWS[2:], found, strict=False):
        prompt = tokenizer(f"{before}Review: {text} Sentiment:")["input_ids"]
        for word, score in zip(words.values(), scores, strict=True):
            ids = tokenizer(f"{before}Review: {text} Sentiment: {word}")["input_ids"]
            with torch.no_grad():
                logs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            expected = sum(float(logs[i - 1, ids[i]]) for i in range(len(prompt), len(ids)))
            assert score == pytest.approx(expected, abs=1e-4)
