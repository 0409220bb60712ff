"""Questions on pictures: prompts, batches, losses and answers as of plain transformers."""

import dataclasses
import itertools
import re

import pytest
import torch
from PIL import Image

import adapterhub as ah
from adapterhub.backbones.load import load_backbone
from adapterhub.backbones.processor import picture_inputs
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks import Setting, parse_task
from adapterhub.tasks.common.base import Generated
from adapterhub.tasks.common.batches import next_token_loss
from adapterhub.tasks.image_text_to_text import TOKENS
from tests.kit import media, tiny_models
from tests.kit.data import write_json_lines
from tests.kit.selection import cases_of, long_table

TASK = parse_task("image-text-to-text(new_tokens=5)")
NAMES, TEMPLATE = sorted(media.SAVED), media.TEMPLATE.replace("IMAGE", "<image>")
PREPENDING = itertools.product((None, "prefix", "prompt"), NAMES)
ANSWERING = [*PREPENDING, *cases_of(itertools.product(("lora", "pfeiffer", "ia3"), NAMES), 6)]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Pictures of two sizes with the same question."""
    return media.write_questions(tmp_path_factory.mktemp("vqa"), digits=3, each=2)


@pytest.fixture
def loaded(backbones):
    def load(name, template=None):
        model, processor = load_backbone(str(backbones(f"vlm-{name}")), task="image-text-to-text")
        if template is not None:
            processor.chat_template = template
        return model, processor

    return load


def examples(file):
    return TASK.read(str(file), DataOptions(), "train")


def encoded(file, processor, task=TASK, labelled=True, **setting):
    return task.encode(examples(file), Setting(processor, 512, **setting), labelled=labelled)


def learned(row, processor):
    return processor.tokenizer.decode([i for i in row["labels"] if i >= 0])


def answers(row, processor):
    """Return what is learned, as texts without what ends them; between them texts are read."""
    groups = itertools.groupby(row["labels"], lambda label: label >= 0)
    texts = [processor.tokenizer.decode(list(group)) for learned, group in groups if learned]
    return [re.split(r"[<\n]", text)[0].strip() for text in texts]


def test_examples_are_read_shown_and_scored(questions, chats):
    first = examples(questions)[0]
    assert (first.name, first.question, first.label) == ("0-0.png", "which digit?", "0")
    path = str(questions.parent / "0-0.png")
    assert TASK.example([path, "which digit?"], DataOptions()).with_label("0") == first
    assert TASK.shown(first) == ["0-0.png", "which digit?"]
    assert TASK.shown(TASK.example([path], DataOptions())) == [path]
    long, short, _ = examples(chats)
    assert TASK.shown(short) == ["0-1.png, 1-1.png", "and which digits?"]
    assert TASK.shown(long)[1].splitlines() == [
        "user: <image> and <image> which digits?", "assistant: 0 and 1", "user: and this? <image>",
    ]  # fmt: skip
    generated = [Generated("0"), Generated("one")]
    assert TASK.metrics(examples(questions)[:2], generated) == {"exact_match": 0.5}
    assert dataclasses.replace(TASK, metric="rouge").main_metric == "rougeL"


def test_captions_are_answers_to_the_prompt_of_the_task(questions, loaded, tmp_path):
    table = questions.parent / "captions.csv"
    table.write_text("image,caption\n0-0.png,a zero\n1-0.png,a one\n")
    task, choice = TASK.fitted(str(table), DataOptions(), "train")
    assert "no column of questions: 'Describe the picture.' is asked of each" in choice.notes[-1]
    _, asked = TASK.fitted(str(questions), DataOptions(), "train")
    assert not any("no column" in note for note in asked.notes)
    _, processor = loaded("llava")
    own = dataclasses.replace(task, prompt="What is it?")
    read = own.read(str(table), choice.options, "train")
    rows = own.encode(read, Setting(processor, 128), labelled=True).rows
    assert rows[0]["texts"].prompt == "<image>\nWhat is it?\n"
    assert learned(rows[0], processor) == "a zero</s>"


def test_the_prompt_is_the_chat_template(questions, loaded):
    _, processor = loaded("llava", TEMPLATE)
    row = encoded(questions, processor).rows[0]
    assert row["texts"].prompt == "<|user|><image>which digit?<|assistant|>"
    assert row["texts"].answer == "0</s>"
    assert learned(row, processor) == "0</s>", "the template ends it: no second end"
    text = processor.tokenizer.decode(row["input_ids"])
    assert text == "<|user|>" + "<image>" * 16 + "which digit?<|assistant|>0</s>"
    task = dataclasses.replace(TASK, template="Q: {text} {image} A:")  # that of the task is first
    row = encoded(questions, processor, task).rows[0]
    assert row["texts"].prompt == "Q: which digit? <image> A:"


@pytest.mark.parametrize("end", ["</s>", "<pad>", "", None])
def test_generation_stops_at_what_an_answer_ends_with(end, questions, loaded):
    _, processor = loaded("llava", None if end is None else TEMPLATE.replace("</s>", end))
    (row, *_) = encoded(questions, processor).rows
    stop = processor.tokenizer.convert_tokens_to_ids(end or "</s>")
    assert TASK.stops(Setting(processor, 128)) == [stop] == row["labels"][-1:]


REWRITING = TEMPLATE.replace(
    "{{ part['text'] }}",
    "{% if message['role'] == 'user' or message == messages[-1] %}{{ part['text'] }}{% endif %}",
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [  # no picture, and another text with the answer
        ("{{ messages[0]['content'][1]['text'] }}", "does not begin an answer behind one <image>"),
        ("{{ messages|length }}<image>", "does not begin an answer behind one <image>"),
        (REWRITING, "LlavaProcessor rewrites earlier messages"),
    ],
)
def test_a_chat_template_of_another_form_is_refused(template, expected, questions, chats, loaded):
    _, processor = loaded("llava", template)
    if template == REWRITING:
        TASK.encode(examples(chats)[1:], Setting(processor, 512), labelled=True)
    with pytest.raises(ConfigError, match=expected):
        encoded(chats if template == REWRITING else questions, processor)
    for wrong in ("{text}", "{image}", "{image}{image}{text}"):
        with pytest.raises(ConfigError, match="invalid template"):
            dataclasses.replace(TASK, template=wrong)


def test_a_placeholder_in_the_data_is_no_second_picture(questions, loaded):
    _, processor = loaded("llava")
    first = examples(questions)[0]
    asked = dataclasses.replace(first, question="<image>\nwhich digit?")
    setting = Setting(processor, 128)
    same = [TASK.encode([e], setting, labelled=True).rows[0]["input_ids"] for e in (first, asked)]
    assert same[0] == same[1]
    with pytest.raises(DataError, match=r"1 answers have <image>"):
        TASK.encode([first.with_label("an <image>")], setting, labelled=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_that_of_the_processor_and_the_loss_that_of_the_model(name, questions, loaded):
    """Prompts of pictures of two sizes; the tokens of the answers follow, and only they count."""
    model, processor = loaded(name)
    data = encoded(questions, processor, labelled=False)
    pictures = [[e.decoded(TASK.decode)] for e in data.examples]
    texts = [row["texts"].prompt for row in data.rows]
    expected = picture_inputs(processor, pictures, texts)
    side = "right" if expected["attention_mask"][:, 0].all() else "left"
    batch = TASK.prompt_batch(data.rows, data.setting, side)
    assert batch.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(batch[key], tensor), key
    labelled = encoded(questions, processor)
    for row, prompt in zip(labelled.rows, data.rows, strict=True):
        size = len(prompt["input_ids"])
        assert row["input_ids"][:size] == prompt["input_ids"]
        assert row["labels"] == [-100] * size + row["input_ids"][size:]
        assert {len(row[key]) for key in batch.keys() & row.keys()} == {len(row["labels"])}
    whole = labelled.batch(range(len(labelled.rows)))
    with torch.no_grad():
        output = model(**whole)
    own = next_token_loss(output, whole)
    assert float(output.loss) == pytest.approx(float(own), rel=1e-5)
    metrics = TASK.evaluate(model, labelled, batch_size=4)
    assert metrics["loss"] == pytest.approx(float(own), rel=1e-4)
    assert metrics.keys() == set(TASK.metric_names(labelled.examples))


def test_the_answer_of_paligemma_is_its_suffix(questions, loaded):
    """As its processor makes it, for training; the tokens of the suffix see what is before them."""
    _, processor = loaded("paligemma")
    row, example = encoded(questions, processor).rows[0], examples(questions)[0]
    expected = processor(
        images=[[example.decoded(TASK.decode)]], text=["<image>which digit?"], suffix=["0"]
    )
    assert row["input_ids"] == expected["input_ids"][0]
    assert row["token_type_ids"] == expected["token_type_ids"][0]
    assert row["labels"] == list(expected["labels"][0])


@long_table(("method", "name"), ANSWERING, 3, nightly=2)
def test_answers_are_those_without_a_cache_and_without_a_batch(method, name, questions, loaded):
    """Also with methods that prepend tokens, where positions have three dimensions."""
    model, processor = loaded(name)
    if method is not None:
        adapter = ah.attach(model, method, name="one")
        with torch.no_grad():
            tiny_models.add_noise(adapter.tensors().values(), std=0.1, seed=0)
    asked, setting = examples(questions)[:4], Setting(processor, 128)
    data, prompts = (TASK.encode(asked, setting, labelled=given) for given in (True, False))
    found = [prediction.text for prediction in TASK.predict(model, data, batch_size=3)]
    for i, example in enumerate(data.examples):
        prompt = prompts.batch([i])
        start = prompt["input_ids"].shape[1]
        ids = model.generate(
            **prompt, max_new_tokens=5, do_sample=False, use_cache=False, pad_token_id=1
        )
        text = processor.tokenizer.decode(ids[0, start:], skip_special_tokens=True)
        assert found[i] == text.strip(), example.name


def test_three_dimensional_positions_follow_the_prompt(questions, loaded):
    """Qwen2-VL: the outputs are those of embeddings with virtual tokens put in front by hand."""
    model, processor = loaded("qwen2_vl")
    batch = encoded(questions, processor, labelled=False).batch([0, 1])
    language, seen = model.model.language_model, {}
    hook = language.register_forward_pre_hook(
        lambda module, args, given: seen.update(given), with_kwargs=True
    )
    with torch.no_grad():
        model(**batch)
    hook.remove()
    embeddings, positions = seen["inputs_embeds"], seen["position_ids"]
    assert not torch.equal(positions[0], positions[2])
    adapter = ah.attach(model, "prompt", name="one")
    (values,) = adapter.tensors().values()
    with torch.no_grad():
        tiny_models.add_noise([values], std=1.0, seed=0)
        found = model(**batch).logits
        values = values.detach().clone()
        adapter.detach()
        count, mask = len(values), batch["attention_mask"]
        places = torch.arange(count).expand(len(positions), 2, -1)
        output = language(
            inputs_embeds=torch.cat([values.expand(2, -1, -1), embeddings], 1),
            position_ids=torch.cat([places, positions + count], -1),
            attention_mask=torch.cat([mask.new_ones(2, count), mask], 1),
        )
        expected = model.lm_head(output.last_hidden_state)[:, count:]
    kept = mask.bool()
    torch.testing.assert_close(found[kept], expected[kept])


CHAT = [
    {"from": "human", "value": "<image> and <image>\nwhich digits?"},
    {"from": "gpt", "value": "0 and 1"},
    {"from": "human", "value": "and this? <image>"},
    {"from": "gpt", "value": "2"},
]
LATE = [  # and in an answer
    {"from": "human", "value": "hello"},
    {"from": "gpt", "value": "hello, too"},
    {"from": "human", "value": "show a two"},
    {"from": "gpt", "value": "this is one: <image>"},
    {"from": "human", "value": "and this? <image>"},
    {"from": "gpt", "value": "a one"},
]
CHATTING = [name for name in NAMES if name not in ("llava", "paligemma")]


@pytest.fixture(scope="module")
def chats(questions):
    """Chats with one, two and three pictures."""
    rows = [
        {"images": ["0-0.png", "1-0.png", "2-0.png"], "conversations": CHAT},
        {"images": ["0-1.png", "1-1.png"], "conversations": CHAT[:2]},
        {"images": ["2-1.png"], "conversations": [{"from": "human", "value": "what?"}, CHAT[3]]},
    ]
    return write_json_lines(questions.parent / "chats.jsonl", rows)


@pytest.mark.parametrize("name", [*CHATTING, "llava"])
def test_chats_with_several_pictures_are_those_of_the_processor(name, chats, loaded):
    """Tokens, pictures, loss and answers, in a batch and alone."""
    model, processor = loaded(name, TEMPLATE if name == "llava" else None)
    _, choice = TASK.fitted(str(chats), DataOptions(), "train")
    assert choice.notes[-1].startswith("read as chats with images: messages from 'conversations'")
    data, asked = (encoded(chats, processor, labelled=of) for of in (True, False))
    first = data.rows[0]["texts"]
    assert first.prompt.index("which digits?") < first.prompt.index("0 and 1")
    assert answers(data.rows[0], processor) == ["0 and 1", "2"]
    assert [answers(row, processor) for row in data.rows[1:]] == [["0 and 1"], ["2"]]
    pictures = [[p.decoded(TASK.decode) for p in e.pictures] for e in data.examples]
    expected = picture_inputs(processor, pictures, [row["texts"].prompt for row in data.rows])
    side = "right" if expected["attention_mask"][:, 0].all() else "left"
    batch = TASK.prompt_batch(asked.rows, asked.setting, side)
    for key, tensor in expected.items():
        assert torch.equal(batch[key], tensor), key
    with torch.no_grad():
        alone = [next_token_loss(model(**data.batch([i])), data.batch([i])) for i in range(3)]
        counts = torch.tensor([sum(i >= 0 for i in row["labels"]) for row in data.rows])
    metrics = TASK.evaluate(model, data, batch_size=3)
    mean = float((torch.stack(alone) * counts).sum() / counts.sum())
    assert metrics["loss"] == pytest.approx(mean, rel=1e-4)
    texts = [p.text for p in TASK.predict(model, data, batch_size=3)]
    assert texts == [p.text for p in TASK.predict(model, data, batch_size=1)]


@pytest.mark.parametrize("name", CHATTING)
def test_a_picture_may_come_late_and_an_answer_may_have_one(name, questions, loaded):
    _, processor = loaded(name)
    row = {"images": ["2-0.png", "1-0.png"], "conversations": LATE}
    file = write_json_lines(questions.parent / "late.jsonl", [row])
    (row,), (asked,) = (encoded(file, processor, labelled=of).rows for of in (True, False))
    assert answers(row, processor) == ["hello, too", "a one"]
    pictures = [[p.decoded(TASK.decode) for p in examples(file)[0].pictures]]
    whole = picture_inputs(processor, pictures, [row["texts"].prompt], tensors=False)
    for key in TOKENS & whole.keys():
        assert list(whole[key][0]) == asked[key] == row[key][: len(asked[key])], key
    assert not asked.keys() - TOKENS - {"file", "texts"}


def test_a_chat_needs_a_chat_template(chats, loaded):
    _, processor = loaded("llava")
    row = TASK.encode(examples(chats)[1:2], Setting(processor, 128), labelled=True).rows[0]
    assert row["texts"].prompt == "<image><image>\nand which digits?\n"
    own = dataclasses.replace(TASK, template="{image}{text}")
    for task, hint in (TASK, "another backbone"), (own, "leave template out"):
        with pytest.raises(ConfigError, match="a chat has 3 messages") as error:
            encoded(chats, processor, task)
        assert error.value.hint == hint


def test_long_rows_are_refused_with_their_names(questions, loaded):
    _, processor = loaded("idefics3")
    short = dataclasses.replace(TASK, tokens=40)
    with pytest.raises(DataError, match="rows are longer than 40 tokens") as error:
        encoded(questions, processor, short)
    assert "0-0.png 'which digit?': " in error.value.offenders[0]
    assert "image-text-to-text(tokens=" in str(error.value.hint)
    with pytest.raises(DataError, match="longer than 30 tokens") as error:
        encoded(questions, processor, positions=30)
    assert "tokens=" not in str(error.value.hint), "more would not be read"
    assert TASK.limits(Setting(processor, 128)) == []


def test_pixels_scale_large_pictures_down(questions, loaded):
    _, processor = loaded("qwen2_vl")
    large = questions.parent / "large.png"
    Image.new("RGB", (64, 32)).save(large)
    small = dataclasses.replace(TASK, pixels=200)
    example = small.example([str(large), "what?"], DataOptions())
    assert example.decoded(small.decode).size == (20, 10)
    assert example.decoded(TASK.decode).size == (64, 32)
    setting = Setting(processor, 128)
    few, many = (t.encode([example], setting, labelled=False).lengths for t in (small, TASK))
    assert few < many
    assert example.decoded(dataclasses.replace(TASK, pixels=1).decode).size == (1, 1)


def test_backbones_of_another_kind_are_refused(loaded, questions):
    model, processor = loaded("llava")
    assert TASK.for_model(model) is TASK
    model.config.is_encoder_decoder = True
    with pytest.raises(ConfigError, match="a decoder of its own"):
        TASK.for_model(model)
    with pytest.raises(ConfigError, match="no image token"):
        encoded(questions, processor.tokenizer)
    with pytest.raises(ConfigError, match="no image token"):
        encoded(questions, media.image_processor())

    class Masked(type(processor)):
        def __call__(self, **options):
            made = super().__call__(**options)
            made["cross_attention_mask"] = [[[1]] * len(made["input_ids"][0])]
            return made

    processor.__class__ = Masked
    with pytest.raises(ConfigError, match="cross_attention_mask, with a value for each token"):
        encoded(questions, processor)
