"""Attacks on signatures: forged, swapped, replayed, removed, and ways around the check."""

import importlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import click
import pytest
from forge import limited
from huggingface_hub import constants

import adapterhub as ah
from adapterhub import cli, errors
from adapterhub.files import signature
from adapterhub.files.native import SIGNATURE_FILE, Saved, read_signatures
from adapterhub.inference.open import load_for_merging, open_adapter
from adapterhub.inference.record import read_training_record
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.lockfile import pin, read_lock, sync, with_pins, write_lock
from adapterhub.registry.store import Publication
from adapterhub.registry.trust import require_signatures, trust_key
from tests.kit import fake_hub, registries

PACKAGE = Path(ah.__file__).parent


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """An empty registry of one's own, in an empty working directory."""
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return LocalRegistry(tmp_path / "registry")


@pytest.fixture
def hub(tmp_path, monkeypatch, registry):
    """A hub that `hf:` stands for."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with fake_hub.serving() as (hub, address):
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + template)
        hub.address = address
        yield hub


@pytest.fixture
def made(tmp_path):
    """Return a function from a seed to the folder of an adapter."""

    def folder_of(seed=0):
        folder = tmp_path / f"made-{seed}"
        return folder if folder.exists() else registries.write_sample(folder, seed)

    return folder_of


def version_folder(registry, version="v1", name="polite"):
    return registry.root / "acme--bert-small" / name / version


def write_signatures(folder, *signatures):
    (folder / SIGNATURE_FILE).write_bytes(signature.signatures_to_json(signatures))


# Every way to use an adapter


def synced(reference):
    lock = Path("adapterhub.lock")
    assert lock.exists(), "the pin is made before the attack"
    sync(read_lock(lock), Path("adapters"))


VERBS = {
    "pull": lambda model, reference: ah.pull(reference),
    "pull to": lambda model, reference: ah.pull(reference, "mine"),
    "load": ah.load,
    "load any": lambda model, reference: ah.load(model, reference, any_backbone=True),
    "pin": lambda model, reference: pin(reference),
    "sync": lambda model, reference: synced(reference),
    "open": lambda model, reference: open_adapter(reference),
    "merging": lambda model, reference: load_for_merging(reference),
    "record": lambda model, reference: read_training_record(reference),
}
LINES = {
    "pull": "pull {}",
    "show": "show {}",
    "predict": "predict {} text",
    "eval": "eval {} --data d.tsv",
    "merge": "merge {} --output out",
    "combine": "combine {} {} --output out",
    "convert": "convert {} --output out",
    "resize": "resize {} --rank 1 --output out",
    "diff": "diff {} {}",
    "export": "export {} --output out",
    "lock": "lock {}",
    "sync": "sync",
}
# These take an adapter, but neither load it nor hand out its files.
OTHERS = {"sign", "verify", "yank", "push", "tag", "delete"}


def test_every_command_that_takes_an_adapter_is_attacked():
    taking = set()
    for name in cli.COMMANDS:
        command = cli.group.get_command(
            click.Context(cli.group, **cli.group.context_settings), name
        )
        arguments = {p.name for p in command.params if isinstance(p, click.Argument)}
        if arguments & {"reference", "references", "source"}:
            taking.add(name)
    assert taking | {"sync"} == LINES.keys() | OTHERS


@pytest.fixture
def unsigned(registry, valid, key):
    """An adapter without a valid signature: none, or one of a stranger."""

    def publish(attack):
        registry.put(valid, Publication("polite"))
        name, pinned = pin("polite@v1")
        write_lock(Path("adapterhub.lock"), {name: pinned})
        if attack == "stranger":
            ah.sign("polite", registries.new_key())
        registries.require_key(key)

    return publish


@pytest.mark.parametrize("attack", ["none", "stranger"])
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_uses_an_adapter_without_a_trusted_signature(unsigned, model, verb, attack):
    unsigned(attack)
    with pytest.raises(errors.SignatureError, match="is not signed by a trusted key"):
        VERBS[verb](model, "polite")
    assert not Path("mine").exists()
    assert not Path("adapters").exists()


@pytest.mark.parametrize("command", LINES)
def test_no_command_uses_an_adapter_without_a_trusted_signature(unsigned, adapterhub, command):
    unsigned("stranger")
    code, out, err = adapterhub(*LINES[command].format("polite", "polite").split())
    assert (code, out) == (2, "")
    assert "is not signed by a trusted key" in err
    assert "adapterhub trust KEY" in err


FOLDER_VERBS = sorted(VERBS.keys() - {"pin", "sync", "load any"})
SWITCHES = [*((verb, "file") for verb in FOLDER_VERBS), ("pull", "variable")]


@pytest.mark.parametrize(
    ("verb", "switch"), [*SWITCHES, ("pull", "argument"), ("load", "argument")]
)
def test_with_the_general_switch_folders_must_be_signed_too(
    registry, made, model, key, verb, switch, monkeypatch
):
    trust_key(key.public)
    if switch == "file":
        require_signatures(True)
    elif switch == "variable":
        monkeypatch.setenv("ADAPTERHUB_REQUIRE_SIGNATURES", "1")
    options = {"signed": True} if switch == "argument" else {}
    act = {"pull": ah.pull, "load": lambda f, **o: ah.load(model, f, **o)}.get(verb)
    with pytest.raises(errors.SignatureError, match="signatures are required"):
        act(made(), **options) if act else VERBS[verb](model, made())


@pytest.mark.parametrize("command", LINES)
def test_the_option_covers_each_command(registry, made, adapterhub, command):
    registry.put(made(), Publication("polite"))
    place = "polite" if command == "lock" else made()
    name, *rest = LINES[command].format(place, place).split()
    if command == "sync":
        assert adapterhub("lock", "polite")[0] == 0
    for _ in range(2):  # the second sync finds its copies there
        code, _, err = adapterhub(name, "--require-signature", *rest)
        assert (code, "signatures are required" in err) == (2, True), err
        code, _, err = adapterhub(name, *rest)  # the option is for one command only
        assert "signatures are required" not in err


# Forged, swapped, replayed, removed


def signed(folder, key, **changes):
    """Sign the statement that these files are `polite`, or another one."""
    return signature.sign_statement(
        replace(signature.Statement(Saved.at(folder).digest, "polite", "v1"), **changes), key
    )


OTHER = {"digest": "0" * 64}
# By the reason of the refusal and what was signed: a function that makes the signature.
FORGED = {
    ("for other files", "another digest"): lambda f, key: signed(f, key, **OTHER),
    ("not for polite", "another name"): lambda f, key: signed(f, key, name="rude", version=None),
    ("for v2, not v1", "another version"): lambda f, key: signed(f, key, version="v2"),
    ("forged or damaged", "nothing"): lambda f, key: replace(signed(f, key), signature="A" * 86),
    ("forged or damaged", "by another key"): lambda f, key: replace(
        signed(f, registries.new_key()), key=key.public.text
    ),
    ("forged or damaged", "another statement"): lambda f, key: replace(
        signed(f, key, **OTHER), digest=Saved.at(f).digest
    ),
    # Such as another program might sign.
    ("forged or damaged", "the bare digest"): lambda f, key: replace(
        signed(f, key), signature=signature.base64_text(key.sign(Saved.at(f).digest.encode()))
    ),
}


@pytest.mark.parametrize(("reason", "what"), FORGED)
def test_a_signature_that_is_not_of_this_version_is_refused(registry, made, key, reason, what):
    registry.put(made(), Publication("polite"))
    folder = version_folder(registry)
    write_signatures(folder, FORGED[reason, what](folder, key))
    registries.require_key(key)
    with pytest.raises(errors.SignatureError, match=reason):
        ah.pull("polite")
    ah.sign("polite@v1", key)
    assert ah.pull("polite") == folder  # beside the bad one, a good one counts


def of_rude(path):
    """Put another adapter of the same signer in place of this one."""
    shutil.rmtree(path.parent)
    shutil.copytree(path.parents[2] / "rude" / "v1", path.parent)


def with_bytes(old, new):
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new))


def moved_to_a_link(path):
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


# By name: what happens to the file of signatures of a sound version, and the refusal.
TAMPERED = {
    "removed": (Path.unlink, errors.SignatureError, "no signature"),
    "passed off as another": (of_rude, errors.SignatureError, "not for polite"),
    "tensors": (
        lambda path: with_bytes(b"\0" * 4, b"\0\0\0\1")(path.with_name("adapter.safetensors")),
        errors.FileError, "damaged",
    ),
    "sparse": (lambda path: os.truncate(path, 1 << 40), errors.FileError, None),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-2]), errors.FileError, None),
    "pipe": (lambda path: (path.unlink(), os.mkfifo(path)), errors.FileError, None),
    "folder": (lambda path: (path.unlink(), path.mkdir()), errors.FileError, None),
    "link": (moved_to_a_link, errors.FileError, None),
}  # fmt: skip


@pytest.mark.parametrize("attack", TAMPERED)
def test_a_signed_version_that_was_tampered_with_is_refused(registry, made, key, attack):
    change, error, reason = TAMPERED[attack]
    for seed, name in enumerate(("polite", "rude")):
        ah.publish(made(seed), name, sign=key)
    registries.require_key(key)
    ah.pull("polite")
    change(version_folder(registry) / SIGNATURE_FILE)
    for act in (ah.pull, ah.verify) if not reason else (ah.pull,):
        with limited(), pytest.raises(error, match=reason) as caught:
            act("polite")
        assert len(str(caught.value)) < 2_000


def test_an_old_version_cannot_be_passed_off_as_a_new_one(hub, made, key):
    """A replay: the hub serves the signed v1 as v2, without having been seen before."""
    for seed in (0, 1):
        ah.push(made(seed), "hf:acme/polite", peft=False, sign=key)
    registries.require_key(key)
    repository = hub.repositories["acme/polite"]
    first = repository.tags["v2"] = repository.tags["v1"]
    for reference in ("hf:acme/polite", "hf:acme/polite@v2"):
        with pytest.raises(errors.SignatureError, match="for v1, not v2"):
            ah.pull(reference)
    ah.pull("hf:acme/polite@v1")
    # Without its version numbers, it cannot replay either.
    repository.tags.clear()
    repository.commits.append(next(c for c in repository.commits if c[0] == first))
    with pytest.raises(errors.SignatureError, match="the store gives no number"):
        ah.pull("hf:acme/polite")
    ah.pull(f"hf:acme/polite@{first}")  # this commit was asked for


@pytest.mark.parametrize("other", ["adapter", "another library's"])
def test_a_swap_after_the_check_is_noticed(registry, valid, model, key, monkeypatch, other):
    """The bytes that are loaded are those that were checked."""
    ah.publish(valid, "polite", sign=key)
    registries.require_key(key)
    loading = importlib.import_module("adapterhub.adapters.load")
    load_folder = loading.load_folder

    def swapped(model, saved, **options):
        if other == "adapter":
            shutil.rmtree(saved.folder)
            registries.write_sample(saved.folder, seed=9)
        else:
            (saved.folder / "adapter.json").unlink()
            (saved.folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        return load_folder(model, saved, **options)

    monkeypatch.setattr(loading, "load_folder", swapped)
    if other == "adapter":
        with pytest.raises(errors.FileError, match="is damaged"):
            ah.load(model, "polite")
    else:  # as the manifest says that was signed
        tensors = ah.load(model, "polite").saved_tensors()
        assert all(tensors[name].equal(value) for name, value in Saved.at(valid).tensors().items())


def test_another_librarys_adapter_is_refused_where_signatures_are_required(hub, made, model, key):
    """Also where a hub drops our files, and offers an adapter of peft instead."""
    ah.push(made(), "hf:acme/polite", peft=False, sign=key)
    files = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": b""}
    hub.repositories["acme/polite"].tags.clear()
    hub.repositories["acme/polite"].commit(files)
    Path("foreign").mkdir()
    Path("foreign/adapter_config.json").write_bytes(files["adapter_config.json"])
    registries.require_key(key)
    for act in (
        lambda: ah.pull("hf:acme/polite"),
        lambda: ah.pull("./foreign", signed=True),
        lambda: ah.load(model, Path("foreign"), signed=True),
    ):
        with pytest.raises(errors.SignatureError, match="cannot be signed"):
            act()


def test_many_signatures_of_strangers_do_not_crowd_out_the_right_one(hub, made, key):
    """A hub fills the file at the tag; the publisher's later signature is used nevertheless."""
    folder = made()
    strangers = [registries.new_key() for _ in range(8)]
    statement = signature.Statement(Saved.at(folder).digest, "polite")
    write_signatures(
        folder, *(signature.sign_statement(statement, stranger) for stranger in strangers)
    )
    ah.push(folder, "hf:acme/polite", peft=False)
    registries.require_key(key)
    with pytest.raises(errors.SignatureError):
        ah.pull("hf:acme/polite")
    (folder / SIGNATURE_FILE).unlink()
    ah.push(folder, "hf:acme/polite", peft=False, sign=key)
    ah.pull("hf:acme/polite", "mine")
    assert key.public.text in {s.key for s in read_signatures(Path("mine"))}
    assert ah.pull("./mine", signed=True) == Path("mine")


# Ways around the check


def test_no_spelling_of_a_place_evades_the_check(hub, made, key, monkeypatch):
    """Nor does a stranger's lock file, or a signature of our own of what a hub gives."""
    ah.push(made(), "hf:acme/polite", peft=False)
    pins = dict([pin("hf:acme/polite")])
    for name in ("Acme/Polite", "ACME/polite"):  # the Hub's names have no case
        hub.repositories[name] = hub.repositories["acme/polite"]
    address = hub.address
    registries.require_key(key)
    for reference in ("hf:acme/polite", "hf:Acme/Polite", f"{address}/acme/polite",
                      f"{address}/ACME/polite"):  # fmt: skip
        with pytest.raises(errors.SignatureError):
            ah.pull(reference)
    with pytest.raises(errors.AdapterhubError, match="--sign KEY"):
        ah.sign("hf:acme/polite@v1", key)
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")  # the pin has its own
    with pytest.raises(errors.SignatureError):
        sync(pins, Path("adapters"))
    assert not Path("adapters").exists()


@pytest.mark.parametrize("reference", ["hf:acme/polite", "{hub}/acme/polite"])
def test_a_folder_in_a_strangers_project_is_no_hub(hub, made, key, reference):
    """A cloned project contains a folder of this name."""
    text = reference.format(hub=hub.address)
    shutil.copytree(made(1), Path(text))
    assert Path(text).is_dir()
    ah.push(made(0), text, peft=False, sign=key)
    registries.require_key(key)
    assert Saved.at(ah.pull(text)).digest == Saved.at(made(0)).digest


def test_a_folder_in_a_strangers_project_is_no_trusted_adapter(
    registry, made, model, key, adapterhub
):
    """A cloned project contains a folder that is called as an adapter which is trusted."""
    registries.require_key(key)
    shutil.copytree(made(1), "polite/adapter")
    for command, line in LINES.items():
        code, out, err = adapterhub(*line.format("polite", "polite").split())
        assert (code, out) == (2, ""), command
        assert "has no adapter 'polite'" in err or command == "sync"
    for verb in sorted(VERBS.keys() - {"sync"}):
        with pytest.raises(errors.RegistryError, match="has no adapter 'polite'"):
            VERBS[verb](model, "polite")


def test_a_lock_file_never_means_a_folder(registry, made):
    """A project has a folder of the name that its lock file pins, and the registry has none."""
    registry.put(made(0), Publication("polite"))
    pins = dict([pin("polite")])
    shutil.rmtree(registry.root)
    for name in ("polite", "polite@v1"):
        shutil.copytree(made(1), f"{name}/adapter")
    with pytest.raises(errors.RegistryError, match="was locked"):
        sync(pins, Path("adapters"))
    with pytest.raises(errors.RegistryError, match="has no adapter 'polite'"):
        pin("polite")


def test_sync_refuses_a_missing_or_another_signer(registry, made, key):
    ah.publish(made(), "polite", sign=key)
    pins = dict([pin("polite")])
    assert pins["polite"].signer == key.public.text
    folder = version_folder(registry)
    for attack in ("removed", "stranger"):
        (folder / SIGNATURE_FILE).unlink()
        if attack == "stranger":
            ah.sign("polite", registries.new_key())
        with pytest.raises(errors.MismatchError, match=f"not signed by key {key.public.id}"):
            sync(pins, Path("adapters"))
        assert not Path("adapters").exists()
        ah.sign("polite", key)
    assert sync(pins, Path("adapters")) == ["polite"]
    assert sync(pins, Path("adapters")) == []
    (Path("adapters") / "polite" / SIGNATURE_FILE).unlink()
    with pytest.raises(errors.MismatchError, match="not signed by key"):
        sync(pins, Path("adapters"))
    ah.sign("adapters/polite", key)
    registries.require_key(registries.new_key())  # the signer of a lock file is no trusted key
    with pytest.raises(errors.SignatureError):
        sync(pins, Path("adapters"))


def test_a_new_version_of_another_signer_is_not_locked(registry, made, key):
    ah.publish(made(0), "polite", sign=key)
    pins = with_pins({}, [pin("polite")])
    ah.publish(made(1), "polite", sign=registries.new_key())
    with pytest.raises(errors.MismatchError, match="delete polite from the lock file"):
        with_pins(pins, [pin("polite", before=pins)])
    ah.publish(made(2), "polite")
    with pytest.raises(errors.MismatchError, match="no valid signature"):
        with_pins(pins, [pin("polite", before=pins)])
    ah.sign("polite@v2", key)  # of two signers, the one from before is recorded
    assert with_pins(pins, [pin("polite@v2", before=pins)])["polite"].signer == key.public.text


def test_a_lock_or_a_hub_that_goes_back_is_noticed(hub, made):
    for seed in (0, 1):
        ah.publish(made(seed), "polite")
        ah.push(made(seed), "hf:acme/polite", peft=False)
    with pytest.warns(UserWarning, match="goes back from polite@v2 to polite@v1"):
        with_pins(with_pins({}, [pin("polite")]), [pin("polite@v1")])
    pins = dict([pin("hf:acme/polite")])
    del hub.repositories["acme/polite"].tags["v2"]
    with pytest.raises(errors.AdapterhubError, match="has no version v2"):
        sync(pins, Path("adapters"))


# Keys


def test_no_private_key_is_published(hub, made, key, tmp_path):
    """Neither in a card, nor as a file beside the adapter."""
    folder = made()
    card = (folder / "README.md").read_text()
    for passphrase in (None, "secret"):
        signature.write_key_pair(tmp_path / f"{passphrase}.key", passphrase)
        (folder / "README.md").write_text((tmp_path / f"{passphrase}.key").read_text())
        with pytest.raises(errors.FileError, match="private key"):
            ah.push(folder, "hf:acme/polite", peft=False)
    assert "acme/polite" not in hub.repositories
    (folder / "README.md").write_text(card)
    (tmp_path / "None.key").rename(folder / "acme.key")
    ah.push(folder, "hf:acme/polite", peft=False, sign=key)
    names = {"README.md", "adapter.json", "adapter.safetensors", "adapter.sig", ".gitattributes"}
    assert hub.repositories["acme/polite"].commits[-1][1].keys() == names


def test_a_stale_signature_is_not_published(registry, made, key):
    folder = made()
    ah.sign(folder, key)
    with pytest.raises(errors.SignatureError, match="--sign KEY"):
        ah.publish(folder, "rude")
    with pytest.raises(errors.SignatureError, match="--sign KEY"):
        ah.publish(folder, listing=ah.Listing(license="mit"))
    entry = ah.publish(folder, "rude", sign=key)
    (found,) = read_signatures(version_folder(registry, name="rude"))
    assert found.statement == signature.Statement(entry.digest, "rude", "v1")
    assert json.loads((folder / SIGNATURE_FILE).read_bytes())["signatures"][0]["name"] == "polite"
