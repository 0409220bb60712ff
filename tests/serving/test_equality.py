"""What the engine answers is what `predict --json` prints, for what shares a body or does not."""

import pytest

import adapterhub as ah
from adapterhub.serving import Engine
from tests.kit import server as kit
from tests.kit import tiny_models
from tests.kit.server import EXAMPLES, TEXTS


def with_tokens(backbone, folder):
    labels = {"labels": ["a", "b"], "new_tokens": ["wow"]}
    model, _ = ah.load_backbone(str(backbone), task="classification", **labels)
    return saved(ah.attach(model, "lora(rank=2)", name="tokens"), folder)


def on_another(backbone, folder):
    model, _ = ah.load_backbone(str(backbone), task="classification", labels=["a", "b"])
    ah.load(model, kit.write_adapter(backbone, folder / "below"), name="below", frozen=True)
    return saved(ah.attach(model, "lora(rank=2)", name="above", on=["below"]), folder / "above")


def saved(adapter, folder):
    tiny_models.scramble(adapter)
    adapter.save(folder)
    return str(folder)


def by(method, example=EXAMPLES[0], **options):
    """Return what writes an adapter of a method."""
    return lambda backbone, folder: kit.write_adapter(backbone, folder, method, example, **options)


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (by("full"), "trains parameters"),
        (by("head"), ""),
        (by("dora(rank=2)"), ""),
        (by("prefix(length=2)", EXAMPLES[1]), ""),
        (by("prompt(length=3)", EXAMPLES[2]), ""),
        (by("scalar-mix"), ""),
        (by("unipelt"), ""),
        (by("lora(rank=2)", EXAMPLES[3], pooling="mean"), ""),
        (with_tokens, "it has new tokens"),
        (on_another, "it is on top of other adapters"),
    ],
)
def test_an_adapter_shares_the_body_or_has_a_model_of_its_own(
    backbone, tmp_path, polite, write, why
):
    folder, texts = write(backbone, tmp_path / "other"), ("wow the movie", *TEXTS)
    expected, others = kit.expected_answers(folder, texts), kit.expected_answers(polite, texts)
    with Engine() as engine:
        engine.pin(polite)
        asked = [(engine.submit(folder, text), engine.submit(polite, text)) for text in texts]
        mine, theirs = ([each.result(60) for each in some] for some in zip(*asked, strict=True))
        assert kit.same_answer(mine, expected)
        assert kit.same_answer(theirs, others)
        use = next(use for use in engine.models() if use.reference == folder)
        assert use.shared == (not why)
        assert why in use.reason


def test_a_decoder_shares_its_body_too_but_not_for_texts(backbones, tmp_path):
    writer = kit.TaskExample("causal-lm(generate=true, new_tokens=4)", "causal-lm")
    folders = [
        kit.write_adapter(backbones("llama"), tmp_path / f"{n}", example=example, seed=n)
        for n, example in enumerate((EXAMPLES[0], EXAMPLES[1], EXAMPLES[5], writer))
    ]
    expected = [kit.expected_answers(folder, TEXTS) for folder in folders]
    with Engine() as engine:
        futures = [[engine.submit(folder, text) for text in TEXTS] for folder in folders]
        assert kit.same_answer([[f.result(60) for f in some] for some in futures], expected)
        uses = {use.reference: use for use in engine.models()}
        assert [uses[folder].shared for folder in folders] == [True, True, True, False]
        assert "needs more than the states" in uses[folders[3]].reason


def test_models_share_what_is_equal(backbone, tmp_path, polite):
    """All weights of the backbone are in memory once, however many classes need it."""
    others = [kit.write_adapter(backbone, tmp_path / f"{n}", "bitfit", EXAMPLES[n]) for n in (0, 5)]
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
