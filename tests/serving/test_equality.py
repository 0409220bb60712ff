"""What the engine answers is what `predict --json` prints, in batches of many tasks and methods."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import adapterhub as ah
from adapterhub.inference.embed import embed
from adapterhub.serving import Engine
from adapterhub.serving.shared_backbone import SharedBody
from tests.kit import tiny_models
from tests.kit.server import (
    EXAMPLES,
    TEXTS,
    TaskExample,
    expected_answers,
    same_answer,
    write_adapter,
)

THREADS = 16


def wrong_answers(engine, expected, seed):
    """Ask for answers in a random order; return those that are wrong."""
    asked = [(folder, n) for folder, answers in expected.items() for n in range(len(answers))]
    random.Random(seed).shuffle(asked)
    inputs = {folder: example.inputs for folder, example in engine.examples.items()}
    futures = [(f, n, engine.submit(f, inputs[f][n])) for f, n in asked[: len(asked) // 4]]
    found = [(f, n, future.result(60)) for f, n, future in futures]
    return [(f, n, a, expected[f][n]) for f, n, a in found if not same_answer(a, expected[f][n])]


def test_every_task_and_method_in_mixed_batches_from_many_threads(adapters):
    expected = {f: expected_answers(f, example.inputs) for f, example in adapters.items()}
    with Engine(batch_tokens=256) as engine:
        engine.examples = adapters
        engine.pin(*adapters)
        with ThreadPoolExecutor(THREADS) as pool:
            wrong = list(pool.map(lambda n: wrong_answers(engine, expected, n), range(THREADS)))
        assert not [each for some in wrong for each in some]
        assert all(use.shared for use in engine.models())
        assert len({use.model for use in engine.models()}) == 1
        assert engine.counts["rows"] / engine.counts["batches"] > 3
        assert engine.counts["tokens"] / engine.counts["positions"] > 0.75


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("bitfit", "trains parameters"),
        ("full", "trains parameters"),
        ("head", ""),
        ("p_tuning(length=2)", ""),
        ("scalar-mix", ""),
        ("unipelt", ""),
        ("ia3", ""),
    ],
)
def test_other_methods(backbone, tmp_path, polite, method, why):
    folder = write_adapter(backbone, tmp_path / "other", method)
    expected, others = expected_answers(folder, TEXTS), expected_answers(polite, TEXTS)
    with Engine() as engine:
        mine, theirs = [], []
        for text in TEXTS:
            mine.append(engine.submit(folder, text))
            theirs.append(engine.submit(polite, text))
        assert same_answer([each.result(60) for each in mine], expected)
        assert same_answer([each.result(60) for each in theirs], others)
        use = next(use for use in engine.models() if use.reference == folder)
        assert use.shared == (not why)
        assert why in use.reason


def test_a_pooling_of_its_own(backbone, tmp_path, polite):
    example = TaskExample("regression", "regression")
    folder = write_adapter(backbone, tmp_path / "mean", example=example, pooling="mean")
    expected = expected_answers(folder, TEXTS)
    with Engine() as engine:
        futures = [engine.submit(each, text) for text in TEXTS for each in (folder, polite)]
        assert same_answer([each.result(60) for each in futures[::2]], expected)


def test_new_tokens_have_a_model_of_their_own(backbone, tmp_path, polite):
    model, _ = ah.load_backbone(
        str(backbone), task="classification", labels=["a", "b"], new_tokens=["wow"]
    )
    adapter = ah.attach(model, "lora(rank=2)", name="tokens")
    tiny_models.scramble(adapter)
    adapter.save(tmp_path / "tokens")
    texts = ("wow the movie", "the movie")
    expected = expected_answers(str(tmp_path / "tokens"), texts)
    with Engine() as engine:
        engine.pin(polite)
        found = [engine.submit(str(tmp_path / "tokens"), text).result(60) for text in texts]
        assert same_answer(found, expected)
        assert [use.reason for use in engine.models()] == ["", "it has new tokens"]


def test_tasks_that_generate_have_a_model_of_their_class(backbones, tmp_path):
    example = TaskExample("causal-lm(generate=true, new_tokens=4)", "causal-lm")
    folder = write_adapter(backbones("llama"), tmp_path / "writer", example=example)
    expected = expected_answers(folder, TEXTS[:3])
    with Engine() as engine:
        found = [engine.submit(folder, text) for text in TEXTS[:3]]
        assert same_answer([each.result(60) for each in found], expected)
        assert "needs more than the states" in engine.models()[0].reason


def test_a_decoder_shares_its_body_too(backbones, tmp_path):
    folders = [
        write_adapter(backbones("llama"), tmp_path / f"{n}", example=example, seed=n)
        for n, example in enumerate((EXAMPLES[0], EXAMPLES[1], EXAMPLES[5]))
    ]
    expected = [expected_answers(folder, TEXTS) for folder in folders]
    with Engine() as engine:
        futures = [[engine.submit(folder, text) for text in TEXTS] for folder in folders]
        assert same_answer([[f.result(60) for f in some] for some in futures], expected)
        assert all(use.shared for use in engine.models())


def test_the_backbone_without_an_adapter(backbone, polite):
    with Engine(str(backbone)) as engine:
        vectors = [engine.submit(None, text) for text in TEXTS]
        engine.submit(polite, "a plot").result(60)
        vectors.append(engine.submit(None, TEXTS[0]))
        found = [each.result(60)["vector"] for each in vectors]
        assert len({use.model for use in engine.models()}) == 1
    expected = embed(*ah.load_backbone(str(backbone)), [*TEXTS, TEXTS[0]])
    assert same_answer(found, expected.tolist())


def test_models_share_what_is_equal(backbone, tmp_path, polite):
    """All weights of the backbone are in memory once, however many classes need it."""
    others = [
        write_adapter(backbone, tmp_path / f"{n}", method, example)
        for n, (method, example) in enumerate([("bitfit", EXAMPLES[0]), ("bitfit", EXAMPLES[5])])
    ]
    with Engine() as engine:
        engine.pin(polite, *others)
        models = engine.adapters.models
        (body,) = models.bodies.values()
        (head,) = body.heads.values()
        of_classes = [each.model for each in models.classes.values()]
        assert len(of_classes) == 2
        own = {name: p.data_ptr() for name, p in body.model.named_parameters()}
        for model in (head.model, *of_classes):
            named = model.base_model.named_parameters()
            assert sum(own.get(name) == p.data_ptr() for name, p in named) >= 20


def test_rows_with_prompts_have_batches_of_their_own(backbone, tmp_path, polite, monkeypatch):
    """Else one row with 20 virtual tokens has 20 more computed for each row of its batch."""
    methods = {"prompt(length=20)": 20, "prompt(length=18)": 18, "prompt(length=3)": 3}
    folders = {
        write_adapter(backbone, tmp_path / str(length), method): length
        for method, length in methods.items()
    } | {polite: 0}
    expected = {folder: expected_answers(folder, TEXTS) for folder in folders}
    compute, together = SharedBody.compute, []

    def watched(self, asked):
        together.append({served.virtual for served, _ in asked})
        return compute(self, asked)

    monkeypatch.setattr(SharedBody, "compute", watched)
    with Engine(batch_tokens=256) as engine:
        engine.pin(*folders)
        free = threading.Event()
        engine._between_batches(lambda: free.wait(30))
        futures = {f: [engine.submit(f, text) for text in TEXTS] for f in folders}
        free.set()
        for folder, some in futures.items():
            assert same_answer([each.result(60) for each in some], expected[folder])
    assert all(each in ({0}, {3}) or each <= {18, 20} for each in together)
    assert {18, 20} in together


def test_an_adapter_on_another_one_has_a_model_of_its_own(backbone, tmp_path, polite):
    model, _ = ah.load_backbone(str(backbone), task="classification", labels=["a", "b"])
    ah.load(model, polite, name="below", frozen=True)
    adapter = ah.attach(model, "lora(rank=2)", name="above", on=["below"])
    tiny_models.scramble(adapter)
    adapter.save(tmp_path / "above")
    expected = expected_answers(str(tmp_path / "above"), TEXTS)
    with Engine() as engine:
        engine.pin(polite)
        found = [engine.submit(str(tmp_path / "above"), text) for text in TEXTS]
        assert same_answer([each.result(60) for each in found], expected)
        assert engine.models()[-1].reason == "it is on top of other adapters"
