"""A short run of the fuzzer, and any text as a spec or recipe."""

from __future__ import annotations

import fuzz
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapterhub.config.yaml import load_yaml
from adapterhub.errors import AdapterhubError
from adapterhub.methods.common.base import parse_methods
from adapterhub.tasks import parse_task
from tests.kit.selection import ALL

INPUTS = 800 if ALL else 280
METHODS = ("lora", "houlsby", "prompt", "bitfit")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of options that an import drops
def test_a_short_fuzzing_run_has_no_findings(tmp_path) -> None:
    outcomes, findings = fuzz.fuzz(tmp_path, seed=0, inputs=INPUTS, seconds=120, methods=METHODS)
    assert not findings, "\n".join(findings)
    assert len(outcomes) >= 11
    assert sum(counts.total() for counts in outcomes.values()) == INPUTS
    assert sum(counts["accepted"] for counts in outcomes.values()) >= INPUTS / 100
    assert len(set().union(*outcomes.values())) >= INPUTS / 12, "too few kinds of refusal"


@settings(max_examples=300 if ALL else 60)
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
