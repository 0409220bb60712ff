"""`adapterhub login`."""

from __future__ import annotations

from types import SimpleNamespace

from click.testing import CliRunner

from adapterhub import cli
from adapterhub.errors import ConfigError
from adapterhub.registry.tokens import token_for


def login(url, token, monkeypatch, tmp_path, *options):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return CliRunner().invoke(cli.group, ["login", url, *options], input=token)


def test_a_token_is_read_from_standard_input_and_not_printed(monkeypatch, tmp_path):
    result = login(
        "https://Hub.example.org/", "my-token-123\n", monkeypatch, tmp_path, "--unchecked"
    )
    assert result.output == "stored a token for https://hub.example.org\n"
    assert token_for("https://hub.example.org:443/x") == "my-token-123"


def test_a_token_is_prompted_for_without_an_echo(monkeypatch, tmp_path):
    monkeypatch.setattr("click.prompt", lambda text, hide_input: "my-token-123" * hide_input)
    monkeypatch.setattr("adapterhub.cli.login.sys", Terminal)
    login("https://hub.example.org", "", monkeypatch, tmp_path, "--unchecked")
    assert token_for("https://hub.example.org") == "my-token-123"


class Terminal:
    """The module sys of a process with a user at its terminal."""

    stdin = SimpleNamespace(isatty=lambda: True)


def test_a_token_is_stored_with_a_note_where_the_hub_cannot_be_reached(monkeypatch, tmp_path):
    """Offline, or before the hub is started."""
    for offline in ("1", "0"):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline == "1")
        result = login("http://127.0.0.1:9", f"my-token-{offline}", monkeypatch, tmp_path)
        assert result.exception is None, result.output
        assert "stored a token for http://127.0.0.1:9" in result.output
        assert "the token was not checked: " in result.output
        assert token_for("http://127.0.0.1:9") == f"my-token-{offline}"


def test_a_hub_without_encryption_is_refused(monkeypatch, tmp_path):
    for url in ("http://hub.example.org", "hub.example.org", "https://me:pw@hub.example.org"):
        result = login(url, "my-token-123", monkeypatch, tmp_path)
        assert isinstance(result.exception, ConfigError)
        assert "my-token-123" not in str(result.exception)
    assert not list(tmp_path.iterdir())
