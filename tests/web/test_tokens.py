"""The file of tokens: digests only, changed under a lock, read again when it has changed."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from adapterhub.errors import ConfigError, FileError
from adapterhub.web import tokens
from adapterhub.web.tokens import TokenFile


@pytest.fixture
def file(tmp_path):
    return TokenFile(tmp_path / "folder" / "tokens.json")


def test_a_token_is_random_and_kept_as_its_digest(file):
    made = file.create("shop", ["predict", "admin"], ["team-*", "polite"])
    assert made.startswith("ah_")
    assert len(made) == len("ah_") + 43  # 32 bytes
    assert made != file.create("other", seconds=3600)
    text = file.path.read_text()
    assert made not in text
    assert made[3:] not in text
    known = file.check(made)
    assert (known.name, known.roles) == ("shop", ("predict", "admin"))
    assert known.adapters == ("team-*", "polite")
    if os.name != "nt":
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    late = file.create("late", seconds=1e-6)
    for text in ("", "ah_", made[:-1], f"{made}=", f" {made}", made.swapcase(), "ah_" + "A" * 43,
                 late):  # fmt: skip
        assert file.check(text) is None
    assert file.tokens()[1].expires > file.tokens()[1].created


def test_a_token_that_is_revoked_by_another_process_ends(file, monkeypatch):
    monkeypatch.setattr(tokens, "_LOOK_EVERY", 0.0)
    made, other = file.create("shop"), file.create("other")
    assert file.check(made)
    TokenFile(file.path).revoke("shop")
    assert file.check(made) is None
    assert file.check(other)
    file.path.unlink()
    assert file.check(other) is None


def test_a_file_that_cannot_be_read_makes_no_token_valid(file, monkeypatch):
    monkeypatch.setattr(tokens, "_LOOK_EVERY", 0.0)
    made = file.create("shop")
    data = json.loads(file.path.read_text())
    data["tokens"][0]["roles"] = ["root"]
    file.path.write_text(json.dumps(data))
    assert file.check(made) is None
    with pytest.raises(FileError, match="not a file of tokens"):
        file.tokens()


def test_the_last_use_is_noted_and_changes_of_others_stay(file):
    made = file.create("shop")
    assert file.check(made)
    TokenFile(file.path).create("other")
    file.note_uses()  # too early
    assert all(each.used is None for each in file.tokens())
    file.note_uses(at_once=True)
    shop, other = file.tokens()
    assert shop.used >= shop.created
    assert other.used is None


def test_tokens_that_cannot_be_made_or_ended(file):
    for name, roles, adapters in (
        ("two words", ["predict"], ["*"]),
        ("shop", ["root"], ["*"]),
        ("shop", ["predict"], ["a b"]),
    ):
        with pytest.raises(ConfigError, match="cannot be made"):
            file.create(name, roles, adapters)
        assert not file.path.exists()
    file.create("shop")
    with pytest.raises(ConfigError, match="there is a token with the name 'shop'"):
        file.create("shop")
    with pytest.raises(ConfigError, match="did you mean 'shop'"):
        file.revoke("shpo")


def test_many_writers_lose_nothing(file):
    names = [f"client-{n}" for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(file.create, names))
    assert {each.name for each in file.tokens()} == {*names}
