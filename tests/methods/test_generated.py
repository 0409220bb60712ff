"""Fixed random numbers: a second program, in whole numbers of Python, computes the same."""

import dataclasses
import hashlib
import json
import re
from itertools import count, islice
from pathlib import Path

import pytest
import torch

import adapterhub as ah
from adapterhub.errors import MismatchError
from adapterhub.files.native import Saved, write_adapter
from adapterhub.methods import METHODS
from adapterhub.methods.common import generated
from adapterhub.methods.common.generated import normal, places, uniform, whole_numbers
from tests.kit import tiny_models

FORMAT = Path(__file__).parents[2] / "docs/reference/format.md"
MASK = (1 << 64) - 1


def stream(name, seed):
    """Yield the numbers of 64 bits, one at a time."""
    key = int.from_bytes(hashlib.sha256(f"{name}:{seed}".encode()).digest()[:8], "little")
    for i in count(1):
        z = (key + i * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


CASES = [("vera.encoder.0.attn.q.A", 0), ("shira.decoder.11.ffn.down", 7), ("é", -3)]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_a_second_program_computes_the_same(name, seed):
    expected = list(islice(stream(name, seed), 60))
    assert whole_numbers(name, seed, 60).tolist() == expected
    assert whole_numbers(name, seed, 5, start=55).tolist() == expected[55:]
    fractions = [(n >> 40) / (1 << 24) for n in expected]
    assert uniform(name, seed, (4, 15)).flatten().tolist() == [2 * f - 1 for f in fractions]
    sums = [sum(fractions[i : i + 12]) - 6 for i in range(0, 60, 12)]
    torch.testing.assert_close(normal(name, seed, (5,)), torch.tensor(sums), atol=0, rtol=1e-6)
    first = list(dict.fromkeys(n % 40 for n in expected))
    assert places(name, seed, 9, 40).tolist() == sorted(first[:9])
    assert places(name, seed, 31, 40).tolist() == sorted({*range(40)} - {*first[:9]})
    assert places(name, seed, 40, 40).tolist() == [*range(40)]
    order = sorted(range(60), key=expected.__getitem__)
    assert generated.shares(name, seed, 60, 7).tolist() == [i % 7 for i in order]


def test_the_documented_vectors():
    """docs/reference/format.md, for other programs."""
    text = FORMAT.read_text(encoding="utf-8")
    vectors = json.loads(re.search(r"```json\n(.*?)```", text, re.DOTALL)[1])
    assert len(vectors) >= 2
    for each in vectors:
        name, seed = each["name"], each["seed"]
        assert [f"{n:016x}" for n in islice(stream(name, seed), 3)] == each["numbers"]
        assert [f"{int(n):016x}" for n in whole_numbers(name, seed, 3)] == each["numbers"]
        assert uniform(name, seed, (3,)).tolist() == each["uniform"]
        assert normal(name, seed, (2,)).tolist() == pytest.approx(each["normal"], abs=1e-7)
        assert places(name, seed, 5, 1000).tolist() == each["places"]


@pytest.mark.parametrize(
    "spec", ["shira(places=largest)", "fourierft(coefficients=9, stored=true)"]
)
def test_places_of_a_file_must_be_inside_the_weight(spec, tmp_path):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, spec)
    tiny_models.scramble(adapter)
    expected = model(**tiny_models.batch()).logits
    imported = dict(adapter.saved_tensors())
    name = next(n for n in imported if n.endswith("places"))
    assert imported[name].dtype == torch.int64
    adapter.save(tmp_path / "a")
    adapter.detach()
    ah.load(model, tmp_path / "a")
    assert torch.equal(model(**tiny_models.batch()).logits, expected)
    ah.detach(model)
    for wrong in (-1, 1 << 40):
        places_ = imported[name].clone()
        places_[0] = wrong
        manifest, tensors = Saved.at(tmp_path / "a").read()
        bare = dataclasses.replace(manifest, tensors={}, files={})
        write_adapter(tmp_path / str(wrong), bare, tensors | {name: places_})
        with pytest.raises(MismatchError, match="places of the adapter"):
            ah.load(model, tmp_path / str(wrong))


def test_every_stored_place_has_a_limit():
    """A method with whole numbers in files says what they are below."""
    for name, cls in METHODS.items():
        if not hasattr(cls, "stored") and not hasattr(cls, "places"):
            continue
        adapter = ah.attach(tiny_models.model("bert"), cls.example())
        for placed in adapter.placed:
            whole = {n for n, b in placed.module.named_buffers() if not b.is_floating_point()}
            assert whole == generated.place_limits(placed.module).keys(), name
