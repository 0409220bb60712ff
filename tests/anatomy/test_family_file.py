"""Rows as plain data: read strictly, and written so that they read back as equal rows."""

from __future__ import annotations

import every_type
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.anatomy import FAMILIES, Family, Stack
from adapterhub.anatomy.discovery import discover
from adapterhub.anatomy.family_file import family_data, family_yaml, read_family
from adapterhub.errors import ConfigError


def written(row, folder):
    path = folder / "row.yaml"
    path.write_text(family_yaml(row), "utf-8")
    return path


def test_a_row_survives_yaml(tmp_path):
    for architecture, row in FAMILIES.items():
        assert read_family(written(row, tmp_path)) == row, architecture
        assert read_family(family_data(row)) == row, architecture


@pytest.mark.parametrize("model_type", ["jamba", "clip", "persimmon", "gemma3n_text"])
def test_a_draft_survives_yaml(model_type, tmp_path):
    """Layers that differ, several stacks, parts that are not known, further projections."""
    row = discover(every_type.build(model_type, every_type.autos(model_type)[-1]))
    assert read_family(written(row, tmp_path)) == row


names = st.text("abcdefgh_.", min_size=1, max_size=8)
sites = st.dictionaries(st.sampled_from(["attn.q", "attn.qkv", "ffn.up", "mixer.in_proj"]), names)


@given(
    sites=sites,
    own=st.dictionaries(st.integers(0, 200), sites),
    norms=st.sampled_from([None, "pre", "post", "an_option"]),
    below=st.lists(names).map(tuple),
)
def test_any_row_survives_plain_data(sites, own, norms, below):
    fused = {"attn.qkv": "heads"} if "attn.qkv" in sites else {}
    stack = Stack("decoder", "layers", sites, fused=fused, norms=norms, own=own)
    row = Family(("new",), (stack,), below)
    assert read_family(family_data(row)) == row


def test_defaults_are_not_written():
    row = Family(("new",), (Stack("decoder", "layers", {"attn.q": "q"}),), ("emb",))
    assert family_data(row) == {
        "model_types": ["new"],
        "stacks": [{"name": "decoder", "layers": "layers", "sites": {"attn.q": "q"}}],
        "below": ["emb"],
    }


VALID = {
    "model_types": ["new"],
    "stacks": [{"name": "decoder", "layers": "layers", "sites": {"attn.qkv": "qkv"}}],
    "below": [],
}


def with_stack(**fields):
    return VALID | {"stacks": [VALID["stacks"][0] | fields]}


def test_what_is_wrong_with_a_row_is_said(subtests):
    cases = [
        (VALID | {"belov": []}, "did you mean 'below'"),
        ({k: v for k, v in VALID.items() if k != "below"}, "below is missing"),
        (with_stack(fusd={}), "did you mean 'fused'"),
        (with_stack(fused={"attn.qkv": "head"}), "did you mean 'heads'"),
        (with_stack(fused={"attn.qvk": "heads"}), "did you mean 'attn.qkv'"),
        (with_stack(sites={"attn.q": "q"}, fused={"attn.q": "heads"}), "only qkv and gate_up"),
        (with_stack(sites={"atn.q": "q"}), "did you mean 'attn.q'"),
        (with_stack(sites={"attn.q": 3}), "expected str"),
        (with_stack(own={"first": {}}), "own.first is not the number of a layer"),
        (VALID | {"stacks": []}, "stacks is empty"),
        (VALID | {"stacks": VALID["stacks"] * 2}, "two stacks are named 'decoder'"),
        (VALID | {"model_types": []}, "model_types is empty"),
        (VALID | {"stacks": "layers"}, "stacks is 'layers'"),
    ]
    for data, message in cases:
        with subtests.test(data=data):
            with pytest.raises(ConfigError) as error:
                read_family(data)
            assert message in str(error.value)


def test_all_problems_are_in_one_error():
    data = with_stack(sites={"atn.q": "q", "ffn.up": "up"}, fused={"ffn.up": "heads"})
    with pytest.raises(ConfigError) as error:
        read_family(data)
    assert len(error.value.offenders) == 2
