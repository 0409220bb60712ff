"""`adapterhub hub`: the commands that an operator types."""

import json
from pathlib import Path

import pytest

from adapterhub.hub.accounts import mirror_namespace
from adapterhub.hub.state import create_hub, open_hub
from tests.kit import real_hub, registries
from tests.kit.real_hub import commit, create
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


def test_without_its_libraries_a_hub_says_what_to_install(adapterhub, folder, monkeypatch):
    monkeypatch.setattr("adapterhub.cli.hub._LIBRARIES", ("json", "no_such_library"))
    refused(adapterhub("hub", "user", folder), "needs no_such_library", "adapterhub[hub]")


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


def test_no_signer_is_required_of_what_is_mirrored(adapterhub, folder):
    """The files come one by one, when somebody asks for them, as their owners made them."""
    create_hub(Path(folder))
    with open_hub(Path(folder)) as hub, hub.database.writing() as connection:
        mirror_namespace(connection, "https://hub.example.org")
    key = registries.new_key().public.text
    done = adapterhub("hub", "org", folder, "https://hub.example.org", "--signer", key)
    refused(done, "mirrored as they are", "--require-signatures")
