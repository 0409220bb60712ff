"""Keys that are trusted, what they have signed, whether it is enough, and signing."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

import adapterhub as ah
from adapterhub.errors import ConfigError, FileError, RegistryError, SignatureError
from adapterhub.files.native import SIGNATURE_FILE, Saved, read_signatures
from adapterhub.files.signature import Statement, sign_statement
from adapterhub.registry import trust
from adapterhub.registry.store import Reference, parse_reference
from adapterhub.registry.trust import Trust, current_trust, signed_subject, trust_key, trust_path
from tests.kit import registries

DIGEST = "0" * 64


def is_required(**options):
    return current_trust(**options).required


def test_what_requires_signatures(monkeypatch, key):
    assert trust.read_trust() == current_trust() == Trust()
    trust_key(key.public)
    assert is_required(signed=True)
    with trust.requiring_signatures():
        assert current_trust() == Trust((key.public.text,), True)
    assert not is_required()
    trust.require_signatures(True)
    assert is_required()
    for value in ("0", "", "false"):  # the variable adds, it does not take away
        monkeypatch.setenv("ADAPTERHUB_REQUIRE_SIGNATURES", value)
        assert is_required()
    trust.require_signatures(False)
    for value in ("1", "true", "YES", "on"):
        monkeypatch.setenv("ADAPTERHUB_REQUIRE_SIGNATURES", value)
        assert is_required()
    monkeypatch.setenv("ADAPTERHUB_REQUIRE_SIGNATURES", "ture")
    with pytest.raises(ConfigError, match="ADAPTERHUB_REQUIRE_SIGNATURES is 'ture'"):
        is_required()


GOOD = "ed25519:vfF30CxvsAPDo-EYXl8H8N4CUnIY_9qLWk2Y_1pvVEM"


def trusting(*keys, **changes):
    return json.dumps({"version": 2, "trusted": keys, "require_signatures": False, **changes})


BROKEN = {
    "empty": "",
    "text": "none",
    "list": "[]",
    "no switch": '{"version": 2, "trusted": []}',
    "earlier": trusting(version=1),
    "namespaces": trusting(version=1, trusted={"hf:*": [GOOD]}),
    "later": trusting(version=3),
    "twice": '{"version": 2, "trusted": [], "trusted": [], "require_signatures": false}',
    "word": trusting(require_signatures="no"),
    "bad key": trusting("x"),
    "small order": trusting(f"ed25519:{'A' * 43}"),
    "unknown": trusting(more=1),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_never_means_that_nothing_is_required(kind):
    trust_path().parent.mkdir(parents=True)
    trust_path().write_text(BROKEN[kind])
    for act in (current_trust, lambda: trust_key(registries.new_key().public)):
        with pytest.raises(FileError):
            act()
    assert trust_path().read_text() == BROKEN[kind]


def test_a_file_that_is_named_must_exist_and_may_be_a_link(tmp_path, monkeypatch):
    link, real = tmp_path / "link.json", tmp_path / "real.json"
    monkeypatch.setenv("ADAPTERHUB_TRUST", str(link))
    for make in (lambda: None, lambda: link.symlink_to(real)):
        make()
        with pytest.raises(FileError, match=r"cannot be read: missing|ADAPTERHUB_TRUST"):
            current_trust()
    real.write_text(trusting())
    registries.require_key(registries.new_key())
    assert link.is_symlink()
    assert trust_path() == link
    assert is_required()
    link.unlink()
    registries.require_key(registries.new_key())  # writes it
    assert is_required()


def test_no_key_of_concurrent_writers_is_lost_and_their_number_is_limited(monkeypatch):
    keys = [registries.new_key() for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: trust_key(key.public), keys))
    assert set(trust.read_trust().keys) == {key.public.text for key in keys}
    monkeypatch.setattr(trust, "_MOST_KEYS", 8)
    with pytest.raises(ConfigError, match="too many"):
        trust_key(registries.new_key().public)


def is_valid(key, statement, subject):
    (checked,) = trust.checked_signatures([sign_statement(statement, key)], subject, Trust())
    return checked.is_valid


VERSIONS = [  # what is asked for, its version, the one of the statement, and whether it is valid
    ("hf:acme/x", "v3", "v3", True),
    ("hf:acme/x", "v3", None, True),
    ("hf:acme/x", "v2", "v3", False),
    ("hf:acme/x@best", "v2", "v3", False),
    ("hf:acme/x@3", "v3", "v3", True),
    ("hf:acme/x@main", "a" * 40, "v3", True),
    ("hf:acme/x", "a" * 40, "v3", False),
    ("hf:acme/x", "a" * 40, None, True),
]


@pytest.mark.parametrize(("asked", "version", "stated", "valid"), VERSIONS)
def test_the_version_is_compared_where_it_can_be(key, asked, version, stated, valid):
    subject = signed_subject(parse_reference(asked), DIGEST, "acme/x", version)
    assert is_valid(key, Statement(DIGEST, "x", stated), subject) == valid
    folder = trust.SignedSubject(parse_reference("./x"), DIGEST)  # which has no name
    assert is_valid(key, Statement(DIGEST, "anything", stated), folder)
    assert not is_valid(key, Statement("1" * 64, "anything"), folder)


def test_names_are_compared_as_far_as_both_go():
    for stated, name in (("polite", "polite"), ("Polite", "polite"), ("polite", "acme/polite"),
                         ("acme/polite", "polite"), ("acme/polite", "Acme/Polite")):  # fmt: skip
        assert trust.same_name(stated, name)
    for stated, name in (("acme/polite", "other/polite"), ("polite", "acme/rude"),
                         ("acme", "acme/polite"), ("polit\u0435", "polite")):  # fmt: skip
        assert not trust.same_name(stated, name)


def test_trusted_signatures_come_first(key):
    subject = signed_subject(parse_reference("hf:acme/x"), DIGEST, "acme/x", "v1")
    strangers = [registries.new_key() for _ in range(3)]
    wrong = sign_statement(Statement("1" * 64, "x"), key)
    signatures = [wrong, *(sign_statement(Statement(DIGEST, "x"), k) for k in (*strangers, key))]
    trusted = Trust((key.public.text,), True)
    checked = trust.checked_signatures(signatures, subject, trusted)
    assert checked[0].signature.key == key.public.text
    assert [c.is_valid for c in checked] == [True] * 4 + [False]
    assert trust.check_enough(checked, subject, trusted)[0] == key.public.text
    with pytest.raises(SignatureError, match=key.public.id):  # one of a stranger, one invalid
        trust.check_enough(checked[1:], subject, trusted)
    assert str(checked[0]) == f"key {key.public.id} for x: valid, trusted"


@pytest.mark.parametrize("reference", ["hf:acme/x", "https://h.org/acme/x@v1", "x", "./x"])
def test_the_error_says_what_to_type(reference):
    subject = trust.SignedSubject(parse_reference(reference), DIGEST)
    with pytest.raises(SignatureError, match="adapterhub trust KEY") as error:
        trust.check_enough([], subject, Trust((), True))
    assert "no signature" in str(error.value)
    assert trust.check_enough([], subject, Trust()) == ()


# `ah.sign`, and signing on publication.


@pytest.fixture
def folder(tmp_path):
    return registries.write_sample(tmp_path / "run" / "adapter")


@pytest.fixture
def registry(tmp_path):
    return tmp_path / "registry"


def statements(folder):
    return {signature.statement for signature in read_signatures(folder)}


def test_a_folder_is_signed_by_its_own_name_or_another(folder, key):
    digest, before = Saved.at(folder).digest, {p.name: p.read_bytes() for p in folder.iterdir()}
    assert ah.sign(folder.parent, key).statement == Statement(digest, "polite")
    ah.sign(folder, key, name="acme/polite", version="3")
    data = (folder / SIGNATURE_FILE).read_bytes()
    ah.sign(folder, key)
    assert (folder / SIGNATURE_FILE).read_bytes() == data
    assert statements(folder) == {
        Statement(digest, "polite"),
        Statement(digest, "acme/polite", "v3"),
    }
    assert {n: (folder / n).read_bytes() for n in before} == before
    with pytest.raises(ConfigError, match="best"):
        ah.sign(folder, key, version="best")


def test_signatures_of_other_files_are_removed_and_damage_is_not_signed(folder, key, tmp_path):
    ah.sign(folder, key)
    other = registries.write_sample(tmp_path / "other", 1)
    (folder / SIGNATURE_FILE).rename(other / SIGNATURE_FILE)
    ah.sign(other, key)
    assert statements(other) == {Statement(Saved.at(other).digest, "polite")}
    path = folder / "adapter.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(FileError):
        ah.sign(folder, key)
    assert not (folder / SIGNATURE_FILE).exists()


def test_the_signature_of_a_folder_goes_with_it_and_later_ones_are_added(folder, key, registry):
    ah.sign(folder, key, version="v7")
    entry = ah.publish(folder, registry=registry)
    assert entry.version == "v7"
    assert len(read_signatures(ah.pull("polite@v7", registry=registry))) == 1
    assert ah.publish(folder, sign=key, registry=registry) == entry
    assert ah.publish(folder, sign=registries.new_key(), registry=registry) == entry
    assert len(read_signatures(ah.pull("polite", registry=registry))) == 2


def test_a_version_on_a_hub_is_signed_in_its_commit_or_later(hub, folder, key, tmp_path):
    reference = f"{hub.address}/acme/polite"
    made = registries.write_sample(tmp_path / "signed", 7)
    signed = ah.push(made, f"{hub.address}/acme/signed", peft=False, sign=key)
    assert len(hub.repositories["acme/signed"].commits) == 2  # the first is empty
    copy = ah.pull(f"{hub.address}/acme/signed", tmp_path / "mine")
    assert statements(copy) == {Statement(signed.digest, "acme/signed", "v1")}
    first = ah.push(folder, reference, peft=False)
    ah.push(registries.write_sample(tmp_path / "next", 1), reference, peft=False)
    tags = dict(hub.repositories["acme/polite"].tags)
    assert ah.push(folder, reference, peft=False, sign=key).version == "v1"
    assert hub.repositories["acme/polite"].tags == tags
    (checked,) = ah.verify(f"{reference}@v1").signatures
    assert checked.is_valid
    assert checked.signature.statement == Statement(first.digest, "acme/polite", "v1")
    assert ah.verify(reference).signatures == ()


@pytest.mark.parametrize("deleted", [("v2",), ("v1", "v2")])
def test_publication_states_name_and_version_also_after_a_deletion(
    key, registry, tmp_path, deleted
):
    for seed in (1, 2, 3):
        made = registries.write_sample(tmp_path / f"made-{seed}", seed)
        if seed == 3:
            for version in deleted:
                ah.delete(f"rude@{version}", registry=registry)
        entry = ah.publish(made, "rude", sign=key, tags=("best",), registry=registry)
        assert (entry.version, entry.tags) == (f"v{seed}", ("best",))
        stored = ah.pull("rude", registry=registry)
        assert statements(stored) == {Statement(entry.digest, "rude", entry.version)}
        assert not (made / SIGNATURE_FILE).exists()
    licensed = ah.Listing(license="mit")
    entry = ah.publish(made, "rude", sign=key, listing=licensed, registry=registry)
    assert statements(ah.pull("rude", registry=registry)) == {Statement(entry.digest, "rude", "v4")}
    other = registries.write_sample(tmp_path / "other", 4)
    with pytest.raises(RegistryError, match="highest version so far is v4"):
        ah.publish(other, "rude", version="v2", sign=key, registry=registry)


# `ah.verify`.


def test_what_is_beside_an_adapter_is_verified_and_nothing_is_required(key, tmp_path):
    """The command is there to find out why an adapter is refused."""
    folder = registries.write_sample(tmp_path / "run" / "adapter")
    assert trust.signatures_beside(Reference("folder", str(folder)), Saved.at(folder)) == []
    entry = ah.publish(folder, registry=tmp_path / "r", sign=registries.new_key())
    files = ah.pull("polite", registry=tmp_path / "r")
    beside = trust.signatures_beside(Reference("local", "polite"), Saved.at(files), entry)
    assert [(c.is_valid, c.is_trusted) for c in beside] == [(True, False)]
    registries.require_key(key)
    found = ah.verify("polite", registry=tmp_path / "r")
    assert not found.is_trusted
    assert [str(c).rpartition(": ")[2] for c in found.signatures] == ["valid, not trusted"]


def test_another_librarys_adapter_cannot_be_signed(hub):
    files = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": b""}
    hub.add("acme/x", files)
    with pytest.raises(FileError, match="cannot be signed"):
        ah.verify(f"{hub.address}/acme/x")
