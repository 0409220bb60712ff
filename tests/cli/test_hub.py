"""What operators and users of servers type: `hub`, `serve`, `token`, `login` and `logout`."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import adapterhub as ah
from adapterhub import cli
from adapterhub.errors import ConfigError
from adapterhub.hub.accounts import mirror_namespace
from adapterhub.hub.state import create_hub, open_hub
from adapterhub.registry import tokens
from adapterhub.registry.tokens import token_for
from adapterhub.web.tokens import TokenFile
from tests.kit import real_hub, registries
from tests.kit.real_hub import commit, create
from tests.kit.server import EXAMPLES, write_adapter
from tests.kit.session import refused, succeeded


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "hub")


@pytest.fixture
def hub(adapterhub, folder):
    """Run a line such as `user H ada`, where H is the hub's folder."""
    return lambda line: adapterhub("hub", *(folder if w == "H" else w for w in line.split()))


def facts_of(result):
    return json.loads(succeeded(result))


def test_users_organisations_and_tokens(hub):
    assert hub("user H ada bob")[1] == "created the users ada, bob\n"
    assert hub("user H")[1] == "ada\nbob\n"
    members = "--member ada=admin --member bob=read"
    facts = facts_of(hub(f"org H acme {members} --quota 10GB --protect prod* --json"))
    assert facts["members"] == ["ada=admin", "bob=read"]
    assert (facts["protected"], facts["quota"]) == (["prod*"], ["10.0 GB"])
    left = facts_of(hub("org H acme --remove-member bob --json"))
    assert left == {**facts, "members": ["ada=admin"]}
    assert hub("org H")[1] == "acme\n"

    token = succeeded(hub("token create H --user ada --expires 90d"))
    assert token.startswith("ah_")
    _, out, _ = hub("token list H --json")
    (row,) = json.loads(out)
    assert (row["name"], row["user"], row["role"], row["used"]) == ("ada-1", "ada", "write", None)
    assert token.strip() not in out
    for line, *expected in (
        ("user H ADA", "there is a user ada"),
        ("user H api", "cannot be the name"),
        ("org H acme --member ada=king", "USER=read"),
        ("org H acme --allow all", "no such rule: 'all'", "pickle"),
        ("org H acme --quota much", "--quota 'much' is not a size"),
        ("token create H --user adda", "no user 'adda'", "ada"),
        ("token create H --user ada --name ada-1", "ada-1"),
    ):
        refused(hub(line), *expected)
    assert hub("token revoke H ada-1")[1] == "revoked ada-1\n"
    refused(hub("token revoke H ada-1"), "no token has the name 'ada-1'")
    _, out, _ = hub("audit H --json")
    assert json.loads(out.splitlines()[0])["action"] == "revoke token"
    assert token.strip() not in out


def test_users_are_changed_and_rules_are_taken_back(hub):
    succeeded(hub("user H ada bob"))
    for change, said, listed in (
        ("--promote", "promoted", "ada  admin\nbob\n"),
        ("--disable", "disabled", "ada  admin, disabled\nbob\n"),
        ("--enable", "enabled", "ada  admin\nbob\n"),
        ("--demote", "demoted", "ada\nbob\n"),
        ("--remove", "removed", "bob\n"),
    ):
        assert hub(f"user H ada {change}")[1] == f"{said} the user ada\n"
        assert hub("user H")[1] == listed
    refused(hub("user H ada --disable"), "no user 'ada'")
    refused(hub("user H --disable"), "NAME... --disable")
    refused(hub("user H bob --admin --demote"), "--demote")

    given = "--quota 1GB --allow pickle --allow-finding x --protect prod*"
    succeeded(hub(f"org H acme {given}"))
    taken = "--quota none --disallow pickle --disallow-finding x --unprotect prod*"
    empty = {"allowed": [], "findings": [], "protected": [], "signers": [], "quota": []}
    facts = facts_of(hub(f"org H acme {taken} --json"))
    assert facts == {"name": "acme", "members": [], **empty}
    refused(hub("org H acme --disallow pickle"), "no 'pickle'")
    targets = [json.loads(line)["target"] for line in hub("audit H --json")[1].splitlines()]
    assert targets[:2] == [f"acme {taken}", f"acme {given}"]


def test_keeping_house(adapterhub, folder, tmp_path):
    with real_hub.serving(tmp_path / "hub") as hub:
        hub.user("ada")
        with hub.client("ada") as client:
            create(client, "ada/x")
            commit(client, "ada/x", {"a.md": b"a"})
    assert "intact" in adapterhub("hub", "verify", folder)[1]
    assert "0 files" in adapterhub("hub", "gc", folder, "--dry-run")[1]
    assert "2 files copied" in adapterhub("hub", "backup", folder, str(tmp_path / "backup"))[1]
    other = str(tmp_path / "other")
    assert "2 files restored" in adapterhub("hub", "restore", str(tmp_path / "backup"), other)[1]
    assert "of this release" in adapterhub("hub", "upgrade", folder)[1]
    for path in (tmp_path / "other/blobs").rglob("*"):
        if path.is_file():
            path.unlink()
    refused(adapterhub("hub", "verify", other), "problems in", "missing (of ada/x)")
    refused(adapterhub("hub", "verify", str(tmp_path / "none")), "no hub in", "hub start")
    refused(adapterhub("hub", "start", folder, "--max-file", "x"), "--max-file 'x' is not a size")
    refused(adapterhub("hub", "start", folder, "--trust-user-header", "x-user"), "--trusted-proxy")


def test_a_repository_of_another_hub_is_fetched_ahead(adapterhub, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with real_hub.serving(tmp_path / "up", open_reading=True) as up:
        up.user("ada")
        with up.client("ada") as client:
            create(client, "ada/x")
            oid = commit(client, "ada/x", {"a.md": b"a", "b.md": b"bb"}).json()["commitOid"]
        words = ("hub", "mirror", folder, "--upstream", up.address)
        code, out, err = adapterhub(*words, f"ada/x@{oid}")
        assert (code, out) == (0, f"ada/x@{oid[:12]}: 3 files (53 B), 3 fetched\n"), err
        (report,) = json.loads(adapterhub(*words, "ada/x", "--json")[1])
        assert (report["commit"], report["fetched"]) == (oid, 0)
        refused(adapterhub(*words, "ada/none"), "neither on this hub nor", up.address)
        refused(adapterhub(*words, "none"), "expected OWNER/NAME")
        _, out, _ = adapterhub("hub", "org", folder, up.address, "--quota", "1GB")
        assert "quota" in out
        assert f"ada/x@{oid}" in adapterhub("hub", "audit", folder)[1]
        adapterhub("hub", "user", folder, "ada")
        refused(adapterhub(*words, "ada/x"), "ada is a name of this hub")
    refused(adapterhub(*words, "bob/y"), "is not kept here", "fails")
    refused(adapterhub("hub", "start", folder, "--upstream", "hub.example"), "--upstream")
    refused(adapterhub("hub", "start", folder, "--upstream-token", "a/b"), "--upstream URL")
    address = "http://127.0.0.1:8733"
    refused(adapterhub("hub", "start", folder, "--upstream", address), "is this hub itself")
    monkeypatch.setattr("adapterhub.cli.hub._LIBRARIES", ("json", "no_such_library"))
    refused(adapterhub("hub", "user", folder), "needs no_such_library", "adapterhub[hub]")


def test_no_signer_is_required_of_what_is_mirrored(adapterhub, folder):
    """The files come one by one, when somebody asks for them, as their owners made them."""
    create_hub(Path(folder))
    with open_hub(Path(folder)) as hub, hub.database.writing() as connection:
        mirror_namespace(connection, "https://hub.example.org")
    key = registries.new_key().public.text
    done = adapterhub("hub", "org", folder, "https://hub.example.org", "--signer", key)
    refused(done, "mirrored as they are", "--require-signatures")


# `adapterhub serve` and `adapterhub token`: flags, the table of adapters, and errors.


@pytest.fixture
def registry(backbone, tmp_path):
    root = tmp_path / "registry"
    for example, method in ((EXAMPLES[0], "lora(rank=2)"), (EXAMPLES[5], "bitfit")):
        folder = write_adapter(backbone, tmp_path / example.task, method, example)
        ah.publish(folder, example.task, registry=root)
    return root


def test_check_lists_which_adapters_share_the_backbone_and_what_cannot_be_served(
    adapterhub, registry, tmp_path
):
    out = succeeded(adapterhub("serve", "--registry", registry, "--check"))
    lines = {line.split()[0]: line for line in out.splitlines() if "@v1" in line}
    assert " yes " in lines["classification@v1"]
    assert " no " in lines["tagging@v1"]
    assert "trains parameters" in lines["tagging@v1"]
    assert "2 adapters can be served" in out
    file = tmp_path / "serve.yaml"
    file.write_text(f"adapters: [classification]\nregistry: {registry}\nport: none\n")
    words = ("serve", "--config", file, "--check")
    refused(adapterhub(*words), "port")
    succeeded(adapterhub(*words, "--port", 0), "1 adapter can be served")
    (file,) = registry.glob("**/tagging/v1/adapter.safetensors")
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1])
    code, out, err = adapterhub("serve", "--registry", registry, "--check")
    assert code == 2
    assert "classification@v1" in out
    assert "1 adapter cannot be served" in err
    assert "tagging: " in err


def test_a_token_is_shown_once(adapterhub, tmp_path):
    file = tmp_path / "tokens.json"
    code, out, _ = adapterhub("token", "create", "shop", "--adapter", "team-*", "--file", file)
    token = out.strip()
    assert code == 0
    assert TokenFile(file).check(token).adapters == ("team-*",)
    code, out, _ = adapterhub("token", "list", "--file", file)
    assert "shop" in out
    assert token not in out
    _, out, _ = adapterhub("token", "list", "--file", file, "--json")
    (listed,) = json.loads(out)
    assert listed["name"] == "shop"
    assert "sha256" not in listed
    assert adapterhub("token", "revoke", "shop", "--file", file)[0] == 0
    assert adapterhub("token", "list", "--file", file)[1] == "no tokens\n"
    succeeded(adapterhub("token", "create", "one", "--role", "admin", "--expires", "90d"))
    (own,) = json.loads(adapterhub("token", "list", "--json")[1])  # in the user's own file
    assert (own["roles"], own["expires"] > own["created"]) == (["admin"], True)


# `adapterhub login` and `adapterhub logout`.


@pytest.fixture
def login(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    invoke = CliRunner().invoke
    return lambda url, token, *options: invoke(cli.group, ["login", url, *options], input=token)


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
