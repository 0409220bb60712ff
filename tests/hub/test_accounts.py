"""Who may do what, and what strangers learn."""

from __future__ import annotations

import pytest
import real_hub
from commit_body import commit, create

from adapterhub.errors import ConfigError
from adapterhub.hub.accounts import create_namespace, revoke_hub_token
from adapterhub.hub.state import audit_rows


@pytest.fixture(scope="module")
def places(hub):
    with hub.client("ada") as client:
        for name, private in (("acme/open", False), ("acme/hidden", True)):
            create(client, name, private=private)
            commit(client, name, {"a.md": b"a"})
    return hub


def test_a_private_repository_does_not_reveal_itself(places):
    paths = [
        "/api/models/{}", "/api/models/{}/tree/main", "/api/models/{}/refs", "/{}",
        "/{}/resolve/main/a.md", "/api/models/{}/commits/main", "/{}/tree/main", "/{}/commit/0",
        "/api/models/{}/auth-check", "/api/adapterhub/models/{}/versions",
    ]  # fmt: skip
    for user, status in (("eve", 404), (None, 401)):
        with places.client(user) as client:
            for path in paths:
                found = [client.get(path.format(name)) for name in ("acme/hidden", "acme/nothing")]
                assert {each.status_code for each in found} == {status}, path
                assert {each.headers["x-error-code"] for each in found} == {"RepoNotFound"}
                said = [each.text.replace("hidden", "nothing") for each in found]
                assert said[0] == said[1]
            assert client.delete("/api/models/acme/hidden/tag/v1").status_code == status
            answer = client.post("/api/models/acme/hidden/commit/main", content=b"x")
            assert answer.status_code == status
    with places.client("eve") as client:
        listed = {each["id"] for each in client.get("/api/models").json()}
        assert ("acme/open" in listed, "acme/hidden" in listed) == (True, False)
        assert client.get("/api/models?search=hidden").json() == []
        assert client.get("/api/models?author=acme&filter=nothing").json() == []
    with places.client("wil") as client:
        assert "acme/hidden" in {each["id"] for each in client.get("/api/models").json()}


def test_without_open_reading_nobody_reads_without_a_token(places, tmp_path):
    with places.client() as client:
        for path in ("/api/models", "/acme/open/resolve/main/a.md", "/metrics", "/api/whoami-v2"):
            assert client.get(path).status_code == 401, path
        assert client.get("/").headers["location"] == "/settings/tokens"
        for path in ("/health", "/ready", "/api/adapterhub", "/settings/tokens"):
            assert client.get(path).status_code == 200, path
    with real_hub.serving(tmp_path / "open", open_reading=True) as hub:
        hub.user("ada")
        with hub.client("ada") as client:
            create(client, "ada/open")
            create(client, "ada/hidden", private=True)
        with hub.client() as client:
            assert [each["id"] for each in client.get("/api/models").json()] == ["ada/open"]
            assert client.get("/ada/open/resolve/main/.gitattributes").status_code == 200
            assert client.get("/api/models/ada/hidden").status_code == 401
            assert commit(client, "ada/open", {"a.md": b"a"}).status_code == 401


@pytest.mark.parametrize(
    ("user", "role", "scope", "statuses"),
    [
        # commit, delete, settings in acme/open; commit in ada/own
        ("ada", "read", None, (403, 403, 403, 403)),
        ("ada", "write", None, (200, 403, 403, 200)),
        ("ada", "admin", None, (200, 200, 200, 200)),
        ("ada", "admin", "acme", (200, 200, 200, 404)),
        ("ada", "admin", "ada", (404, 404, 404, 200)),
        ("wil", "admin", None, (200, 403, 403, 403)),
        ("eve", "admin", None, (403, 403, 403, 403)),
        ("root", "write", None, (200, 403, 403, 200)),
    ],
)
def test_a_token_allows_what_its_role_and_its_user_have(new_hub, user, role, scope, statuses):
    with new_hub.client("ada") as client:
        create(client, "acme/open")
        create(client, "ada/own")
    token = new_hub.token(user, role, "tried", scope=scope)
    with new_hub.client(token=token) as client:
        found = (
            commit(client, "acme/open", {"a.md": b"a"}),
            client.put("/api/models/acme/open/settings", json={"private": False}),
            client.request(
                "DELETE", "/api/repos/delete", json={"name": "open", "organization": "acme"}
            ),
            commit(client, "ada/own", {"a.md": b"a"}),
        )
    assert tuple(each.status_code for each in found) == (
        statuses[0], statuses[2], statuses[1], statuses[3],
    )  # fmt: skip


def test_a_token_of_another_service_is_said_to_be_none_and_is_kept_nowhere(places, caplog):
    caplog.set_level("DEBUG")
    token = "hf_" + "q" * 34
    with places.client(token=token) as client:
        answer = client.get("/api/whoami-v2")
        assert answer.status_code == 401
        assert answer.json()["error"] == "this is not a token of this hub"
        assert "Invalid credentials" in answer.headers["x-error-message"]
        assert client.get("/acme/open/resolve/main/a.md").status_code == 401
    assert token not in caplog.text
    if places.is_folder:
        for path in places.hub.place.rglob("*"):
            if path.is_file():
                assert token.encode() not in path.read_bytes()


def test_tokens_end(new_hub):
    late = new_hub.token("ada", "read", "late", seconds=-1)
    gone = new_hub.token("ada", "read", "gone")
    with new_hub.client(token=gone) as client:
        assert client.get("/api/whoami-v2").status_code == 200
        with new_hub.hub.database.writing() as connection:
            revoke_hub_token(connection, "gone")
        assert client.get("/api/whoami-v2").status_code == 401
    with new_hub.client(token=late) as client:
        assert client.get("/api/whoami-v2").status_code == 401


def test_who_guesses_is_slowed_down(new_hub):
    with new_hub.client(token="ah_" + "x" * 43) as client:
        statuses = [client.get("/api/whoami-v2").status_code for _ in range(22)]
        assert statuses == [401] * 20 + [429] * 2
        answer = client.post("/settings/login", data={"token": "x"})
        assert (answer.status_code, bool(answer.headers["retry-after"])) == (429, True)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "10.0.0.9:80"])
def test_a_name_that_is_not_ours_is_refused_before_anything_is_written(places, host):
    with places.client("ada") as client:
        body = {"name": "by-another-name"}
        answer = client.post("/api/repos/create", json=body, headers={"host": host})
        assert answer.status_code in (400, 421)
        assert client.get("/api/models/ada/by-another-name").status_code == 404
        assert "evil" not in str(client.get("/api/models?limit=1").headers)


def test_answers_name_the_public_address(tmp_path):
    with real_hub.serving(tmp_path / "hub", public_url="https://hub.example/x") as hub:
        hub.user("ada")
        with hub.client("ada") as client:
            for host in ("hub.example", "localhost:99"):
                body = {"name": f"at-{host[:3]}"}
                answer = client.post("/x/api/repos/create", json=body, headers={"host": host})
                assert answer.json()["url"] == f"https://hub.example/x/ada/at-{host[:3]}"


@pytest.mark.parametrize(
    "name",
    ["con", "a..b", "a--b", "x.git", "-x", "x.", "a b", "ä", "x" * 97, "x\n", "nul.txt",
     "index.json", "api", "models", "Settings"],
)  # fmt: skip
def test_names_that_would_be_something_else_are_refused(places, name):
    with places.hub.database.writing() as connection, pytest.raises(ConfigError):
        create_namespace(connection, name, "org")
    if name not in ("api", "models", "Settings"):
        with places.client("ada") as client:
            answer = client.post("/api/repos/create", json={"name": name, "organization": "acme"})
            assert answer.status_code == 400, answer.text


def test_names_that_differ_in_case_are_one(places):
    with places.client("ada") as client:
        answer = client.post("/api/repos/create", json={"name": "OPEN", "organization": "ACME"})
        assert answer.status_code == 409
        assert answer.json()["url"].endswith("/acme/open")
        assert client.get("/api/models/ACME/Open").json()["id"] == "acme/open"
    with places.hub.database.writing() as connection, pytest.raises(ConfigError, match="acme"):
        create_namespace(connection, "ACME", "user")


def test_what_is_done_is_written_down_without_tokens(places):
    with places.hub.database.reading() as connection:
        rows = audit_rows(connection, 1000)
    assert {"create repository", "commit"} <= {row["action"] for row in rows}
    made = next(row for row in rows if row["target"] == "acme/open")
    assert (made["who"], made["token"], made["address"]) == ("ada", "ada-laptop", "127.0.0.1")
    assert "ah_" not in str(rows)
    with places.client("ada") as client:
        assert client.get("/api/adapterhub/audit").status_code == 403
    with places.client("root") as client:
        assert client.get("/api/adapterhub/audit").json()[0]["action"]


def test_a_proxy_says_who_reads(tmp_path):
    options = {"user_header": "x-user", "proxies": ("127.0.0.1",)}
    with real_hub.serving(tmp_path / "hub", **options) as hub:
        hub.user("ada")
        with hub.client("ada") as client:
            create(client, "ada/hidden", private=True)
        with hub.client() as client:
            known = {"x-user": "ada"}
            assert client.get("/ada/hidden/tree/main", headers=known).status_code == 200
            assert client.get("/ada/hidden/tree/main").status_code == 401
            assert client.get("/", headers={"x-user": "nobody"}).status_code == 403
            answer = client.post("/api/repos/create", json={"name": "x"}, headers=known)
            assert answer.status_code == 401
    with real_hub.serving(tmp_path / "other", user_header="x-user", proxies=("10.0.0.1",)) as hub:
        hub.user("ada")
        with hub.client() as client:
            answer = client.get("/api/models", headers={"x-user": "ada"})
            assert answer.status_code == 401
