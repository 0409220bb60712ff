"""The checks that every adapter passes."""

from __future__ import annotations

import time

import pytest

from adapterhub.errors import RegistryError, SignatureError
from adapterhub.files.native import Saved, read_signatures
from adapterhub.files.signature import Statement, sign_statement
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.pull import fetch, fetch_folder
from adapterhub.registry.store import Publication, parse_reference
from adapterhub.registry.trust import check_copy, trust_key
from tests.kit import registries

POLITE = parse_reference("polite")


class LaterStore(LocalRegistry):
    """A store that keeps signatures apart, as a hub does."""

    later = ()
    is_offline = False

    def signatures(self, entry):
        if self.is_offline:
            raise RegistryError("unreachable")
        return self.later


@pytest.fixture
def store(tmp_path):
    store = LaterStore(tmp_path / "store")
    store.put(registries.write_sample(tmp_path / "made"), Publication("polite"))
    return store


@pytest.fixture
def entry(store):
    return store.resolve("polite")


def signed(entry, key):
    return sign_statement(Statement(entry.digest, "polite", "v1"), key)


def test_without_rules_no_signature_is_looked_for(store, entry):
    store.is_offline = True
    fetched = fetch(POLITE, store, entry)
    assert (fetched.digest, fetched.signers) == (entry.digest, ())
    assert fetch(POLITE, store, entry, find_signers=True).signers == ()


def test_later_signatures_count_and_go_with_the_copies(store, entry, key, tmp_path):
    registries.require_key(key)
    with pytest.raises(SignatureError):
        fetch(POLITE, store, entry)
    store.later = (signed(entry, key), sign_statement(Statement("1" * 64, "x"), key))
    fetched = fetch(POLITE, store, entry, tmp_path / "mine")
    assert fetched.folder == tmp_path / "mine"
    assert fetched.signers == (key.public.text,)
    assert read_signatures(tmp_path / "mine") == (signed(entry, key),)
    store.is_offline = True  # they are beside the manifest now
    fetch(POLITE, store, entry)


def test_a_required_signature_that_cannot_be_fetched_is_an_error(store, entry, key):
    registries.require_key(key)
    store.is_offline = True
    with pytest.raises(RegistryError, match="unreachable"):
        fetch(POLITE, store, entry)


def test_a_folder_is_bound_to_its_digest(tmp_path, key):
    folder = registries.write_sample(tmp_path / "run" / "adapter")
    assert fetch_folder(tmp_path / "run").saved == Saved.at(folder)
    trust_key(key.public)
    with pytest.raises(SignatureError, match=key.public.id):
        fetch_folder(tmp_path / "run", signed=True)
    statement = Statement(Saved.at(folder).digest, "of any name")
    store = LocalRegistry(tmp_path / "store")
    entry = store.put(folder, Publication("x"))
    store.add_signatures(entry, [sign_statement(statement, key)])
    fetched = fetch_folder(store.get(entry), signed=True)
    assert (fetched.digest, fetched.signers) == (entry.digest, (key.public.text,))


def test_a_copy_is_checked_by_its_name_and_version(store, entry, key, tmp_path):
    store.later = (signed(entry, key),)
    folder = fetch(POLITE, store, entry, tmp_path / "mine", find_signers=True).folder
    for text, signers in (("polite@v1", 1), ("polite@v2", 0), ("rude@v1", 0)):
        assert len(check_copy(parse_reference(text), folder, entry.digest, find=True)) == signers
    registries.require_key(key)
    with pytest.raises(SignatureError):
        check_copy(parse_reference("rude@v1"), folder, entry.digest, find=False)


def test_the_checks_cost_no_noticeable_time(store, entry):
    fetch(POLITE, store, entry)
    plain, checked = [], []
    for _ in range(20):
        start = time.process_time()
        store.get(entry)
        plain.append(time.process_time() - start)
        start = time.process_time()
        fetch(POLITE, store, entry)
        checked.append(time.process_time() - start)
    assert min(checked) - min(plain) < 0.005
