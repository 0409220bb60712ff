"""Texts that an engine writes: equal to `generate` alone, whatever else is written with them."""

import itertools
import shutil
import threading
from concurrent.futures import CancelledError
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import adapterhub as ah
from adapterhub.backbones.find import remember_folder
from adapterhub.backbones.load import load_backbone
from adapterhub.errors import ConfigError, DataError
from adapterhub.files.native import Saved
from adapterhub.inference.open import open_adapter
from adapterhub.registry.local import LocalRegistry
from adapterhub.serving import Engine, GenerationOptions
from adapterhub.serving.generation.continuous import ContinuousGenerator, PackedModel
from adapterhub.serving.generation.paged import PAGE
from adapterhub.serving.generation.request import GeneratedText, Piece, TextGeneration
from adapterhub.tasks.common import language_models
from adapterhub.web import errors
from tests.kit import server as kit
from tests.kit import tiny_models
from tests.kit.server import CAUSAL, LONG_PROMPT, PROMPTS, SEQ2SEQ

GREEDY = GenerationOptions(max_tokens=10, temperature=0)


@pytest.fixture(scope="session")
def writers(backbones, tmp_path_factory):
    """Write an adapter of each method on a tiny Llama."""
    return kit.write_writers(backbones("llama"), tmp_path_factory.mktemp("writers"))


@pytest.fixture(autouse=True)
def known_llama(backbones, writers, known_backbone):
    """Let the adapters find their backbone from the home of a test."""
    remember_folder(Saved.at(Path(writers[0])).manifest.backbone.id, backbones("llama"))


@pytest.fixture(scope="module")
def engine(backbones, writers):
    """Start an engine for the tests that count nothing and break nothing."""
    with Engine(str(backbones("llama"))) as engine:
        yield engine


@pytest.fixture
def fresh(backbones, writers):
    """Start an engine for one test."""
    with Engine(str(backbones("llama"))) as engine:
        yield engine


def ids_of(text):
    return [token.id for token in text.tokens]


def generator_of(engine):
    """Return the generator of packed steps of the only model."""
    (generator,) = engine._generators.continuous.values()
    assert isinstance(generator, ContinuousGenerator)
    return generator


def ask_all(engine, asked, options=GREEDY):
    """Return the tokens of several texts that are asked for at once."""
    running = [engine.generate(adapter, prompt, options) for adapter, prompt in asked]
    return [ids_of(each.result(60)) for each in running]


def long_text(writers, tokens):
    """Return an adapter and a prompt whose text has so many tokens, of several words."""
    for asked in itertools.product(writers, PROMPTS):
        written = kit.written_alone(*asked, tokens)
        if len(written) == tokens and len({*written[-6:]} - {0, 1, 2, 3, 4}) > 3:
            return asked
    raise AssertionError("no text is long enough")


def test_greedy_texts_of_eight_methods_and_of_none_are_those_of_generate(fresh, writers):
    asked = [(folder, prompt) for prompt in PROMPTS[:3] for folder in writers]
    expected = [kit.written_alone(folder, prompt, 10) for folder, prompt in asked]
    assert ask_all(fresh, asked) == expected
    assert len({str(each) for each in expected}) > 18
    assert 10 <= fresh.counts["steps"] < 30  # packed: far fewer than texts times tokens
    assert fresh.counts["texts"] == len(asked)
    assert not fresh._generators.batches
    model, tokenizer = load_backbone(fresh.adapters.models.backbone, task="causal-lm")
    bare = [kit.tokens_alone(model, tokenizer, prompt, 10) for prompt in PROMPTS]
    assert ask_all(fresh, [(None, prompt) for prompt in PROMPTS]) == bare
    mixed = ask_all(fresh, [(a, PROMPTS[0]) for a in (writers[0], None, writers[5])])
    assert mixed == [expected[0], bare[0], expected[5]]
    assert len({use.model for use in fresh.models() if use.reference}) == 1


# The prefix cache


def test_a_prompt_is_computed_once_for_each_adapter(fresh, writers):
    tokens = []
    for name in (writers[0], writers[0], writers[6], writers[6], writers[0], None, None):
        before = fresh.counts["step_tokens"]
        ask_all(fresh, [(name, LONG_PROMPT)], GenerationOptions(max_tokens=1, temperature=0))
        tokens.append(fresh.counts["step_tokens"] - before)
    first, again, prompted, prompted_again, *rest = tokens
    assert first > 2 * PAGE
    assert (again, rest) == (first % PAGE or PAGE, [again, first, again])
    assert prompted == first + 4
    assert prompted_again < PAGE
    # The first page of a short text ends in what was written: equal tokens of other adapters.
    options = GenerationOptions(max_tokens=2 * PAGE, temperature=0)
    for name in (writers[0], writers[1], writers[0]):
        assert ask_all(fresh, [(name, "a")], options) == [kit.written_alone(name, "a", 2 * PAGE)]


def test_a_new_version_shares_nothing_with_the_old_one(backbones, tmp_path):
    folders, llama = [], backbones("llama")
    for seed in (1, 2):
        folder = kit.write_adapter(llama, tmp_path / f"v{seed}", example=CAUSAL, seed=seed)
        ah.publish(folder, "writer", registry=tmp_path / "registry")
        folders.append(folder)
    store = LocalRegistry(tmp_path / "registry")
    store.tag(store.resolve("writer", "v1"), "stable")
    old, new = (kit.written_alone(folder, LONG_PROMPT, 10) for folder in folders)
    assert old != new
    with Engine(registry=tmp_path / "registry") as engine:
        assert ask_all(engine, [("writer@stable", LONG_PROMPT)]) == [old]
        begun = threading.Event()
        running = engine.generate("writer@stable", LONG_PROMPT, GREEDY)
        running.listen(lambda _: begun.wait(30), lambda _: None)  # it is computed still
        store.tag(store.resolve("writer", "v2"), "stable")
        refreshing = threading.Thread(target=engine.refresh)
        refreshing.start()
        begun.set()
        refreshing.join(60)
        assert ask_all(engine, [("writer@stable", LONG_PROMPT)]) == [new]
        assert ids_of(running.result(60)) == old
        assert running.reference == "writer@v1"
        engine._between_batches(lambda: None).result(60)
        assert {use.reference for use in engine.models()} == {"writer@v2"}
        both = [(f"writer@{version}", LONG_PROMPT) for version in ("v1", "2")]
        assert ask_all(engine, both) == [old, new]


# Options


def test_a_seed_gives_the_same_text_in_any_company(engine, writers):
    """Also while `submit` activates one adapter after the other on the model that writes."""
    options = GenerationOptions(max_tokens=12, seed=3, top_p=0.9)
    with kit.busy(engine):
        other = GenerationOptions(max_tokens=9)
        crowd = [engine.generate(a, p, other) for a in writers for p in PROMPTS[:2]]
        futures = [engine.submit(folder, PROMPTS[1]) for folder in writers[:3]]
        vectors = engine.submit(None, PROMPTS[0])
        together = engine.generate(writers[2], PROMPTS[0], options)
        greedy = engine.generate(writers[1], PROMPTS[0], GREEDY)
        other = engine.generate(writers[2], PROMPTS[0], GenerationOptions(max_tokens=12, seed=4))
    together = ids_of(together.result(60))
    assert all(each.result(60) for each in (*crowd, vectors))
    assert ids_of(greedy.result(60)) == kit.written_alone(writers[1], PROMPTS[0], 10)
    for folder, future in zip(writers[:3], futures, strict=True):
        written = str(open_adapter(folder).predict(PROMPTS[1]))
        assert future.result(60) == {"text": PROMPTS[1], "generated": written}
    alone = ask_all(engine, [(writers[2], PROMPTS[0])], options)
    assert alone == [together]
    assert ids_of(other.result(60)) != together


@pytest.mark.parametrize("chunks", [True, False])
def test_the_probabilities_of_a_prompt_are_those_of_one_pass(engine, writers, chunks, monkeypatch):
    """Of eight methods and none, in batches with others, also where the head is read in chunks."""
    if chunks:
        monkeypatch.setattr(language_models, "_WORTHWHILE", 1)
        monkeypatch.setattr(language_models, "_CHUNK", {"cpu": 100})  # numbers
    model, tokenizer = load_backbone(engine.adapters.models.backbone, task="causal-lm")
    models = {name: open_adapter(name).model for name in writers} | {None: model}
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS[:3]]
    steps = engine.counts["steps"]
    for tokens in (0, 3):
        options = GenerationOptions(max_tokens=tokens, temperature=0, prompt_logprobs=2, logprobs=1)
        asked = [(name, ids) for ids in prompts for name in models]
        running = [engine.generate(name, ids, options) for name, ids in asked]
        for (name, ids), each in zip(asked, running, strict=True):
            whole = each.result(60)
            with torch.no_grad():
                scores = models[name](torch.tensor([ids])).logits[0].log_softmax(-1)
            first, *others = each.prompt
            assert [first.id, *(token.id for token in others)] == ids
            assert (first.logprob, first.rank, first.alternatives) == (None, None, ())
            for place, token in enumerate(others):
                own, best = scores[place], scores[place].topk(2)
                assert token.logprob == pytest.approx(float(own[token.id]), abs=1e-4)
                assert token.rank == int((own > own[token.id]).sum()) + 1
                assert [i for i, *_ in token.alternatives] == best.indices.tolist()
                assert token.alternatives[0][2] == pytest.approx(float(best.values[0]), abs=1e-4)
            assert whole.completion_tokens <= tokens
            assert bool(whole.tokens) == bool(tokens)
            if tokens:
                assert whole.tokens[0].id == int(scores[-1].argmax())
    assert engine.counts["steps"] == steps  # no page of another prompt is read


def test_a_text_ends_at_its_stop_text_or_at_the_end_token_of_its_adapter(engine, writers, tmp_path):
    """That its training recorded; others in the batch do not end there."""
    adapter, prompt = long_text(writers, 10)
    written = kit.written_alone(adapter, prompt, 10)
    end = next(token for n, token in enumerate(written) if n > 2 and token not in written[:n])
    ends = trained_as(adapter, tmp_path / "ends", recipe={"task": "causal-lm"}, stops=[end])
    running = [engine.generate(each, prompt, GREEDY) for each in (adapter, ends)]
    whole, ended = (each.result(60) for each in running)
    assert ids_of(whole) == written
    assert ids_of(ended) == written[: written.index(end) + 1]
    assert len(ids_of(ended)) < len(written)
    assert (ended.finish_reason, ended.tokens[-1].text) == ("stop", "")
    words = whole.text.split()
    stop = f"{words[-3]} {words[-2]}"  # two tokens
    options = GenerationOptions(max_tokens=10, temperature=0, stop=(stop, "none of these"))
    generation = engine.generate(adapter, prompt, options)
    pieces = list(generation)
    text = generation.result(0)
    before = whole.text[: whole.text.index(stop)]
    assert text.text == "".join(piece.text for piece in pieces) == before
    assert text.finish_reason == "stop"
    assert text.completion_tokens < 10


def test_a_penalty_of_the_generation_config_counts(backbones, writers, tmp_path):
    folder = tmp_path / "llama"
    shutil.copytree(backbones("llama"), folder)
    model, tokenizer = load_backbone(str(folder), task="causal-lm")
    plain = kit.tokens_alone(model, tokenizer, PROMPTS[1], 10)
    model.generation_config.update(repetition_penalty=1.6, suppress_tokens=plain[:1])
    model.generation_config.save_pretrained(folder)
    expected = [kit.tokens_alone(model, tokenizer, prompt, 10) for prompt in PROMPTS]
    with Engine(str(folder)) as engine:
        assert ask_all(engine, [(None, prompt) for prompt in PROMPTS]) == expected
        assert engine.counts["steps"]
    assert expected[1] != plain


def test_chats_are_written_by_the_template(engine, writers, tmp_path):
    """Of the tokenizer, or of an adapter that was trained on one text."""
    chat = [{"role": "user", "content": "the movie was good"}]
    text = engine.generate(writers[0], chat, GREEDY).result(60)
    assert ids_of(text) == kit.written_alone(writers[0], chat, 10)
    assert text.prompt_tokens == 9
    more = [*chat, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "a plot"}]
    assert engine.generate(None, more, GREEDY).result(60).prompt_tokens == 18
    task = {"causal-lm": {"template": "the film : {text}", "new_tokens": 5}}
    folder = trained_as(writers[0], tmp_path / "templated", recipe={"task": task})
    text = engine.generate(folder, [{"role": "user", "content": "a plot"}]).result(60)
    assert text.prompt_tokens == 6
    assert text.completion_tokens <= 5  # as it was trained for
    with pytest.raises(ConfigError, match="a chat of 2 messages"):
        engine.generate(folder, chat * 2).result(60)


def trained_as(folder, copy, **training):
    """Copy an adapter with another record of its training; return the folder."""
    model, _ = load_backbone(str(open_adapter(folder).model.name_or_path), task="causal-lm")
    adapter = ah.load(model, folder)
    adapter.metadata.training = training
    adapter.save(copy)
    return str(copy)


# What goes wrong


def test_a_text_that_is_cancelled_frees_its_pages_within_a_step(fresh, writers):
    adapter, prompt = long_text(writers, 40)
    options = GenerationOptions(max_tokens=40, temperature=0)
    generation = fresh.generate(adapter, prompt, options)
    begun, ended = threading.Event(), []
    generation.listen(lambda _: begun.set(), ended.append)
    steps = []

    def cancel():
        begun.wait(30)
        generation.cancel()
        steps.append(fresh.counts["steps"])

    threading.Thread(target=cancel).start()
    with pytest.raises(CancelledError):
        generation.result(60)
    for _ in range(2):
        fresh._between_batches(lambda: None).result(30)
    assert fresh.counts["steps"] <= steps[0] + 1
    assert generator_of(fresh).steps.used_pages == 0
    assert not generator_of(fresh).busy
    assert fresh.counts["cancelled"] == 1
    assert isinstance(ended[0], CancelledError)
    after = (writers[5], PROMPTS[0])
    assert ask_all(fresh, [after]) == [kit.written_alone(*after, 10)]


def test_nan_in_an_adapter_ends_its_texts_alone(fresh, writers, backbones, tmp_path):
    broken = kit.write_adapter(backbones("llama"), tmp_path / "broken", example=CAUSAL, seed=5)
    fresh.pin(broken)
    (served,) = (each for each in fresh.adapters._by_name.values() if each.reference == broken)
    with torch.no_grad():
        for name, parameter in served.model.model.named_parameters():
            if served.name[:16] in name and ".1." in name:
                parameter.fill_(float("nan"))
        ah.adapters(served.model.model)[served.name].hold()  # once more, as it has changed
    asked = [(a, p) for p in PROMPTS[:3] for a in (writers[0], broken, writers[5], None)]
    running = [fresh.generate(a, p, GREEDY) for a, p in asked]
    for (adapter, prompt), generation in zip(asked, running, strict=True):
        if adapter == broken:
            with pytest.raises(errors.ComputationError, match="NaN"):
                generation.result(60)
        elif adapter:
            assert ids_of(generation.result(60)) == kit.written_alone(adapter, prompt, 10)
        else:
            assert generation.result(60)
    assert fresh.counts["errors"] == 3
    assert generator_of(fresh).steps.used_pages == 0


@pytest.mark.parametrize(
    ("error", "raised"), [(torch.OutOfMemoryError, errors.TooLargeError), (ValueError, ValueError)]
)
def test_a_step_that_fails_is_computed_text_by_text(fresh, writers, monkeypatch, error, raised):
    compute = PackedModel.logits

    def small(self, inputs, runs):
        if len(runs) > 1 or (runs[0].tokens > 20 and runs[0].adapter):
            raise error("by a test")
        return compute(self, inputs, runs)

    ask_all(fresh, [(a, PROMPTS[0]) for a in writers[:2]])  # both were tried
    monkeypatch.setattr(PackedModel, "logits", small)
    asked = [(writers[0], PROMPTS[0]), (writers[1], PROMPTS[1]), (writers[0], LONG_PROMPT)]
    *fine, large = [fresh.generate(a, p, GREEDY) for a, p in asked]
    expected = [kit.written_alone(a, p, 10) for a, p in asked[:2]]
    assert [ids_of(each.result(60)) for each in fine] == expected
    with pytest.raises(raised):
        large.result(60)


def test_prompts_and_adapters_that_cannot_be_written_from(engine, writers, polite):
    with pytest.raises(DataError, match=r"the prompt has 7\d tokens"):
        engine.generate(writers[0], "a " * 70, GREEDY).result(60)
    with pytest.raises(DataError, match="a prompt of the type dict"):
        engine.generate(writers[0], {"text": "a"}, GREEDY).result(60)
    assert engine.generate(writers[0], "a " * 60, GREEDY).result(60).completion_tokens == 3
    with Engine() as other:
        with pytest.raises(ConfigError, match="the backbone without an adapter"):
            other.generate(None, "a plot", GREEDY).result(60)
        with pytest.raises(ConfigError, match="does not generate texts"):
            other.generate(polite, "a plot", GREEDY).result(60)


@pytest.mark.parametrize("drain", [30, 0.05])
def test_closing_finishes_texts_in_time_or_fails_them(writers, drain):
    engine = Engine()
    engine.pin(writers[0])
    free = threading.Event()
    engine._between_batches(lambda: free.wait(30))
    running = [engine.generate(writers[0], prompt, GREEDY) for prompt in PROMPTS]
    threading.Timer(0.3, free.set).start()
    engine.close(drain_seconds=drain)
    for each in running:
        with nullcontext() if drain == 30 else pytest.raises(errors.StoppedError, match="before"):
            assert each.result(0 if drain == 30 else 30)
    with pytest.raises(errors.StoppedError):
        engine.generate(writers[0], PROMPTS[0])
    engine._thread.join(30)
    assert not engine._generators.busy


# A small cache


def test_texts_wait_for_the_cache_and_long_prompts_are_computed_in_parts(writers):
    """Some are begun, and computed again from their first token later."""
    asked = [(a, p) for p in (LONG_PROMPT, PROMPTS[4]) for a in writers[:6]]
    with Engine(cache_tokens=20 * PAGE, batch_tokens=24) as engine:
        found = ask_all(engine, asked, GenerationOptions(max_tokens=18, temperature=0))
        assert found == [kit.written_alone(a, p, 18) for a, p in asked]
        assert generator_of(engine).steps.used_pages == 0
    with Engine(cache_tokens=2 * PAGE) as small:
        running = small.generate(writers[0], LONG_PROMPT, GREEDY)
        with pytest.raises(errors.TooLargeError, match="does not fit into the cache"):
            running.result(60)


# Batches of `generate`


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_encoder_decoders_write(backbones, tmp_path, architecture):
    methods = ("lora(rank=2)", "prefix(length=3)")
    folders = kit.write_writers(backbones(architecture), tmp_path, methods, SEQ2SEQ)
    asked = [(folder, prompt) for prompt in PROMPTS for folder in folders]
    with Engine(str(backbones(architecture))) as engine:
        assert ask_all(engine, asked) == [kit.written_alone(a, p, 10) for a, p in asked]
        assert not engine.counts["steps"]
        sampled = GenerationOptions(max_tokens=8, seed=3)
        together = ask_all(engine, asked, sampled)
        assert ask_all(engine, asked[4:5], sampled) == together[4:5]
        assert len(ask_all(engine, [(None, PROMPTS[0])])[0]) == 10
        pieces = list(engine.generate(folders[0], PROMPTS[0], GREEDY))
        assert len(pieces) > 5


def test_adapters_that_change_shared_state_write_alone(backbones, tmp_path):
    """And one with new tokens, which its texts may have, on a model of its own."""
    methods = ("full", "norms", "unipelt", "lora(rank=2)")
    folders = kit.write_writers(backbones("llama"), tmp_path, methods)
    tokens = ("<x>", "<y>")
    model, tokenizer = load_backbone(str(backbones("llama")), task="causal-lm", new_tokens=tokens)
    adapter = ah.attach(model, "lora(rank=2)", name="new", tokenizer=tokenizer)
    tiny_models.scramble(adapter, seed=3)
    adapter.metadata.training = {"recipe": {"task": "causal-lm"}}
    adapter.save(tmp_path / "new")
    asked = [(folder, prompt) for prompt in PROMPTS[:3] for folder in folders]
    asked.append((str(tmp_path / "new"), "the <x> was <y>"))
    with Engine() as engine:
        assert ask_all(engine, asked) == [kit.written_alone(a, p, 10) for a, p in asked]
        assert engine.counts["steps"] > 5
        assert engine._generators.batches
        assert {use.reason for use in engine.models()} >= {"it has new tokens"}


def test_others_are_answered_between_the_steps_of_a_batch(backbones, tmp_path, polite):
    (folder,) = kit.write_writers(backbones("t5"), tmp_path, ("lora(rank=2)",), SEQ2SEQ)
    with Engine() as engine:
        engine.pin(folder, polite)
        begun, order = threading.Event(), []
        generation = engine.generate(folder, PROMPTS[0], GenerationOptions(max_tokens=40))

        def on_piece(piece):
            order.append("piece")
            if not begun.is_set():
                begun.set()
                engine.submit(polite, "a plot").add_done_callback(lambda _: order.append("answer"))

        generation.listen(on_piece, lambda _: order.append("end"))
        generation.result(60)
    assert order.index("answer") < order.index("end")


# What a client holds


def test_a_listener_gets_what_was_there_and_what_comes():
    """One that fails is not called again, and others do not notice."""
    generation, heard, calls, late = TextGeneration(), [], [], []

    def broken(piece):
        calls.append(piece)
        raise RuntimeError("the event loop is closed")  # of a client that has left

    first, second = Piece("a", ()), Piece("b", ())
    generation.listen(broken, broken)
    generation.deliver(first)
    generation.listen(heard.append, heard.append)
    assert heard == [first]
    with pytest.raises(TimeoutError):
        generation.result(0.01)
    generation.deliver(second)
    end = GeneratedText("ab", (), "stop", 1, 2)
    assert generation.finish(end)
    assert not generation.finish(ValueError())
    generation.deliver(Piece("late", ()))
    assert (heard, calls) == ([first, second, end], [first])
    generation.listen(late.append, late.append)
    assert late == heard
    assert list(generation) == [first, second]
    assert generation.result(0) is end
    cancelled = TextGeneration()
    cancelled.cancel()
    for read in (lambda: cancelled.result(0), lambda: list(cancelled)):
        with pytest.raises(CancelledError):
            read()


def test_requests_have_their_own_options(engine, writers):
    options = [
        GenerationOptions(max_tokens=3, temperature=0, logprobs=2),
        GenerationOptions(max_tokens=7, temperature=0),
        GenerationOptions(max_tokens=5, top_k=1, logprobs=0),
    ]
    running = [engine.generate(writers[0], PROMPTS[0], each) for each in options]
    texts = [each.result(60) for each in running]
    assert [text.completion_tokens for text in texts] == [3, 7, 5]
    assert {text.finish_reason for text in texts} == {"length"}
    assert ids_of(texts[0]) == ids_of(texts[1])[:3] == ids_of(texts[2])[:3]
    first = texts[0].tokens[0]
    assert first.alternatives[0] == (first.text.strip(), first.logprob)
    assert len(first.alternatives) == 2
    assert texts[1].tokens[0].logprob is None
    assert texts[2].tokens[0].logprob == pytest.approx(first.logprob, abs=1e-4)
    assert texts[0].prompt_tokens == 5
    assert 0 < texts[0].first_token_seconds <= texts[0].seconds
