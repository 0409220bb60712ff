"""`adapterhub login` and `adapterhub logout`."""

from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from adapterhub import cli
from adapterhub.errors import ConfigError
from adapterhub.registry import tokens
from adapterhub.registry.tokens import token_for


@pytest.fixture
def login(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return lambda url, token, *options: CliRunner().invoke(
        cli.group, ["login", url, *options], input=token
    )


def test_a_token_is_read_from_standard_input_or_prompted_for_and_not_printed(login, monkeypatch):
    result = login("https://Hub.example.org/", "my-token-123\n", "--unchecked")
    assert result.output == "stored a token for https://hub.example.org\n"
    assert token_for("https://hub.example.org:443/x") == "my-token-123"
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("click.prompt", lambda text, hide_input: "my-token-456" * hide_input)
    monkeypatch.setattr("adapterhub.cli.login.sys", terminal)
    login("https://hub.example.org", "", "--unchecked")
    assert token_for("https://hub.example.org") == "my-token-456"


def test_a_token_is_stored_with_a_note_where_the_hub_cannot_be_reached(login, monkeypatch):
    """Offline, or before the hub is started."""
    for offline in ("1", "0"):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline == "1")
        result = login("http://127.0.0.1:9", f"my-token-{offline}")
        assert result.exception is None, result.output
        assert "stored a token for http://127.0.0.1:9" in result.output
        assert "the token was not checked: " in result.output
        assert token_for("http://127.0.0.1:9") == f"my-token-{offline}"


def test_a_hub_without_encryption_is_refused(login, tmp_path):
    for url in ("http://hub.example.org", "hub.example.org", "https://me:pw@hub.example.org"):
        result = login(url, "my-token-123")
        assert isinstance(result.exception, ConfigError)
        assert "my-token-123" not in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_logout_deletes_one_token(typed, login):
    tokens.login("https://one.example.org", "my-token-123")
    tokens.login("https://two.example.org", "my-token-456")
    line = "logout https://one.example.org"
    assert typed(line) == "deleted the token for https://one.example.org\n"
    assert token_for("https://one.example.org") is None
    assert token_for("https://two.example.org") == "my-token-456"
    with pytest.raises(ConfigError, match="no token is stored"):
        typed(line)
