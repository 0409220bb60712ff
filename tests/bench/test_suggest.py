"""Which adapter to start from: a planted helper is found, and noise is not preferred."""

from collections.abc import Hashable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import adapterhub as ah
from adapterhub.bench import suggest as suggesting
from adapterhub.bench.suggest import Candidate, linear_probe
from adapterhub.data.examples import Example
from adapterhub.errors import DataError
from adapterhub.methods import METHODS
from adapterhub.tasks import parse_task
from tests.kit import tiny_models
from tests.kit.matrix import one_of_each_signature
from tests.kit.selection import cases_of, long_table

ROWS, WIDTH, NOISE = 120, 16, 3


def planted(
    monkeypatch: pytest.MonkeyPatch, seed: int, helper: float | None
) -> suggesting.Suggestion:
    """Suggest with planted features: adapters of noise, and perhaps one that helps."""
    random = np.random.default_rng(seed)
    labels = ["pos" if n % 3 else "neg" for n in range(ROWS)]
    sign = np.array([1.0 if label == "pos" else -1.0 for label in labels])[:, None]
    hidden = random.normal(size=(ROWS, WIDTH)) + 0.25 * sign

    def features(name: str | None) -> np.ndarray:
        if name is None:
            return hidden
        if helper is not None and name == f"candidate-{NOISE}":
            return hidden + helper * sign * (np.arange(WIDTH) == 0)
        mixed = hidden @ random.normal(size=(WIDTH, WIDTH)) * 0.3 + hidden
        return mixed + random.normal(size=hidden.shape) * 0.2

    def found(model: Any, encoded: Any, names: Sequence[str | None]) -> dict[Any, Any]:
        return {name: features(name) for name in names}

    monkeypatch.setattr(suggesting, "features_of", found)
    monkeypatch.setattr(suggesting, "load_folder", lambda *rest, **options: object())
    monkeypatch.setattr(suggesting, "detach", lambda model, name: None)
    examples = [Example(f"text {n}", label=label) for n, label in enumerate(labels)]
    encoded = SimpleNamespace(task=parse_task("classification"), examples=examples)
    names = [f"noise-{n}" for n in range(NOISE)] + ["helper"] * (helper is not None)
    candidates = [Candidate(name, Path(name)) for name in names]
    return suggesting.suggest(None, encoded, candidates)  # type: ignore[arg-type]


def test_a_planted_helper_is_found_among_noise_and_noise_is_not_preferred(monkeypatch):
    found = planted(monkeypatch, 0, helper=1.5)
    assert found.best == "helper"
    assert found.estimates[0].method == "helper"
    assert found.comparisons["helper"].verdict == "better"
    assert len(found.estimates) == NOISE + 1
    assert found.smallest is not None
    for seed in cases_of(range(4)):
        assert planted(monkeypatch, seed, helper=None).best is None, seed


def test_adapters_that_do_not_fit_are_left_out_and_the_model_is_as_before(tmp_path):
    labels = ["pos", "neg"] * 20
    examples = [Example(f"text {n}", label=label) for n, label in enumerate(labels)]
    encoded: Any = Rows(40)
    encoded.task, encoded.examples = parse_task("classification"), examples
    for name, seed in (("fits", 0), ("other", 1)):
        model = tiny_models.model("bert", seed=seed)
        ah.attach(model, "lora(rank=2)", name=name).save(tmp_path / name)
    model = tiny_models.model("bert").eval()
    before = model(**tiny_models.batch()).logits
    candidates = [Candidate(name, tmp_path / name) for name in ("fits", "other")]
    found = suggesting.suggest(model, encoded, candidates)
    assert [each.method for each in found.estimates] == ["fits"]
    assert "different backbone" in found.unusable["other"]
    assert found.bare.method == suggesting.BARE
    assert found.comparisons["fits"].verdict == "tied"  # B is zero: the same features
    assert found.best is None
    assert ah.adapters(model) == {}
    assert (model(**tiny_models.batch()).logits == before).all()


def data(rows: int, signal: float, seed: int = 0, width: int = 16) -> tuple[Any, list[str]]:
    random = np.random.default_rng(seed)
    labels = ["pos" if n % 2 else "neg" for n in range(rows)]
    features = random.normal(size=(rows, width)).astype(np.float32)
    features[:, 0] += signal * np.array([1 if label == "pos" else -1 for label in labels])
    return features, labels


def accuracy(files: Any) -> float:
    rows = [row for file in files for row in file.rows]
    return float(np.mean([row["label"] == row["prediction"] for row in rows]))


def test_signal_is_found_and_noise_is_not():
    """Of classes, and of numbers."""
    features, labels = data(300, 3.0)
    files = linear_probe(features, labels, range(300), "classes")
    assert len(files) == suggesting.REPEATS
    assert all([row["label"] for row in file.rows] == labels for file in files)
    assert accuracy(files) > 0.97
    features, labels = data(300, 0.0)
    assert 0.4 < accuracy(linear_probe(features, labels, range(300), "classes")) < 0.6
    numbers = [float(value) for value in 2 * features[:, 3] + 1]
    for file in linear_probe(features, numbers, range(300), "numbers"):
        predicted = [row["prediction"] for row in file.rows]
        assert np.corrcoef(predicted, numbers)[0, 1] > 0.99
        assert all(isinstance(value, float) for value in predicted)


def test_equal_texts_are_in_one_fold(monkeypatch):
    """Labels are noise, and each row occurs twice: a leak would let the probe look them up."""
    random = np.random.default_rng(0)
    features = np.repeat(random.normal(size=(60, 200)).astype(np.float32), 2, axis=0)
    labels = list(np.repeat([f"c{n % 2}" for n in random.permutation(60)], 2))
    groups: list[Hashable] = [n // 2 for n in range(120)]
    assert accuracy(linear_probe(features, labels, groups, "classes")) < 0.7
    folds = list(suggesting._folds(np.array(labels), groups, "classes", 0))
    assert len(folds) == suggesting.FOLDS
    for train, held in folds:
        assert not {groups[i] for i in train} & {groups[i] for i in held}


@pytest.mark.parametrize(
    ("labels", "kind"),
    [(["a", "b"] * 4, "classes"), (["a"] * 50, "classes"), (["a"] * 50 + ["b"] * 4, "classes"),
     ([1.0] * 9, "numbers")],
)  # fmt: skip
def test_too_few_rows_are_refused(labels, kind):
    features = np.zeros((len(labels), 3), dtype=np.float32)
    with pytest.raises(DataError, match="too few"):
        linear_probe(features, labels, range(len(labels)), kind)


class Rows:
    """Encoded rows of a tiny model, padded on the right."""

    def __init__(self, count: int = 5) -> None:
        self.rows = list(range(count))

    def batch(self, indices: Any) -> dict[str, torch.Tensor]:
        every = tiny_models.batch(rows=len(self.rows))
        mask = torch.ones_like(every["input_ids"])
        for row in self.rows:
            mask[row, mask.shape[1] - row % 6 :] = 0
        tensors = {"input_ids": every["input_ids"], "attention_mask": mask}
        return {name: tensor[list(indices)] for name, tensor in tensors.items()}


def by_hand(model: Any, rows: Rows) -> np.ndarray:
    """The mean of the last layer's states over each row's tokens, a row at a time."""
    means = []
    for number in rows.rows:
        batch = rows.batch([number])
        kept = int(batch["attention_mask"].sum())
        with torch.inference_mode():
            states = model(**batch, output_hidden_states=True).hidden_states[-1][0]
        states = states[-len(batch["attention_mask"][0]) :]
        means.append(states[:kept].mean(0).numpy())
    return np.stack(means)


@long_table("method", one_of_each_signature(), 4)
def test_each_adapter_has_the_features_that_it_has_alone(method):
    model, rows = tiny_models.model("bert").eval(), Rows()
    bare = by_hand(model, rows)
    expected: dict[str | None, np.ndarray] = {None: bare}
    for name, spec in (("one", METHODS[method].example()), ("two", "lora(rank=2)")):
        adapter = ah.attach(model, spec, name=name)
        adapter.head = None
        tiny_models.scramble(adapter)
        model.eval()
        expected[name] = by_hand(model, rows)
    found = suggesting.features_of(model, rows, [None, "one", "two"])  # type: ignore[arg-type]
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=2e-5, rtol=2e-5)
