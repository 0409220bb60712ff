"""Several adapters at once: one model, each with its own head, the same predictions as alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from adapterhub.data.examples import Example
from adapterhub.errors import MismatchError
from adapterhub.files.native import Saved
from adapterhub.inference.open import AdapterSource, open_adapter, open_several
from tests.kit.data import sentences

EXAMPLES = [Example(text) for text, _ in sentences(20)]


def test_they_share_a_model_and_predict_as_alone(two_adapters: dict[str, AdapterSource]) -> None:
    opened = open_several(two_adapters)
    first, second = (opened.predictors[name] for name in two_adapters)
    assert first.model is second.model
    assert (len(first.setting.labels), len(second.setting.labels)) == (2, 6)
    for name in (*two_adapters, *two_adapters):  # and again, after the other one
        alone = open_adapter(two_adapters[name].reference).predict(EXAMPLES)
        together = opened.predict(name, EXAMPLES)
        for one, other in zip(alone, together, strict=True):
            assert one.as_dict()["label"] == other.as_dict()["label"]
            assert one.as_dict()["scores"] == pytest.approx(other.as_dict()["scores"], abs=1e-6)


def test_an_adapter_with_another_digest_is_refused(two_adapters: dict[str, AdapterSource]) -> None:
    source = two_adapters["mood"]
    digest = Saved.at(Path(source.reference) / "adapter").digest
    open_several({"mood": replace(source, digest=digest)})
    with pytest.raises(MismatchError, match="another adapter here"):
        open_several({"mood": replace(source, digest="0" * 64)})
