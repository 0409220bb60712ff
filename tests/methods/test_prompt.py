"""Prompts: plain, computed by a network, bounded (CPT), and from a text, as cartridges are."""

import pytest
import torch
from torch.nn import functional as F

import adapterhub as ah
from adapterhub.errors import ConfigError, SiteError
from adapterhub.loop.engine import Engine
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.recipe import RunOptions
from tests.kit import tiny_models


def hidden(model, **inputs):
    with torch.no_grad():
        return model(**inputs).last_hidden_state


def test_the_stack_reads_the_prompt_and_the_tokens():
    """stack([P; E(tokens)]), without the outputs at the virtual tokens."""
    model = tiny_models.model("bert", "features")
    inputs = tiny_models.batch()
    inputs["attention_mask"][0, 6:] = 0
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    table = model.get_input_embeddings().weight.detach()
    adapter = ah.attach(model, "prompt(length=4)")
    (prompt,) = adapter.parameters()
    assert all(any(torch.equal(row, token) for token in table) for row in prompt.detach())
    tiny_models.scramble(adapter)
    output = hidden(model, **inputs)
    ah.activate(model)
    joined = torch.cat([prompt.detach().expand(3, -1, -1), embeddings], dim=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (4, 0), value=1)
    expected = hidden(model, inputs_embeds=joined, attention_mask=mask)[:, 4:]
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def attached(spec):
    adapter = ah.attach(tiny_models.model("bert", "features"), spec)
    tiny_models.scramble(adapter)
    tensors = {n.partition(".p-tuning.")[2]: t.detach() for n, t in adapter.tensors().items()}
    return adapter, adapter.placed[0].module, tensors


def linear(tensors, name, x):
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def test_the_mlp_encoder_is_its_equation():
    """h = W3 relu(W2 relu(W1 P))."""
    _, module, tensors = attached("p-tuning(length=4, middle=6)")
    middle = F.relu(linear(tensors, "head.0", tensors["prompt"]))
    expected = linear(tensors, "head.4", F.relu(linear(tensors, "head.2", middle)))
    torch.testing.assert_close(module().detach(), expected, atol=1e-5, rtol=1e-5)


def test_the_lstm_encoder_is_its_equation():
    """h = W2 relu(W1 LSTM(P)), with two bidirectional layers."""
    adapter, module, tensors = attached("p-tuning(length=4, middle=6, encoder=lstm)")
    lstm = torch.nn.LSTM(32, 6, num_layers=2, bidirectional=True)
    lstm.load_state_dict({n[5:]: t for n, t in tensors.items() if n.startswith("lstm.")})
    states, _ = lstm(tensors["prompt"])
    expected = linear(tensors, "head.2", F.relu(linear(tensors, "head.0", states)))
    torch.testing.assert_close(module().detach(), expected, atol=1e-5, rtol=1e-5)
    number = sum(t.numel() for t in tensors.values())
    assert adapter.count() == number == adapter.methods[0].count(adapter.anatomy)


IDS = [5, 6, 7, 8]


def started():
    """A CPT in an engine; the prompt starts at the embeddings of some tokens."""
    model = tiny_models.model("llama", "causal-lm", **tiny_models.NO_DROPOUT)
    adapter = ah.attach(model, "cpt(length=4, epsilon=0.4)")
    (placed,) = adapter.placed
    table = model.get_input_embeddings().weight.detach()
    assert all(any(torch.equal(row, token) for token in table) for row in placed.module.start)
    assert torch.equal(placed.module.prompt, placed.module.start)
    with torch.no_grad():
        for tensor in (placed.module.prompt, placed.module.start):
            tensor.copy_(table[IDS])
    options = RunOptions(
        learning_rate=0.02, weight_decay=0, max_grad_norm=0, warmup=0, schedule="constant", eps=1e-3
    )
    engine = Engine(AdapterTrainee(adapter), options)
    engine.begin(8)
    return model, adapter, placed.module, engine


def rows(seed):
    batch = tiny_models.batch(seed=seed)
    labels = batch["input_ids"].clone()
    labels[:, 0] = -100  # which peft would learn from the last virtual token
    return batch | {"labels": labels}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_its_steps_are_those_of_peft():
    peft = pytest.importorskip("peft")
    _, _, module, engine = started()
    base = tiny_models.model("llama", "causal-lm", **tiny_models.NO_DROPOUT)
    config = peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=IDS, opt_projection_format_epsilon=0.4
    )
    theirs = peft.get_peft_model(base, config)
    optimizer = torch.optim.AdamW(
        [p for p in theirs.parameters() if p.requires_grad], lr=0.02, weight_decay=0, eps=1e-3
    )
    encoder = theirs.prompt_encoder["default"]
    for seed in range(4):
        engine.step([rows(seed)], range(1), done=1.0)
        given = rows(seed)
        # Types of tokens, to which peft adds 1; multiples of 4 have labels.
        types = torch.full_like(given["labels"], 3)
        theirs(**given, input_type_mask=types).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        change = encoder.get_projection()
        torch.testing.assert_close(module.prompt - module.start, change, atol=1e-5, rtol=1e-4)


def test_its_files_are_those_of_a_prompt(tmp_path):
    model, adapter, module, engine = started()
    engine.step([rows(0)], range(1), done=1.0)
    adapter.save(tmp_path / "saved")
    again = tiny_models.model("llama", "causal-lm", **tiny_models.NO_DROPOUT)
    loaded = ah.load(again, tmp_path / "saved")
    assert [method.name for method in loaded.methods] == ["prompt"]
    (tensor,) = loaded.tensors().values()
    assert torch.equal(tensor, module.prompt)
    assert adapter.count() == 4 * 32 == loaded.count()
    with torch.no_grad():
        expected = model.eval()(**tiny_models.batch()).logits
        assert torch.equal(again.eval()(**tiny_models.batch()).logits, expected)


TEXT = "the movie was a good movie"


@pytest.fixture
def loaded(backbones):
    def load(architecture, task="causal-lm"):
        return ah.load_backbone(str(backbones(architecture)), task=task)

    return load


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("method", ["cartridge", "prefix"])
def test_at_first_it_computes_what_follows_the_text(loaded, architecture, method):
    model, tokenizer = loaded(architecture)
    text, rest = tokenizer(TEXT)["input_ids"], tokenizer("a good day")["input_ids"]
    expected, bare = logits(model, text + rest)[len(text) :], logits(model, rest)
    adapter = ah.attach(model, method, text=TEXT, length=len(text), positions=True)
    found = logits(model, rest)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, bare, atol=1e-2)
    assert adapter.methods[0].inference_form().text == ""


def test_the_first_tokens_of_a_longer_text_are_taken(loaded):
    model, tokenizer = loaded("llama")
    short = ah.attach(model, "cartridge", text=TEXT, length=3, name="short")
    whole = ah.attach(
        model, "cartridge", text=TEXT, length=len(tokenizer(TEXT)["input_ids"]), name="whole"
    )
    for few, all_ in zip(short.placed[1:], whole.placed[1:], strict=True):
        torch.testing.assert_close(few.module(), all_.module()[:, :3])


def test_frozen_tokens_do_not_train_and_are_saved(loaded, tmp_path):
    model, _ = loaded("llama")
    adapter = ah.attach(model, "cartridge", text=TEXT, length=4, frozen=2)
    before = {name: tensor.detach().clone() for name, tensor in adapter.tensors().items()}
    batch = tiny_models.batch()
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.1)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    for name, tensor in adapter.tensors().items():
        assert torch.equal(tensor, before[name]) == name.endswith(".first"), name
    live = logits(model, [9, 8, 7])
    adapter.save(tmp_path / "saved")
    adapter.detach()
    ah.load(model, tmp_path / "saved")
    assert torch.equal(logits(model, [9, 8, 7]), live)


def test_a_prompt_starts_from_the_embeddings_of_a_text(loaded):
    model, tokenizer = loaded("t5", "seq2seq")
    ids = tokenizer(TEXT)["input_ids"]
    adapter = ah.attach(model, "prompt", text=TEXT, length=len(ids) + 2)
    (rows,) = adapter.tensors().values()
    expected = model.get_input_embeddings()(torch.tensor([*ids, *ids[:2]]))
    assert torch.equal(rows, expected)


def test_the_tokenizer_may_be_given(backbones):
    _, tokenizer = ah.load_backbone(str(backbones("llama")), task="causal-lm")
    model = tiny_models.language_model("llama")
    with pytest.raises(ConfigError, match="tokenizer"):
        ah.attach(model, "cartridge", text=TEXT, length=3)
    ah.attach(model, "cartridge", text=TEXT, length=3, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("architecture", "method", "options", "error", "text"),
    [
        ("llama", "cartridge", {"length": 50}, ConfigError, "fewer than length=50"),
        ("llama", "prefix", {"length": 3, "reparametrize": True}, ConfigError, "network"),
        ("llama", "p-tuning", {}, ConfigError, "prompt"),
        ("bert", "prefix", {"length": 3}, SiteError, "cache"),  # an encoder has none
    ],
)
def test_texts_that_start_nothing_are_refused(loaded, architecture, method, options, error, text):
    model, _ = loaded(architecture, "masked-lm" if architecture == "bert" else "causal-lm")
    with pytest.raises(error, match=text):
        ah.attach(model, method, text=TEXT, **options)
