"""Bodies of commits, as clients send them."""

from __future__ import annotations

import base64
import json


def lines(files=None, *, parent=None, title="change", large=None, deleted=(), folders=()):
    """Return the body of a commit."""
    header = {"summary": title, "description": ""}
    if parent:
        header["parentCommit"] = parent
    items = [{"key": "header", "value": header}]
    for path, data in (files or {}).items():
        content = base64.b64encode(data).decode()
        value = {"content": content, "path": path, "encoding": "base64"}
        items.append({"key": "file", "value": value})
    for path, (oid, size) in (large or {}).items():
        value = {"path": path, "algo": "sha256", "oid": oid, "size": size}
        items.append({"key": "lfsFile", "value": value})
    items += [{"key": "deletedFile", "value": {"path": path}} for path in deleted]
    items += [{"key": "deletedFolder", "value": {"path": path}} for path in folders]
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)


def create(client, name, *, private=False, type="model"):
    """Create a repository; return its name."""
    owner, _, own = name.partition("/")
    visibility = "private" if private else "public"
    body = {"name": own, "organization": owner, "visibility": visibility, "type": type}
    answer = client.post("/api/repos/create", json=body)
    assert answer.status_code == 200, answer.text
    return name


def commit(client, name, files=None, *, revision="main", **options):
    """Commit files; return the answer."""
    url = f"/api/models/{name}/commit/{revision}"
    return client.post(url, content=lines(files, **options))


def head(client, name):
    """Return the head of `main`."""
    return client.get(f"/api/models/{name}").json()["sha"]
