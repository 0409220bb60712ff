"""Names of folders that are valid and distinct on every file system."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.errors import RegistryError
from adapterhub.registry.store import (
    backbone_folder,
    folder_of_id,
    is_backbone_folder,
    unportable,
)

WORDS = st.from_regex(r"[a-b_][a-b0.-]{0,3}", fullmatch=True)
IDS = st.one_of(
    WORDS,
    st.tuples(WORDS, WORDS).map("/".join),
    st.tuples(WORDS, st.sampled_from(["0123456789ab", "no-weights"])).map("--".join),
    st.tuples(WORDS, st.sampled_from(["0123456789ab", "no-weights"])).map("/".join),
)


def folder(backbone):
    try:
        return backbone_folder(backbone)
    except RegistryError:
        return None


@given(st.lists(IDS, max_size=30, unique=True))
def test_two_ids_never_have_the_same_folder(ids):
    folders = [name for each in ids if (name := folder(each)) is not None]
    assert len(set(folders)) == len(folders)
    assert all(is_backbone_folder(name) for name in folders if ".." not in name)


@pytest.mark.parametrize(
    "backbone",
    ["acme/bert", "gpt2", "sentence-transformers/all-MiniLM-L6-v2", "bert--0123456789ab"],
)
def test_ordinary_ids_are_accepted(backbone):
    assert backbone_folder(backbone) == folder_of_id(backbone) == backbone.replace("/", "--")


def test_an_ambiguous_id_names_the_other():
    with pytest.raises(RegistryError, match="share the folder 'a--b' with those of 'a/b'"):
        backbone_folder("a--b")


@pytest.mark.parametrize("name", ["con", "Con.txt", "lpt0", "x.", "x "])
def test_unportable_names(name):
    assert unportable(name)


@pytest.mark.parametrize("name", ["contract", "com", "com10", "a.con", "null", "v1"])
def test_portable_names(name):
    assert not unportable(name)
