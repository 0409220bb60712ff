"""`adapterhub publish`, and who has signed: `key`, `sign`, `trust` and `verify`."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

import adapterhub as ah
from adapterhub import cli
from adapterhub.errors import AdapterhubError
from adapterhub.files.native import Saved, write_adapter
from adapterhub.files.signature import read_private_key, read_public_key
from tests.kit import registries


def test_the_next_step_is_printed(adapterhub, tmp_path):
    registries.write_sample(tmp_path / "made", task="image-to-text")
    folder = str(tmp_path / "made")
    code, out, err = adapterhub("publish", folder, "--registry", str(tmp_path / "a place"))
    assert (code, out.count("\n")) == (0, 1)
    option = f"--registry '{tmp_path / 'a place'}'"
    assert err == f'next: adapterhub predict polite@v1 {option} "a text"\n'
    code, out, err = adapterhub("publish", folder, "--json")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("score", "condition", "code", "says"),
    [
        (0.76, "accuracy >= best", 0, "may differ from those of polite@v1"),
        (0.75, "accuracy>=best", 0, ""),
        (0.75, "accuracy > best", 2, "accuracy 0.7500 is not > 0.7500 of polite@v1 (best)"),
        (0.71, "accuracy >= best", 2, "accuracy 0.7100 is not >= 0.7500 of polite@v1 (best)"),
        (0.71, "accuracy >= v1", 2, "0.7500 of polite@v1 (v1)"),
        (0.71, "accuracy >= final", 0, "no version of polite has the tag 'final' yet"),
        (0.71, "accuracy >= 0.7", 0, ""),
        (0.71, "accuracy < 0.7", 2, "accuracy 0.7100 is not < 0.7000"),
        (0.71, "f1 > best", 2, "accuracy"),
        (0.71, "accuracy = best", 2, "one of >= > <= <"),
    ],
)
def test_a_tag_is_guarded(adapterhub, tmp_path, score, condition, code, says):
    registries.write_sample(tmp_path / "old", 0, accuracy=0.75)
    registries.write_sample(tmp_path / "new", 1, accuracy=score)
    first = ("publish", str(tmp_path / "old"), "--tag", "best", "--if", "accuracy >= best")
    assert adapterhub(*first)[0] == 0, "nothing has the tag yet"
    found, _, err = adapterhub("publish", str(tmp_path / "new"), "--tag", "best", "--if", condition)
    assert found == code, err
    assert says in err
    versions = {entry.version: entry.tags for entry in ah.search(all_versions=True)}
    assert versions == ({"v1": ("best",)} if code else {"v1": (), "v2": ("best",)})


@pytest.mark.parametrize(("rows", "says"), [("0", None), ("1", "scored on other rows")])
def test_scores_of_the_same_rows_are_compared_without_a_note(tmp_path, rows, says):
    notes: list[str] = []
    for seed, digest in ((0, "0" * 64), (1, rows * 64)):
        folder = registries.write_sample(tmp_path / str(seed), seed, loss=0.5 - seed / 10)
        saved = Saved.at(folder)
        record = {"data": {"eval_sha256": digest}}
        manifest, tensors = saved.read()
        write_adapter(tmp_path / f"{seed}-of", replace(manifest, training=record), tensors)
        ah.publish(
            tmp_path / f"{seed}-of", tags=("best",), only_if="loss < best", note=notes.append
        )
    assert len(notes) == (1 if says is None else 2), notes
    assert says is None or says in notes[-1]


# Keys, signatures and whom to trust: `key`, `sign`, `trust`, `verify` and `publish --sign`.


@pytest.fixture
def key(typed, tmp_path):
    """Make a folder `runs/a` with an adapter, and a key `acme.key`; return what `key new` wrote."""
    registries.write_sample(tmp_path / "runs" / "a" / "adapter")
    return json.loads(typed("key new acme.key --json"))


def trusted(typed):
    return json.loads(typed("trust --json"))


def test_a_key_pair_is_created_and_shown(typed, key, tmp_path):
    assert (key["private"], key["public"]) == ("acme.key", "acme.pub")
    assert read_public_key(tmp_path / "acme.pub").text == key["key"]
    for file in ("acme.key", "acme.pub"):
        assert typed(f"key show {file}") == f"{key['key']} {key['id']}\n"
        assert json.loads(typed(f"key show {file} --json"))["id"] == key["id"]
    assert typed("key new other.key").startswith("other.key: the private key")


def test_a_passphrase_is_asked_for_and_not_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["key", "new", "acme.key", "--passphrase"]
    result = CliRunner().invoke(cli.group, words, input="secret words\nsecret words\n")
    assert result.exit_code == 0, result.output
    assert "secret" not in result.output
    assert read_private_key(tmp_path / "acme.key", lambda: "secret words")


def test_folders_versions_and_publications_are_signed(typed, key, tmp_path):
    sign = "sign runs/a --key acme.key"
    assert typed(sign).startswith("signed polite, sha256 ")
    assert (tmp_path / "runs" / "a" / "adapter" / "adapter.sig").is_file()
    typed("publish runs/a")
    statement = json.loads(typed("sign polite@v1 --key acme.key --json"))
    assert (statement["name"], statement["version"]) == ("polite", "v1")
    typed("publish runs/a --name signed --sign acme.key")
    typed("trust acme.pub")
    assert typed("pull signed --require-signature").strip()
    assert typed(f"{sign} --name rude --version 3").startswith("signed rude v3,")


def test_keys_are_trusted_listed_and_removed(typed, key):
    other = json.loads(typed("key new b.key --json"))
    assert typed("trust acme.pub") == f"trusted: key {key['id']}\n"
    typed(f"trust {other['key']}")
    assert trusted(typed)["trusted"] == sorted((key["key"], other["key"]))
    assert f"{key['key']} {key['id']}\n" in typed("trust")
    assert typed(f"trust --remove {key['id']}") == f"no longer trusted: key {key['id']}\n"
    with pytest.raises(AdapterhubError, match="no key"):
        typed("trust --remove acme.pub")
    assert typed("trust --remove b.pub") == f"no longer trusted: key {other['id']}\n"
    assert trusted(typed)["trusted"] == []
    for flag, required in (("--require-signatures", True), ("--no-require-signatures", False)):
        typed(f"trust {flag}")
        assert trusted(typed)["require"] is required


def test_mistakes_are_told_with_a_remedy(typed, key, tmp_path):
    for line, remedy in (
        ("trust acme.key", "acme.pub"),
        ("trust missing.pub", "missing"),
        ("trust --remove", "trust --remove KEY"),
        ("sign hf:acme/polite@v1 --key acme.key", "adapterhub push FOLDER hf:acme/polite --sign"),
    ):
        with pytest.raises(AdapterhubError) as error:
            typed(line)
        assert remedy in str(error.value)
    assert trusted(typed)["trusted"] == []
    (tmp_path / "acme.key").chmod(0o644)  # others can read it
    for line in ("sign runs/a --key acme.key", "publish runs/a --sign acme.key"):
        with pytest.raises(AdapterhubError, match=r"chmod 600 acme\.key"):
            typed(line)
    assert not (tmp_path / "registry").exists()


def test_verify_ends_with_whether_a_trusted_key_has_signed(typed, key, adapterhub, tmp_path):
    def verify():
        return adapterhub("verify", "runs/a")

    code, out, _ = verify()
    assert (code, out.splitlines()[1]) == (1, "no signature")
    typed("sign runs/a --key acme.key")
    code, out, _ = verify()
    assert (code, "for polite: valid, not trusted" in out) == (1, True)
    typed("trust acme.pub")
    code, out, _ = verify()
    assert (code, "for polite: valid, trusted" in out) == (0, True)
    (tmp_path / "runs" / "a" / "adapter" / "adapter.safetensors").write_bytes(b"x")
    assert verify()[0] == 2
    # A version, by another key
    other = json.loads(typed("key new other.key --json"))
    registries.write_sample(tmp_path / "runs" / "b" / "adapter")
    typed("publish runs/b --sign other.key")
    code, out, _ = adapterhub("verify", "polite")
    assert code == 1
    assert f"key {other['id']} for polite v1: valid, not trusted" in out
    facts = json.loads(adapterhub("verify", "polite", "--json")[1])
    assert (facts["reference"], facts["trusted"]) == ("polite@v1", False)
    (signature,) = facts["signatures"]
    assert (signature["valid"], signature["trusted"], signature["version"]) == (True, False, "v1")
