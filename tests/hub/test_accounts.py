"""Who may do what, and what strangers learn."""

import re

import pytest
from sqlalchemy import select, update

from adapterhub.errors import ConfigError
from adapterhub.hub import accounts
from adapterhub.hub.database import now_text, sessions, tokens
from adapterhub.hub.repositories import delete_repository, find_repository
from adapterhub.hub.state import audit_rows
from adapterhub.web.connections import client_address
from tests.kit import real_hub
from tests.kit.real_hub import answered, batch, commit, create, delete


@pytest.fixture(scope="module")
def places(hub, client):
    for name, private in (("acme/open", False), ("acme/hidden", True)):
        create(client, name, private=private)
        commit(client, name, {"a.md": b"a"})
    return hub


def ids_of(client, query=""):
    return {each["id"] for each in client.get(f"/api/models{query}").json()}


def test_a_private_repository_does_not_reveal_itself(places):
    paths = [
        "/api/models/{}", "/api/models/{}/tree/main", "/api/models/{}/refs", "/{}",
        "/{}/resolve/main/a.md", "/api/models/{}/commits/main", "/{}/tree/main", "/{}/commit/0",
        "/api/models/{}/auth-check", "/api/adapterhub/models/{}/versions",
    ]  # fmt: skip
    eve, wil, stranger = (places.as_user(user) for user in ("eve", "wil", None))
    for client, status in ((eve, 404), (stranger, 401)):
        for path in paths:
            found = [client.get(path.format(name)) for name in ("acme/hidden", "acme/nothing")]
            assert {each.status_code for each in found} == {status}, path
            assert {each.headers["x-error-code"] for each in found} == {"RepoNotFound"}
            said = [each.text.replace("hidden", "nothing") for each in found]
            assert said[0] == said[1]
        assert client.delete("/api/models/acme/hidden/tag/v1").status_code == status
        answered(client.post("/api/models/acme/hidden/commit/main", content=b"x"), status)
    assert ids_of(eve) & {"acme/open", "acme/hidden"} == {"acme/open"}
    assert ids_of(eve, "?search=hidden") == ids_of(eve, "?author=acme&filter=nothing") == set()
    assert "acme/hidden" in ids_of(wil)


def test_without_open_reading_nobody_reads_without_a_token(places, tmp_path):
    stranger = places.as_user(None)
    for path in ("/api/models", "/acme/open/resolve/main/a.md", "/metrics", "/api/whoami-v2"):
        assert stranger.get(path).status_code == 401, path
    assert 'type="password"' in stranger.get("/").text
    for path in ("/health", "/ready", "/api/adapterhub", "/settings/tokens"):
        assert stranger.get(path).status_code == 200, path
    with real_hub.serving(tmp_path / "open", open_reading=True) as hub:
        hub.user("ada")
        create(hub.as_user("ada"), "ada/open")
        create(hub.as_user("ada"), "ada/hidden", private=True)
        stranger = hub.as_user(None)
        assert ids_of(stranger) == {"ada/open"}
        assert stranger.get("/ada/open/resolve/main/.gitattributes").status_code == 200
        assert stranger.get("/api/models/ada/hidden").status_code == 401
        assert commit(stranger, "ada/open", {"a.md": b"a"}).status_code == 401


@pytest.mark.parametrize(
    ("user", "role", "scope", "statuses"),
    [
        # commit, settings, deletion in acme; commit in ada
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
def test_a_token_allows_what_its_role_and_its_user_have(
    places, client, user, role, scope, statuses
):
    case = f"{user}-{role}-{scope}"
    shared, own = create(client, f"acme/{case}"), create(client, f"ada/{case}")
    with places.client(token=places.token(user, role, case, scope=scope)) as client:
        found = (
            commit(client, shared, {"a.md": b"a"}),
            client.put(f"/api/models/{shared}/settings", json={"private": False}),
            delete(client, shared),
            commit(client, own, {"a.md": b"a"}),
        )
    assert tuple(each.status_code for each in found) == statuses


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


def test_a_token_ends_by_its_time_its_revocation_or_its_user(new_hub):
    def status(token):
        with new_hub.client(token=token) as client:
            return client.get("/api/whoami-v2").status_code

    late = new_hub.token("ada", "read", "late", seconds=-1)
    gone = new_hub.token("ada", "read", "gone")
    assert (status(late), status(gone)) == (401, 200)
    new_hub.change(accounts.revoke_hub_token, "gone")
    assert status(gone) == 401
    for is_disabled, expected in ((True, 401), (False, 200)):
        new_hub.change(accounts.set_user, "ada", is_disabled=is_disabled)
        assert status(new_hub.tokens["ada"]) == expected


def log_in(client, token, **headers):
    return client.post("/settings/login", data={"token": token}, headers=headers)


def test_no_id_is_given_twice(new_hub, ada):
    """Cookies and addresses outlive rows, so a row must not take the place of a deleted one."""

    def ids(name):
        owner = new_hub.change(accounts.create_namespace, name, "user").id
        new_hub.token(name, "read", name)
        create(ada, f"acme/{name}")
        with new_hub.hub.database.writing() as connection:
            token = connection.execute(select(tokens.c.id).where(tokens.c.name == name)).scalar()
            repository = find_repository(connection, "models", f"acme/{name}")
            delete_repository(connection, repository)
            accounts.remove_user(connection, name)
        return owner, token, repository.id

    found = [ids(name) for name in ("first", "second", "third")]
    for column in zip(*found, strict=True):
        assert [*column] == sorted({*column})


ENDS = {
    "revoke": lambda connection, name: accounts.revoke_hub_token(connection, f"{name}-laptop"),
    "disable": lambda connection, name: accounts.set_user(connection, name, is_disabled=True),
    "remove": accounts.remove_user,
    "expire": lambda connection, _: connection.execute(
        update(sessions).values(expires=now_text(1))
    ),
    "demote": lambda connection, name: accounts.set_member(connection, "acme", name, "read"),
    "delete": lambda connection, name: delete_repository(
        connection, find_repository(connection, "models", f"acme/{name}")
    ),
}
"""What ends a session or an upload of a user."""


@pytest.mark.parametrize("end", ["revoke", "disable", "remove", "logout", "expire"])
def test_a_session_ends_with_what_it_was_begun_for(places, end):
    name = f"bob-{end}"
    token = places.user(name)
    with places.client() as client:
        assert log_in(client, token).status_code == 303
        cookie = client.cookies["adapterhub"]
        assert name in client.get("/settings/tokens").text
        assert "ah_" not in cookie
        if end == "logout":
            assert client.post("/settings/logout").status_code == 303
        else:
            places.change(ENDS[end], name)
        places.user(f"eva-{end}")  # whose rows take the place of what is gone
        client.cookies.set("adapterhub", cookie)
        page = client.get("/settings/tokens").text
        assert not re.search(f"(bob|eva)-{end}", page)
        assert 'type="password"' in client.get("/").text


@pytest.mark.parametrize("end", ["revoke", "disable", "demote", "delete"])
def test_an_upload_ends_with_what_it_was_allowed_by(places, client, end):
    name, data = f"lee-{end}", b"some bytes"
    places.user(name, acme="write")
    create(client, f"acme/{name}")
    (found,) = batch(places.as_user(name), f"acme/{name}", data).json()["objects"]
    href = found["actions"]["upload"]["href"]
    places.change(ENDS[end], name)
    for other in (None, f"ada/{name}"):  # whose rows take the place of what is gone
        if other:
            create(client, other)
        assert client.put(href, content=data).status_code == 403
        assert client.put(f"{href}/1", content=data).status_code == 403
        assert client.post(href).status_code == 403


def test_a_user_with_repositories_is_not_removed(places):
    create(places.as_user("wil"), "wil/x")
    with pytest.raises(ConfigError, match=r"1 repository(.|\n)*wil/x"):
        places.change(accounts.remove_user, "wil")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 303),
        ({"origin": "{own}", "sec-fetch-site": "same-origin"}, 303),
        ({"sec-fetch-site": "none"}, 303),
        ({"origin": "null", "sec-fetch-site": "same-origin"}, 403),
        ({"origin": "{own}.evil.example"}, 403),
        ({"origin": "{own}", "sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
def test_only_our_own_form_logs_in_or_out(places, headers, status):
    sent = {name: value.format(own=places.address) for name, value in headers.items()}
    with places.client() as client:
        assert log_in(client, places.tokens["wil"], **sent).status_code == status
        assert client.post("/settings/logout", headers=sent).status_code == status


def test_a_token_with_a_scope_lists_what_it_may_read(new_hub, ada):
    every = ("acme/open", "acme/hidden", "ada/open", "ada/hidden")
    for name in every:
        create(ada, name, private="hidden" in name)
    for user, scope, names in (
        ("ada", "acme", {"acme/open", "acme/hidden"}),
        ("ada", "ada", {"ada/open", "ada/hidden"}),
        ("eve", "acme", {"acme/open"}),
        ("root", "acme", {"acme/open"}),
        ("ada", None, {*every}),
        ("eve", None, {"acme/open", "ada/open"}),
    ):
        token = new_hub.token(user, "admin", f"{user}-{scope}", scope=scope)
        with new_hub.client(token=token) as client:
            readable = {n for n in every if client.get(f"/api/models/{n}").status_code == 200}
            assert (ids_of(client), readable) == (names, names), (user, scope)


def counted_by(client):
    """Return how many repositories the metrics have, and whether they tell of bytes."""
    text = client.get("/metrics").text
    return int(re.search(r"adapterhub_hub_repositories (\d+)", text)[1]), "blob_bytes" in text


def test_metrics_do_not_count_what_is_private(new_hub, ada):
    eve, root = new_hub.as_user("eve"), new_hub.as_user("root")
    create(ada, "acme/open")
    before = counted_by(ada), counted_by(eve)
    create(ada, "acme/hidden", private=True)
    assert (counted_by(ada), counted_by(eve)) == before
    assert counted_by(eve)[1] is False
    assert counted_by(root) == (2, True)


def test_who_guesses_is_slowed_down_and_who_has_a_token_is_not(new_hub, ada):
    with new_hub.client(token="ah_" + "x" * 43) as client:
        statuses = [client.get("/api/whoami-v2").status_code for _ in range(25)]
        assert statuses == [401] * 20 + [429] * 5
        answer = log_in(client, "x")
        assert (answer.status_code, bool(answer.headers["retry-after"])) == (429, True)
    assert ada.get("/api/whoami-v2").status_code == 200
    assert log_in(ada, new_hub.tokens["ada"]).status_code == 303
    with new_hub.hub.database.reading() as connection:
        rows = [each for each in audit_rows(connection, 100) if each["action"] == "failed token"]
    assert len(rows) == 20
    assert {row["address"] for row in rows} == {"127.0.0.1"}


FORGED = ("10.0.0.5", "10.0.0.5, 10.0.0.5", "127.0.0.1", "::1", "root", "", "10.0.0.5:80",
          "a" * 5_000, "<script>")  # fmt: skip
WRONG = {"authorization": "Bearer ah_" + "x" * 43}


def test_a_client_does_not_choose_its_address(tmp_path):
    """A client that is not a configured proxy writes what a proxy would write."""
    with real_hub.serving(tmp_path / "hub", user_header="x-user", proxies=("10.0.0.5",)) as hub:
        hub.user("root", "admin", is_admin=True)
        stranger = hub.as_user(None)
        for each in [*([each] for each in FORGED), ["10.0.0.5", "10.0.0.5"]]:
            for last in (("x-user", "root"), *WRONG.items()):
                headers = [*(("x-forwarded-for", one) for one in each), last]
                assert stranger.get("/api/whoami-v2", headers=headers).status_code == 401
        with hub.hub.database.reading() as connection:
            assert {row["address"] for row in audit_rows(connection, 99)} == {"127.0.0.1"}


def test_a_proxy_says_who_reads(tmp_path):
    known, path = {"x-user": "ada"}, "/ada/hidden/tree/main"
    forwarded = {**known, "x-forwarded-for": "9.9.9.9", "x-forwarded-proto": "https"}
    wrong = {**WRONG, "x-forwarded-for": "1.1.1.1, 9.9.9.9"}
    with real_hub.serving(tmp_path / "hub", user_header="x-user", proxies=("127.0.0.1",)) as hub:
        hub.user("ada")
        create(hub.as_user("ada"), "ada/hidden", private=True)
        client = hub.as_user(None)
        for headers, status in ((known, 200), ({}, 401), (forwarded, 200), (wrong, 401)):
            assert client.get(path, headers=headers).status_code == status
        assert client.get("/", headers={"x-user": "nobody"}).status_code == 403
        answered(client.post("/api/repos/create", json={"name": "x"}, headers=known), 401)
        with hub.hub.database.reading() as connection:
            assert audit_rows(connection, 1)[0]["address"] == "9.9.9.9"


@pytest.mark.parametrize(
    ("peer", "forwarded", "found"),
    [
        ("1.2.3.4", ["9.9.9.9"], "1.2.3.4"),
        ("10.0.0.5", ["9.9.9.9"], "9.9.9.9"),
        ("10.0.0.5", ["8.8.8.8", "9.9.9.9"], "9.9.9.9"),
        ("10.0.0.5", ["8.8.8.8, 9.9.9.9, 192.168.3.7"], "9.9.9.9"),
        ("10.0.0.5", ["10.0.0.5"], "10.0.0.5"),
        ("10.0.0.5", ["9.9.9.9, root"], "10.0.0.5"),
        ("10.0.0.5", [], "10.0.0.5"),
        ("::ffff:10.0.0.5", ["9.9.9.9:4711"], "9.9.9.9"),
        ("fd00::7", ["[2001:db8::1]:443"], "2001:db8::1"),
        ("testclient", ["9.9.9.9"], "testclient"),
    ],
)
def test_forwarded_addresses_are_walked_from_the_right(peer, forwarded, found):
    proxies = ("10.0.0.5", "192.168.0.0/16", "fd00::/8")
    assert client_address(peer, forwarded, proxies) == found


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "10.0.0.9:80"])
def test_a_name_that_is_not_ours_is_refused_before_anything_is_written(client, host):
    body = {"name": "by-another-name"}
    answer = client.post("/api/repos/create", json=body, headers={"host": host})
    assert answer.status_code in (400, 421)
    assert client.get("/api/models/ada/by-another-name").status_code == 404
    assert "evil" not in str(client.get("/api/models?limit=1").headers)


OF_THE_HUB = ("api", "Settings")
"""Names that owners cannot have, and repositories can."""


@pytest.mark.parametrize(
    "name", ["con", "a..b", "a--b", "x.git", "ä", "x" * 97, "x\n", "index.json", *OF_THE_HUB]
)
def test_names_that_would_be_something_else_are_refused(places, client, name):
    with pytest.raises(ConfigError):
        places.change(accounts.create_namespace, name, "org")
    if name not in OF_THE_HUB:
        body = {"name": name, "organization": "acme"}
        answered(client.post("/api/repos/create", json=body), 400)


def test_names_that_differ_in_case_are_one(places, client):
    answer = client.post("/api/repos/create", json={"name": "OPEN", "organization": "ACME"})
    assert answer.status_code == 409
    assert answer.json()["url"].endswith("/acme/open")
    assert client.get("/api/models/ACME/Open").json()["id"] == "acme/open"
    create(client, "acme/kit")
    for name in ("acme/\u212ait", "acme/KIT\u200b"):
        assert client.get(f"/api/models/{name}").status_code == 404
    assert client.get("/api/models/acme/KIT").status_code == 200
    with pytest.raises(ConfigError, match="acme"):
        places.change(accounts.create_namespace, "ACME", "user")


def test_what_is_done_is_written_down_without_tokens(places, client):
    with places.hub.database.reading() as connection:
        rows = audit_rows(connection, 1000)
    assert {"create repository", "commit"} <= {row["action"] for row in rows}
    made = next(row for row in rows if row["target"] == "acme/open")
    assert (made["who"], made["token"], made["address"]) == ("ada", "ada-laptop", "127.0.0.1")
    assert "ah_" not in str(rows)
    assert client.get("/api/adapterhub/audit").status_code == 403
    assert places.as_user("root").get("/api/adapterhub/audit").json()[0]["action"]
