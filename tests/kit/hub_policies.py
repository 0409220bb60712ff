"""Random writes to a hub by users of each role, and what holds for all that can be downloaded.

What holds is computed here anew, from the rows and the files, and not by the hub's own checks.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from safetensors.numpy import save
from sqlalchemy import select

from adapterhub.files.native import Saved
from adapterhub.files.signature import Statement, parse_signatures, sign_statement
from adapterhub.files.signature import signatures_to_json as signature_file
from adapterhub.hub.accounts import change_owner, find_owner
from adapterhub.hub.commits import Tree, read_tree
from adapterhub.hub.content_policy import NamespaceRules, parse_rules, rules_text
from adapterhub.hub.database import (
    blobs,
    commits,
    grants,
    namespaces,
    now_text,
    promises,
    refs,
    repositories,
    versions,
)
from adapterhub.registry.version_files import beside_bytes
from tests.kit import sample_adapters, signing
from tests.kit.commit_body import lines
from tests.kit.real_hub import RunningHub

ROLES = ("root", "ada", "wil", "eve")
_PLACES = ("acme", "ada", "wil", "eve")
_PEFT = {
    "adapter_config.json": b'{"peft_type": "LORA", "base_model_name_or_path": "acme/bert"}',
    "adapter_model.safetensors": save({"a": np.zeros(8, "float32")}),
}


def set_rules(hub: RunningHub, name: str, quota: int | None = None, **rules: Any) -> None:
    """Set the rules of a namespace."""
    with hub.hub.database.writing() as connection:
        owner = find_owner(connection, name)
        assert owner is not None
        change_owner(connection, owner.id, rules_text(NamespaceRules(**rules)), quota)


class Writers:
    """Users who write at random; `write` does one thing and returns what, and its status.

    Args:
        hub: the hub, with the users of the tests' hubs.
        chance: what decides.
        folder: for adapters.
        stack: closes their connections.
    """

    def __init__(
        self, hub: RunningHub, chance: random.Random, folder: Path, stack: ExitStack
    ) -> None:
        self.hub, self.chance, self.folder = hub, chance, folder
        self.key = signing.new_key()
        set_rules(hub, "acme", 30_000, signers=(self.key.public.id,), protected=("prod*",))
        set_rules(hub, "ada", allowed=("pickle", "contents"))
        set_rules(hub, "wil", 4_000)
        self.clients = {user: stack.enter_context(hub.client(user)) for user in ROLES}
        self.made, self.asked = 0, []  # adapters that were written; uploads that were requested
        self.kept: list[tuple[str, str, int]] = []  # that were sent: repository, sha256, size
        for place in _PLACES:
            for name in ("x", "y"):
                body = {"organization": place, "name": name}
                self.clients["root"].post("/api/repos/create", json=body)

    def write(self) -> tuple[str, int]:
        """Do one thing as one user."""
        names = [
            self._adapter, self._adapter, self._adapter, self._files, self._files, self._removal,
            self._batch, self._upload, self._large, self._tag, self._tag, self._own_tag,
            self._untag, self._branch, self._unbranch, self._move, self._create, self._version,
            self._back,
        ]  # fmt: skip
        chosen = self.chance.choice(names)
        client = self.clients[self.chance.choice(("root", "ada", "ada", "wil", "eve"))]
        answer = chosen(client, self._name())
        return chosen.__name__, answer.status_code if answer is not None else 0

    def _name(self) -> str:
        return f"{self.chance.choice(_PLACES)}/{self.chance.choice('xy')}"

    def _branch_name(self) -> str:
        return self.chance.choice(("main", "main", "dev"))

    def _commit(self, client: httpx2.Client, name: str, *args: Any, **options: Any) -> Any:
        body = lines(*args, **options)
        return client.post(f"/api/models/{name}/commit/{self._branch_name()}", content=body)

    def _adapter(self, client: httpx2.Client, name: str) -> Any:
        """Commit an adapter, whole or not, signed or not."""
        self.made += 1
        made = sample_adapters.write(self.folder / f"random-{self.made}", self.made)
        files = {path.name: path.read_bytes() for path in made.iterdir()}
        own = self.chance.choice((name, name, "eve/other"))
        version = self.chance.choice((None, None, "v1", "v2"))
        if self.chance.random() < 0.8:
            statement = Statement(Saved.at(made).digest, own, version)
            files["adapter.sig"] = signature_file([sign_statement(statement, self.key)])
        if self.chance.random() < 0.3:
            files |= _PEFT
            data = beside_bytes(Saved.at(made).digest, _PEFT)
            statement = Statement(hashlib.sha256(data).hexdigest(), own, version)
            files["beside.json"] = data
            files["beside.sig"] = signature_file([sign_statement(statement, self.key)])
        if self.chance.random() < 0.2:
            del files[self.chance.choice([*files])]
        return self._commit(client, name, files)

    def _files(self, client: httpx2.Client, name: str) -> Any:
        """Commit files that some namespaces take, and others not."""
        self.made += 1
        number = np.full(4, self.made, "float32")
        files = self.chance.choice(
            [
                {"a.md": b"%d" % self.made * 400},
                {"a.bin": b"%d" % self.made},
                {"b.md": pickle.dumps(self.made)},
                {"adapter.safetensors": save({"encoder.0.attn.q.lora.a": number})},
                {"in/model.safetensors": save({"a": number})},
                {f"in/{path}": data for path, data in _PEFT.items()},
                _PEFT,
            ]
        )
        return self._commit(client, name, files)

    def _removal(self, client: httpx2.Client, name: str) -> Any:
        wrong = ("adapter.json", "adapter.sig", "adapter.safetensors", "a.bin", "beside.json")
        return self._commit(client, name, deleted=[self.chance.choice(wrong)])

    def _batch(self, client: httpx2.Client, name: str) -> Any:
        self.made += 1
        data = b"%d," % self.made * self.chance.choice((100, 500, 2000))
        oid = hashlib.sha256(data).hexdigest()
        body = {"operation": "upload", "objects": [{"oid": oid, "size": len(data)}]}
        answer = client.post(f"/{name}.git/info/lfs/objects/batch", json=body)
        if answer.status_code == 200:
            (found,) = answer.json()["objects"]
            self.asked.append((name, found["actions"]["upload"]["href"], data))
        return answer

    def _upload(self, client: httpx2.Client, name: str) -> Any:
        if not self.asked:
            return None
        name, href, data = self.asked.pop(self.chance.randrange(len(self.asked)))
        answer = client.put(href, content=data)
        if answer.status_code == 200:
            self.kept.append((name, hashlib.sha256(data).hexdigest(), len(data)))
        return answer

    def _large(self, client: httpx2.Client, name: str) -> Any:
        """Commit what was sent before, under a name that is taken or not."""
        if not self.kept:
            return None
        name, sha256, size = self.chance.choice(self.kept)
        path = self.chance.choice(("c.md", "c.md", "in/c.bin", "adapter_config.json"))
        return self._commit(client, name, large={path: (sha256, size)})

    def _revision(self, client: httpx2.Client, name: str) -> str:
        listed = client.get(f"/api/models/{name}/commits/main")
        known = [each["id"] for each in listed.json()] if listed.status_code == 200 else []
        return self.chance.choice([*known, "main", "main", "dev"])

    def _tag(self, client: httpx2.Client, name: str) -> Any:
        tag = self.chance.choice(("v1", "v2", "v3", "v4", "v900", "best", "prod-1"))
        url = f"/api/models/{name}/tag/{self._revision(client, name)}"
        return client.post(url, json={"tag": tag})

    def _own_tag(self, client: httpx2.Client, name: str) -> Any:
        tag = self.chance.choice(("v1", "v2", "v3", "best", "prod-1"))
        body = {"revision": self._revision(client, name)}
        return client.put(f"/api/adapterhub/models/{name}/tag/{tag}", json=body)

    def _untag(self, client: httpx2.Client, name: str) -> Any:
        return client.delete(f"/api/models/{name}/tag/{self.chance.choice(('v1', 'best'))}")

    def _branch(self, client: httpx2.Client, name: str) -> Any:
        body = {"startingPoint": self._revision(client, name)}
        return client.post(f"/api/models/{name}/branch/dev", json=body)

    def _unbranch(self, client: httpx2.Client, name: str) -> Any:
        return client.delete(f"/api/models/{name}/branch/dev")

    def _move(self, client: httpx2.Client, name: str) -> Any:
        body = {"fromRepo": name, "toRepo": self._name()}
        return client.post("/api/repos/move", json=body)

    def _create(self, client: httpx2.Client, name: str) -> Any:
        owner, _, own = name.partition("/")
        body = {"organization": owner, "name": own}
        answer = client.post("/api/repos/create", json=body)
        if answer.status_code == 409 and self.chance.random() < 0.3:
            return client.request("DELETE", "/api/repos/delete", json=body)
        return answer

    def _version(self, client: httpx2.Client, name: str) -> Any:
        version = self.chance.choice(("v1", "v2"))
        return client.delete(f"/api/adapterhub/models/{name}/versions/{version}")

    def _back(self, client: httpx2.Client, name: str) -> Any:
        """Commit the files of an earlier commit again, which needs no upload."""
        revision = self._revision(client, name)
        listed = client.get(f"/api/models/{name}/revision/{revision}?blobs=true")
        if listed.status_code != 200:
            return listed
        large = {}
        for each in listed.json()["siblings"]:
            data = client.get(f"/{name}/resolve/{revision}/{each['rfilename']}").content
            large[each["rfilename"]] = (hashlib.sha256(data).hexdigest(), len(data))
        return self._commit(client, name, large=large)


def broken_promises(hub: RunningHub) -> list[str]:
    """List what of all that can be downloaded the rules of its namespace do not allow."""
    with hub.hub.database.reading() as connection:
        rows = connection.execute(
            select(repositories.c.id, repositories.c.name, commits.c.oid, commits.c.tree)
            .add_columns(namespaces.c.rules)
            .join(commits, commits.c.repository == repositories.c.id)
            .join(namespaces, namespaces.c.id == repositories.c.namespace)
            .where(commits.c.is_removed.is_(False))
        ).all()
        served = {(row.id, row.oid): read_tree(connection, row.tree) for row in rows}
        found = []
        for row in rows:
            rules, tree = parse_rules(row.rules), served[row.id, row.oid]
            problems = [
                *_of_contents(hub, tree, rules),
                *_of_signatures(hub, tree, row.name, rules),
            ]
            found += [f"{row.name}@{row.oid[:8]}: {problem}" for problem in problems]
        for repository, number, commit in connection.execute(
            select(versions.c.repository, versions.c.number, versions.c.commit)
        ):
            tree = served.get((repository, commit), {})
            found += [f"v{number}: {problem}" for problem in _of_version(hub, tree)]
        for ref in connection.execute(select(refs)):
            if (ref.repository, ref.commit) not in served:
                found.append(f"{ref.kind} {ref.name} names what is gone")
        found += _of_quotas(connection)
    return found


def _of_contents(hub: RunningHub, tree: Tree, rules: NamespaceRules) -> Iterator[str]:
    for path, blob in tree.items():
        data = hub.hub.blobs.read(blob.sha256, 2)
        if "pickle" not in rules.allowed and (path.endswith(".bin") or data[:1] == b"\x80"):
            yield f"{path} is a pickle"


def _of_signatures(hub: RunningHub, tree: Tree, name: str, rules: NamespaceRules) -> Iterator[str]:
    if not rules.signers:
        return
    for path, blob in tree.items():
        folder, slash, own = path.rpartition("/")
        if not own.endswith((".safetensors", "adapter_config.json", "adapter.json", ".bin")):
            continue
        signed: dict[str, str] = {}
        for file in ("adapter", "beside"):
            listed, signature = (
                tree.get(f"{folder}{slash}{file}.{kind}") for kind in ("json", "sig")
            )
            if listed and signature:
                for each in parse_signatures(hub.hub.blobs.read(signature.sha256, 5000)):
                    is_own = each.statement.name in (name, name.partition("/")[2])
                    is_own = is_own and each.statement.digest == listed.sha256
                    if is_own and each.is_valid and each.signer.id in rules.signers:
                        data = json.loads(hub.hub.blobs.read(listed.sha256, 1 << 20))
                        signed |= {f"{file}.json": listed.sha256, **data["files"]}
        if signed.get(own) != blob.sha256:
            yield f"{path} is not signed"


def _of_version(hub: RunningHub, tree: Tree) -> Iterator[str]:
    if manifest := tree.get("adapter.json"):
        wanted = json.loads(hub.hub.blobs.read(manifest.sha256, 1 << 20))["files"]
        tensors = tree.get("adapter.safetensors")
        if tensors is None or {"adapter.safetensors": tensors.sha256} != wanted:
            yield "it is not whole"


def _of_quotas(connection: Any) -> Iterator[str]:
    for owner in connection.execute(select(namespaces).where(namespaces.c.quota.is_not(None))):
        here = select(repositories.c.id).where(repositories.c.namespace == owner.id)
        sizes = dict(
            connection.execute(
                select(promises.c.sha256, promises.c.size).where(
                    promises.c.repository.in_(here), promises.c.expires > now_text()
                )
            ).all()
        )
        sizes |= dict(
            connection.execute(
                select(blobs.c.sha256, blobs.c.size)
                .join(grants, grants.c.sha256 == blobs.c.sha256)
                .where(grants.c.repository.in_(here))
            ).all()
        )
        if sum(sizes.values()) > owner.quota:
            yield f"{owner.name} has {sum(sizes.values())} of {owner.quota} bytes"
