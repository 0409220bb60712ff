"""A short run of the fuzzer, and property tests of manifests, specs and tensor files."""

from __future__ import annotations

import copy
from typing import Any

import fuzz
import pytest
from forge import TENSORS, read_tree, sealed
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mutation import nodes

from adapterhub.config.yaml import load_yaml
from adapterhub.errors import AdapterhubError
from adapterhub.files.manifest import from_json, to_json
from adapterhub.files.native import Saved
from adapterhub.methods.common.base import parse_methods
from adapterhub.tasks import parse_task
from tests.kit.selection import ALL

INPUTS = 1200 if ALL else 400
METHODS = ("lora", "houlsby", "prompt", "bitfit")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of options that an import drops
def test_a_short_fuzzing_run_has_no_findings(tmp_path) -> None:
    outcomes, findings = fuzz.fuzz(tmp_path, seed=0, inputs=INPUTS, seconds=120, methods=METHODS)
    assert not findings, "\n".join(findings)
    assert len(outcomes) >= 13
    assert sum(counts.total() for counts in outcomes.values()) == INPUTS
    assert sum(counts["accepted"] for counts in outcomes.values()) >= INPUTS / 100
    assert len(set().union(*outcomes.values())) >= INPUTS / 12, "too few kinds of refusal"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=20),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=10), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
quick = settings(
    max_examples=300 if ALL else 60, suppress_health_check=list(HealthCheck), deadline=None
)


@quick
@given(data=st.data(), value=JSON)
def test_any_json_in_a_manifest_is_valid_or_refused(valid, data: st.DataObject, value: Any) -> None:
    tree = copy.deepcopy(read_tree(valid))
    holder, key = data.draw(st.sampled_from(list(nodes(tree))))
    holder[key] = value
    try:
        manifest = from_json(sealed(tree))
        assert from_json(to_json(manifest)) == manifest
        parse_methods(manifest.methods)
    except AdapterhubError as error:
        str(error).encode()


@quick
@given(text=st.text(max_size=60) | st.text("()[]{},='\"-+*#x1.: \n", max_size=60))
@example(text="lora)#")
@example(text="lora)+(x")
def test_any_text_as_a_spec_or_recipe_is_valid_or_refused(tmp_path_factory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for read, argument in ((parse_methods, text), (parse_task, text), (load_yaml, path)):
        try:
            read(argument)
        except AdapterhubError as error:
            str(error).encode()


@quick
@given(junk=st.binary(max_size=200), at=st.floats(0, 1))
def test_changed_bytes_of_a_safetensors_file_are_refused(
    saved, valid, junk: bytes, at: float
) -> None:
    data = (valid / TENSORS).read_bytes()
    start = int(at * len(data))
    changed = data[:start] + junk + data[start + len(junk) :]
    (saved / TENSORS).write_bytes(changed)
    if changed == data:
        Saved.at(saved).read()
        return
    with pytest.raises(AdapterhubError, match=r"sha256|bytes"):
        Saved.at(saved).read()
