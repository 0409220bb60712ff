"""Several processes that are one hub, and the way from a folder to them and back."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from sqlalchemy import make_url

from adapterhub.errors import ConfigError, FileError, OutputError
from adapterhub.hub import upload_endpoints
from adapterhub.hub.backups import backup_hub, restore_hub, upgrade_hub
from adapterhub.hub.database import SCHEMA_REVISION
from adapterhub.hub.gc import verify_hub
from adapterhub.hub.postgres import PostgresDatabase
from adapterhub.hub.state import create_hub, open_hub, schema_revision
from tests.kit import real_hub
from tests.kit.real_hub import answered, batch, commit, create, digest, head

pytestmark = pytest.mark.apart


@pytest.fixture
def made(new_state):
    """A hub in PostgreSQL and a bucket, with one user."""
    return real_hub.made(*new_state())


@pytest.fixture
def pair(made):
    """Two servers of it, and a client of each."""
    with ExitStack() as stack:
        servers = [stack.enter_context(real_hub.serving(made.place)) for _ in range(2)]
        yield servers, [stack.enter_context(made.client(each.address)) for each in servers]


def test_what_one_has_answered_the_other_knows(pair):
    servers, (first, second) = pair
    create(first, "ada/x")
    for number in range(20):
        writer, reader = (first, second) if number % 2 else (second, first)
        data = f"{number}\n".encode()
        assert reader.get("/api/models/ada/x").status_code == 200
        oid = commit(writer, "ada/x", {"a.md": data}).json()["commitOid"]
        assert head(reader, "ada/x") == oid
        assert reader.get("/ada/x/resolve/main/a.md").content == data
    token = servers[0].token("ada", "write", "second")
    with servers[1].client(token=token) as client:
        assert client.get("/api/whoami-v2").status_code == 200
        answered(first.request("DELETE", "/api/repos/delete", json={"name": "ada/x"}), 200)
        assert client.get("/api/models/ada/x").status_code == 404


def test_no_two_writers_win(pair):
    """One parent, eight writers at two servers: one commit; and no version is given twice."""
    _, clients = pair
    create(clients[0], "ada/x")
    tagged = []

    def tag_all(number):
        for version in range(1, 13):
            if real_hub.tag(clients[number % 2], "ada/x", f"v{version}").status_code == 200:
                tagged.append(version)

    with ThreadPoolExecutor(8) as pool:
        for turn in range(3):
            parent = head(clients[0], "ada/x")
            jobs = [
                pool.submit(
                    commit, clients[n % 2], "ada/x", {"a.md": b"%d %d" % (turn, n)}, parent=parent
                )
                for n in range(8)
            ]
            assert sorted(job.result().status_code for job in jobs) == [200] + [412] * 7
        list(pool.map(tag_all, range(4)))
    assert sorted(tagged) == [*range(1, 13)]


def test_the_parts_of_a_file_may_go_to_any_of_them(pair, monkeypatch):
    servers, clients = pair
    monkeypatch.setattr(upload_endpoints, "PART_BYTES", 1000)
    monkeypatch.setattr(upload_endpoints, "_WHOLE_BYTES", 1500)
    create(clients[0], "ada/x")
    data = os.urandom(1250).hex().encode()
    answer = batch(clients[0], "ada/x", data, transfers=["multipart"])
    action, oid = answer.json()["objects"][0]["actions"]["upload"], digest(data)
    paths = [href.split("/lfs/")[1] for n, href in action["header"].items() if n.isdecimal()]
    for number, path in enumerate(paths):
        part = data[1000 * number : 1000 * (number + 1)]
        assert clients[number % 2].put(f"/lfs/{path}", content=part).status_code == 200
    complete = f"/lfs/{action['href'].split('/lfs/')[1]}"
    assert clients[1].post(complete, json={"oid": oid}).status_code == 200
    assert commit(clients[0], "ada/x", large={"p.md": (oid, len(data))}).status_code == 200
    assert clients[1].get("/ada/x/resolve/main/p.md").content == data
    assert servers[0].hub.blobs.collect_uploads(time.time() + 9, dry_run=True) == 0


def test_downloads_come_from_the_bucket_and_the_token_stays_here(pair):
    (server, _), (client, _) = pair
    create(client, "ada/x")
    commit(client, "ada/x", {"a.md": b"some text"})
    answer = client.get("/ada/x/resolve/main/a.md", follow_redirects=False)
    assert (answer.status_code, answer.content) == (302, b"")
    assert answer.headers["location"].startswith(os.environ["AWS_ENDPOINT_URL"])
    assert answer.headers["x-repo-commit"] == head(client, "ada/x")
    found = client.get("/ada/x/resolve/main/a.md")
    assert found.content == b"some text"
    assert "authorization" not in found.request.headers
    with real_hub.httpx2.Client() as stranger:
        unsigned = answer.headers["location"].partition("?")[0]
        assert stranger.get(unsigned.replace("/bucket/", "/other/")).status_code >= 400
        assert stranger.get(f"{server.address}/ada/x/resolve/main/a.md").status_code == 401
    assert client.head("/ada/x/resolve/main/a.md").headers["content-length"] == "9"


def test_a_hub_moves_from_a_folder_to_processes_and_back(tmp_path, new_state):
    folder = tmp_path / "hub"
    with real_hub.serving(folder) as hub:
        hub.org("acme")
        hub.user("ada", acme="admin")
        client = hub.as_user("ada")
        for name in ("acme/x", "acme/y"):
            create(client, name)
            commit(client, name, {"README.md": f"# About {name}\n".encode(), "a.md": b"a"})
        client.post("/api/models/acme/x/tag/main", json={"tag": "v1"})
    place, bucket = new_state()
    with pytest.raises(ConfigError, match="no bucket"):
        restore_hub(folder, place)
    assert restore_hub(folder, place, bucket) == 4
    with pytest.raises(OutputError, match="has a hub"):
        restore_hub(folder, place, bucket)
    answers = []
    for source in (folder, place):
        with real_hub.serving(source, blobs=None) as moved:
            moved.tokens = hub.tokens
            answers.append(facts(moved.as_user("ada")))
    assert answers[0] == answers[1]
    with real_hub.serving(place) as moved:
        moved.tokens = hub.tokens
        client = moved.as_user("ada")
        create(client, "acme/z")  # its id is not one of those that were copied
        commit(client, "acme/z", {"a.md": b"new"})
        answers[1] = facts(client)
        assert verify_hub(moved.hub) == []
        assert backup_hub(place, tmp_path / "back") == 5
    with real_hub.serving(tmp_path / "back") as back:
        back.tokens = hub.tokens
        assert facts(back.as_user("ada")) == answers[1]
        assert verify_hub(back.hub) == []


def facts(client):
    """Return what a client can see of a hub."""
    found = client.get("/api/models?search=about&sort=lastModified").json()
    refs = client.get("/api/models/acme/x/refs").json()
    data = client.get("/acme/x/resolve/v1/README.md").content
    whoami = client.get("/api/whoami-v2").json()
    return [item["id"] for item in found], refs, data, whoami["name"], whoami["orgs"]


def test_an_upgrade_changes_all_or_nothing(made, tmp_path):
    newer = real_hub.write_changes(tmp_path / "versions")
    change = newer / f"r{real_hub.NEXT}_reason.py"
    change.write_text(f"{real_hub.CHANGE}    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        upgrade_hub(made.place, newer)
    assert schema_revision(made.place) == SCHEMA_REVISION
    change.write_text(real_hub.CHANGE)
    assert upgrade_hub(made.place, newer) == SCHEMA_REVISION
    with pytest.raises(FileError, match="newer adapterhub"), open_hub(made.place):
        pass


def test_what_is_wrong_is_said_before_anything_is_served(new_state, tmp_path):
    place, bucket = new_state()
    with pytest.raises(ConfigError, match="no bucket for its files"):
        create_hub(place)
    with pytest.raises(ConfigError, match="not a bucket"):
        create_hub(place, str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be used"):
        create_hub(place, "s3://missing/prefix")
    with pytest.raises(ConfigError, match="no hub"), open_hub(place):
        pass
    create_hub(place, bucket)
    create_hub(place, f"{bucket}/")
    with pytest.raises(ConfigError, match="the files of this hub are in"):
        create_hub(place, f"{bucket}-2")
    with pytest.raises(ConfigError, match="has its files there"):
        create_hub(tmp_path / "hub", bucket)
    secret = make_url(f"postgresql://ada:hunter2@127.0.0.1:1/{place.database}")
    with pytest.raises(ConfigError, match="cannot be used") as error:
        PostgresDatabase(secret)
    assert "hunter2" not in str(error.value)
    assert re.search(r"postgresql://ada:\*\*\*@", str(error.value))
