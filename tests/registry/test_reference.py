"""References, names of folders, and adapters near the working directory."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapterhub.errors import ConfigError, RegistryError
from adapterhub.registry import store
from adapterhub.registry.store import (
    Reference,
    backbone_folder,
    is_backbone_folder,
    parse_reference,
)
from tests.kit import registries

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True).filter(store.is_name)
VERSIONS = st.none() | NAMES


FORMS = {
    "./out/polite": Reference("folder", "./out/polite"),
    "../a@b": Reference("folder", "../a@b"),
    ".": Reference("folder", "."),
    "/srv/a b": Reference("folder", "/srv/a b"),
    "~/x": Reference("folder", "~/x"),
    "C:\\x": Reference("folder", "C:\\x"),
    "polite": Reference("local", "polite"),
    "polite@v2": Reference("local", "polite", "v2"),
    "hf:some/polite": Reference("hub", "some/polite"),
    "hf:some/polite@refs/pr/1": Reference("hub", "some/polite", "refs/pr/1"),
    "https://h.org/a/b@v1": Reference("server", "a/b", "v1", "https://h.org"),
    "http://127.0.0.1:8000/a/b": Reference("server", "a/b", None, "http://127.0.0.1:8000"),
}


HINTS = {
    "some/polite": "./some/polite for a folder, hf:some/polite for the Hub",
    "a/b/c": "./a/b/c for a folder",
    "": "expected",
    " polite": "expected",
    "polite@": "version",
    "polite@../x": "version",
    "hf:polite": "hf:owner/name",
    "hf:a/..": "hf:owner/name",
    "http://h.org/a/b": "https",
    "https://h.org/a": "https://host/owner/name",
    "https://me:secret@h.org/a/b": "more than a host",
    "https://h.org:x/a/b": "URL",
    "ftp://h.org/a/b": "https",
    "-polite": "letters",
}


def test_each_form_is_parsed_and_an_invalid_one_gives_a_hint():
    for text, reference in FORMS.items():
        assert parse_reference(text) == reference
        assert str(reference) == text
    for text, hint in HINTS.items():
        with pytest.raises(ConfigError) as caught:
            parse_reference(text)
        assert hint in str(caught.value), text
        assert "secret" not in str(caught.value)


@given(NAMES, NAMES, VERSIONS, st.sampled_from(["local", "hub", "server"]))
def test_round_trip(owner, name, version, place):
    full = name if place == "local" else f"{owner}/{name}"
    host = "https://h.org:8443" if place == "server" else None
    reference = Reference(place, full, version, host)
    assert parse_reference(str(reference)) == reference


@given(st.text(max_size=40))
def test_any_text_is_a_reference_or_an_error(text):
    with contextlib.suppress(ConfigError):
        assert str(parse_reference(text)) == text


# Names of folders that are valid and distinct on every file system.


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


def test_ordinary_ids_are_accepted_and_an_ambiguous_one_names_the_other():
    for backbone in ("acme/bert", "gpt2", "sentence-transformers/all-MiniLM-L6-v2",
                     "bert--0123456789ab"):  # fmt: skip
        assert (
            backbone_folder(backbone) == store.folder_of_id(backbone) == backbone.replace("/", "--")
        )
    with pytest.raises(RegistryError, match="share the folder 'a--b' with those of 'a/b'"):
        backbone_folder("a--b")
    assert all(map(store.unportable, ("con", "Con.txt", "lpt0", "x.", "x ")))
    assert not any(map(store.unportable, ("contract", "com", "com10", "a.con", "null", "v1")))


# Folders with an adapter near the working directory.


def test_folders_here_and_one_below_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("sst2", "runs/sst2/adapter", "runs/deep/sst2", ".hidden/sst2"):
        registries.write_sample(tmp_path / folder)
    (tmp_path / "out" / "sst2").mkdir(parents=True)
    assert store.nearby_adapters("sst2") == ["./sst2", "runs/sst2"]
    assert store.nearby_adapters("ssst2") == ["./sst2", "runs/sst2"]
    assert store.nearby_adapters("polite") == []


def test_a_folder_of_peft_is_to_be_imported(tmp_path, monkeypatch, adapterhub):
    """`predict ipl` after an import of `pl` that failed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pl").mkdir()
    (tmp_path / "pl" / "adapter_config.json").write_text("{}")
    code, _, err = adapterhub("predict", "ipl", "a good movie")
    assert code == 2
    assert "adapterhub import ./pl --output ipl" in err
    assert "publish ./pl" not in err
    registries.write_sample(tmp_path / "ips")
    assert "adapterhub publish ./ips" in adapterhub("predict", "ipss", "a good movie")[2]
