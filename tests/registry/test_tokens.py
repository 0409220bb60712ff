"""A token belongs to one origin, and its file to one user."""

import base64
import os
import stat

import pytest
from huggingface_hub import constants

from adapterhub.errors import ConfigError, FileError
from adapterhub.registry.tokens import echoes, login, logout, token_for

HUB = "https://hub.example.org"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_endpoint")
    monkeypatch.delenv("ADAPTERHUB_TOKENS", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    return tmp_path / "adapterhub"


OWNERS = {
    "https://huggingface.co": "hf_of_the_endpoint",
    "https://HUGGINGFACE.co:443/some/name": "hf_of_the_endpoint",
    **dict.fromkeys(("http://huggingface.co", "https://huggingface.co:8443", HUB,
                     "https://huggingface.co.example.org", "https://www.huggingface.co")),
}  # fmt: skip


def test_the_token_of_huggingface_hub_belongs_to_its_endpoint(monkeypatch):
    assert {url: token_for(url) for url in OWNERS} == OWNERS
    monkeypatch.setattr(constants, "ENDPOINT", f"{HUB}/mirror")
    assert token_for(HUB) == "hf_of_the_endpoint"
    assert token_for("https://huggingface.co") is None
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    assert token_for(HUB) is None


def test_a_stored_token_is_for_its_origin_alone(home):
    assert login(f"{HUB}/", "token-of-the-hub") == HUB
    assert token_for(f"{HUB}/owner/name") == "token-of-the-hub"
    for other in ("https://example.org", f"{HUB}.example.org", f"{HUB}:8443", "http://localhost"):
        assert token_for(other) is None
    logout(HUB)
    assert token_for(HUB) is None


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_the_file_is_for_the_user_alone(home):
    old = os.umask(0)
    try:
        login(HUB, "token-of-the-hub")
        login("https://two.example.org", "another-token")
    finally:
        os.umask(old)
    (file,) = home.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_the_environment_precedes_the_file(monkeypatch):
    login(HUB, "token-of-the-hub")
    monkeypatch.setenv("ADAPTERHUB_TOKENS", f"{HUB}=from-ci-1=2 https://b.org=from-ci-2")
    assert token_for(HUB) == "from-ci-1=2"
    assert token_for("https://b.org") == "from-ci-2"
    for wrong in ("secret-token", f"{HUB}=short", "hub.example.org=from-ci-1", f"{HUB}="):
        monkeypatch.setenv("ADAPTERHUB_TOKENS", wrong)
        with pytest.raises(ConfigError) as caught:
            token_for(HUB)
        assert "secret-token" not in str(caught.value)


def test_a_text_that_is_no_token_and_a_url_without_encryption_are_refused(home):
    for token in ("", "short", "with a space", "a\nline-break", "ünïcode-token"):
        with pytest.raises(ConfigError, match="not a token"):
            login(HUB, token)
    for url in ("http://hub.example.org", "ftp://x", "x", "https://a b", "https://"):
        with pytest.raises(ConfigError):
            login(url, "token-of-the-hub")
    assert not home.exists()
    for url in ("http://localhost:8080", "http://127.0.0.1", "http://[::1]:80"):  # here
        login(url, "token-of-the-hub")
        assert token_for(url) == "token-of-the-hub"


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1, "tokens": {"x": "secret-token"}}'])
def test_a_broken_file_is_an_error_that_does_not_quote_it(home, text):
    home.mkdir()
    (home / "tokens.json").write_text(text)
    with pytest.raises(FileError, match="not a file of tokens") as caught:
        token_for(HUB)
    assert "secret-token" not in str(caught.value)


def test_echoes_are_found_in_disguise():
    token = "hf_AbCdEfGhIjKlMnOpQrSt"
    data = token.encode()
    echoed = [token, token.lower(), token[::-1], data.hex(), " ".join(token), f"x{token[5:15]}y"]
    echoed += [base64.b64encode(b"x" * n + data).decode() for n in range(4)]
    assert all(echoes(f"error: {text}!", token) for text in echoed)
    assert echoes("bad tok-en", "tok-en")
    assert not echoes("Repository not found: hf_x, AbCdEfG, nothing of it", token)
    assert not echoes(token, None)
