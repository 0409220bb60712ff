"""A Hugging Face Hub in this process, and one that attacks its clients."""

import base64
import contextlib
import hashlib
import json
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

# A Hugging Face Hub in this process: the few endpoints that publishing and pulling use.
#
# All data is in memory. Every file is reported as `regular`, not LFS, so its bytes are sent with
# the commit. `Hub.tokens` maps a token to its role, "read" or "write"; if empty, anyone may write.


Attack = Callable[[Any], bool]


@dataclass
class Repository:
    """The commits of one repository, each an (oid, files) pair, and its tags."""

    private: bool = False
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes]) -> str:
        """Append a commit and return its oid."""
        state = repr((len(self.commits), sorted(files.items())))
        oid = hashlib.sha1(state.encode()).hexdigest()
        self.commits.append((oid, files))
        return oid

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit of a branch, tag or oid, or None."""
        if revision in ("main", "HEAD"):
            return self.commits[-1]
        oid = self.tags.get(revision, revision)
        return next((pair for pair in self.commits if pair[0] == oid), None)


@dataclass
class Hub:
    """The server's state, and the failures that a test can inject."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: list[str] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)  # of each request
    cut_after: int | None = None  # drop the connection of the next download after this many bytes
    resumed_at: list[int] = field(default_factory=list)
    attack: Attack | None = None  # answers in place of a hostile hub
    stopped: threading.Event = field(default_factory=threading.Event)
    before_commit: Any = None  # called after a client has read the head, before it commits

    def add(self, name: str, files: dict[str, bytes]) -> Repository:
        """Add a repository with one commit."""
        repository = self.repositories[name] = Repository()
        repository.commit(files)
        return repository

    def refuse_writers(self) -> Callable[[], None]:
        """Know no token of the test any more; return what undoes that."""
        self.tokens = {"somebody else's": "write"}
        return self.tokens.clear


class Failure(Exception):
    """An HTTP error response."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class Handler(BaseHTTPRequestHandler):
    """The request handler."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits for the acknowledgement of its head
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def handle_any(self) -> None:
        """Answer the request, or send an error with the Hub's headers."""
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        self.url = urlsplit(self.path)
        self.parts = [unquote(part) for part in self.url.path.strip("/").split("/")]
        self.query = parse_qs(self.url.query)
        self.hub.requests.append(f"{self.command} {self.url.path}")
        self.hub.authorizations.append(self.headers.get("Authorization"))
        try:
            self.answer()
        except Failure as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.message}
            data = json.dumps({"error": error.message}).encode()
            self.send(error.status, data, {k: v for k, v in headers.items() if v})

    do_GET = do_HEAD = do_POST = do_DELETE = handle_any

    def answer(self) -> None:
        if self.parts[0] == "api":
            self.api(*self.parts[1:])
        elif len(self.parts) >= 5 and self.parts[2] == "resolve":
            self.file("/".join(self.parts[:2]), self.parts[3], "/".join(self.parts[4:]))
        else:
            raise Failure(404)

    def api(self, *parts: str) -> None:
        if parts == ("repos", "create"):
            self.create(json.loads(self.body))
        elif parts == ("models",):
            names = (name for name in self.hub.repositories if self.matches_query(name))
            self.json([self.info(name) for name in names])
        elif parts[0] == "models" and len(parts) >= 3:
            self.model("/".join(parts[1:3]), *parts[3:])
        else:
            self.json({})

    def model(self, name: str, *parts: str) -> None:
        repository = self.readable_repository(name)
        if not parts:
            self.json(self.info(name))
        elif parts[0] == "revision":
            self.json(self.info(name, parts[1]))
        elif parts[0] == "tree":
            files = self.files(repository, parts[1])[1]
            self.json([{"type": "file", "path": p, **sizes(d)} for p, d in sorted(files.items())])
        elif parts[0] == "refs":
            tags = [{"name": t, "ref": f"refs/tags/{t}", "targetCommit": oid}
                    for t, oid in repository.tags.items()]  # fmt: skip
            head = repository.commits[-1][0]
            branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": head}
            self.json({"branches": [branch], "converts": [], "tags": tags})
        else:
            self.write(name, repository, *parts)

    def write(self, name: str, repository: Repository, verb: str, *rest: str) -> None:
        self.require_write()
        if verb == "preupload":
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for file in json.loads(self.body)["files"]]  # fmt: skip
            self.json({"files": files})
        elif verb == "commit":
            self.commit(name, repository)
        elif verb == "tag" and self.command == "POST":
            tag = json.loads(self.body)["tag"]
            if tag in repository.tags:
                raise Failure(409, message="Tag exists")
            repository.tags[tag] = self.files(repository, rest[0])[0]
            self.json({})
        elif verb == "tag":
            del repository.tags[rest[0]]
            self.json({})
        else:
            raise Failure(404)

    def commit(self, name: str, repository: Repository) -> None:
        if self.hub.before_commit is not None:
            before_commit, self.hub.before_commit = self.hub.before_commit, None
            before_commit()
        header, files = {}, {}
        for line in self.body.decode().splitlines():
            item = json.loads(line)
            if item["key"] == "header":
                header = item["value"]
            else:
                files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
        with self.hub.lock:
            head, old = repository.commits[-1]
            if header.get("parentCommit") not in (None, head):
                raise Failure(412, message="The head has moved")
            oid = repository.commit({**old, **files})
        address = f"http://{self.headers['Host']}"
        self.json({"commitUrl": f"{address}/{name}/commit/{oid}", "commitOid": oid})

    def create(self, options: dict[str, Any]) -> None:
        self.require_write()
        name = f"{options['organization'] or 'me'}/{options['name']}"
        url = f"http://{self.headers['Host']}/{name}"
        if name in self.hub.repositories:
            self.json({"url": url}, 409)
            return
        private = options.get("private") or options.get("visibility") == "private"
        self.hub.repositories[name] = Repository(bool(private))
        self.hub.repositories[name].commit({".gitattributes": b""})
        self.json({"url": url})

    def file(self, name: str, revision: str, path: str) -> None:
        oid, files = self.files(self.readable_repository(name), revision)
        if path not in files:
            raise Failure(404, "EntryNotFound")
        data = files[path]
        start = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        headers = {"X-Repo-Commit": oid, "ETag": f'"{git_sha1(data)}"',
                   "Accept-Ranges": "bytes"}  # fmt: skip
        if start:
            self.hub.resumed_at.append(start)
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.send(206 if start else 200, data[start:], headers)

    def files(self, repository: Repository, revision: str) -> tuple[str, dict[str, bytes]]:
        commit = repository.at(revision)
        if commit is None:
            raise Failure(404, "RevisionNotFound", "No such revision")
        return commit

    def info(self, name: str, revision: str = "main") -> dict[str, Any]:
        repository = self.hub.repositories[name]
        oid, files = self.files(repository, revision)
        card = card_data(files)
        siblings = [{"rfilename": path, **self.blob(files[path])} for path in sorted(files)]
        return {
            "_id": oid, "id": name, "modelId": name, "sha": oid, "private": repository.private,
            "author": name.partition("/")[0], "tags": tags(card), "downloads": 0, "likes": 0,
            "cardData": card, "siblings": siblings,
        }  # fmt: skip

    def blob(self, data: bytes) -> dict[str, Any]:
        asked = self.query.get("blobs") == ["true"]
        return {"size": len(data), "blobId": git_sha1(data)} if asked else {}

    def matches_query(self, name: str) -> bool:
        if self.hub.repositories[name].private and not self.role():
            return False
        filters = {tag for tags in self.query.get("filter", []) for tag in tags.split(",")}
        text = self.query.get("search", [""])[0].lower()
        return filters <= set(self.info(name)["tags"]) and text in name.lower()

    def role(self) -> str:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and self.hub.tokens and token not in self.hub.tokens:
            raise Failure(401, message="Invalid credentials in Authorization header")
        return self.hub.tokens.get(token, "" if self.hub.tokens else "write")

    def require_write(self) -> None:
        role = self.role()
        if role != "write":
            raise Failure(403 if role else 401, message="This token may not write")

    def readable_repository(self, name: str) -> Repository:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self.role()):
            raise Failure(404, "RepoNotFound", "Repository not found")
        return repository

    def json(self, value: Any, status: int = 200) -> None:
        self.send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cut_after is not None and "ETag" in headers and len(data) > self.hub.cut_after:
            data, self.hub.cut_after = data[: self.hub.cut_after], None
            self.close_connection = True
        self.wfile.write(data)


def sizes(data: bytes) -> dict[str, Any]:
    """Return the size and oid of a file in a listing."""
    return {"size": len(data), "oid": git_sha1(data)}


def git_sha1(data: bytes) -> str:
    """Return git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def card_data(files: dict[str, bytes]) -> dict[str, Any]:
    """Parse the YAML front matter of a model card."""
    text = files.get("README.md", b"").decode()
    return yaml.safe_load(text.split("---")[1]) or {} if text.startswith("---") else {}


def tags(card: dict[str, Any]) -> list[str]:
    """Return the tags that the Hub derives from a card."""
    base = card.get("base_model")
    relation = f":{card['base_model_relation']}" if "base_model_relation" in card else ""
    derived = [f"base_model:{base}", f"base_model{relation}:{base}"] if base else []
    return [*card.get("tags", []), *derived]


class Server(ThreadingHTTPServer):
    """The server; a client that closes its connection early is not an error."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


@contextmanager
def serving(kind: type[Handler] = Handler, address: str = "127.0.0.1") -> Iterator[tuple[Hub, str]]:
    """Run a hub on this machine; yield it with its URL."""
    hub = Hub()
    server = Server((address, 0), type("Bound", (kind,), {"hub": hub}))
    # The default is to look every half second whether to stop, and each test waits for that.
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub, f"http://{address}:{server.server_port}"
    finally:
        hub.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()


# A hub that attacks its clients, on top of the honest one.
#
# `hub.attack` is called with the handler of each request before the honest answer; it returns True
# if it has answered. The functions below make such attacks.


class HostileHandler(Handler):
    """The honest handler, unless the attack answers."""

    def answer(self) -> None:
        """Let the attack answer, or answer honestly."""
        attack = self.hub.attack
        if attack is None or not attack(self):
            super().answer()

    do_GET = do_HEAD = do_POST = do_DELETE = do_PUT = Handler.handle_any

    def raw(self, data: bytes) -> None:
        """Send bytes as they are, and close the connection."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.write(data)

    def head(self, headers: dict[str, str] | None = None, status: str = "200 OK") -> None:
        """Send a status line and headers, with nothing added."""
        lines = [f"HTTP/1.1 {status}", *(f"{k}: {v}" for k, v in (headers or {}).items()), "", ""]
        self.raw("\r\n".join(lines).encode("latin-1"))


@contextmanager
def attacking(address: str = "127.0.0.1") -> Iterator[Any]:
    """Run a hostile hub; yield it with its URL as `address`."""
    with serving(HostileHandler, address) as (hub, url):
        hub.address, hub.port = url, int(url.rpartition(":")[2])
        yield hub


def on(pattern: str, act: Callable[[Any], Any], method: str = "") -> Attack:
    """Attack the requests whose path matches a pattern."""

    def attack(handler: Any) -> bool:
        if method not in ("", handler.command) or not re.search(pattern, handler.path):
            return False
        act(handler)
        return True

    return attack


def either(*attacks: Attack) -> Attack:
    """Attack with the first of several attacks that answers."""
    return lambda handler: any(attack(handler) for attack in attacks)


def flood(handler: Any) -> None:
    """Send a chunked body that never ends."""
    handler.head({"Transfer-Encoding": "chunked", "Content-Type": "application/json"})
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with contextlib.suppress(OSError):
        while not handler.hub.stopped.is_set():
            handler.wfile.write(chunk)


def endless(text: bytes, seconds: float = 0.0) -> Callable[[Any], None]:
    """Send the same bytes for ever."""

    def act(handler: Any) -> None:
        handler.close_connection = True
        with contextlib.suppress(OSError):
            while not handler.hub.stopped.is_set():
                handler.wfile.write(text)
                time.sleep(seconds)

    return act


def drip(start: bytes, seconds: float = 0.02) -> Callable[[Any], None]:
    """Send the start of an answer, and then one byte after the other."""

    def act(handler: Any) -> None:
        handler.raw(start)
        endless(b"1", seconds)(handler)

    return act


def silence(handler: Any) -> None:
    """Never answer."""
    handler.close_connection = True
    handler.hub.stopped.wait(20)


def body(data: bytes | object, **headers: str) -> Callable[[Any], None]:
    """Send a body; an object as JSON."""
    payload = data if isinstance(data, bytes) else json.dumps(data).encode()

    def act(handler: Any) -> None:
        handler.send(200, payload, {k.replace("_", "-"): v for k, v in headers.items()})

    return act


def claimed(size: int) -> Callable[[Any], None]:
    """Announce a body of some size, and send a part of it."""

    def act(handler: Any) -> None:
        handler.head({"Content-Length": str(size)})
        handler.raw(b"{" * min(size, 1000))

    return act


def bomb(size: int, encoding: str = "gzip") -> Callable[[Any], None]:
    """Send a compressed body that grows a thousandfold."""
    packer = zlib.compressobj(wbits=31)
    data = packer.compress(bytes(size)) + packer.flush()
    return body(data, Content_Encoding=encoding)


def redirect(location: str | Callable[[Any], str], status: int = 302) -> Callable[[Any], None]:
    """Redirect to a URL."""

    def act(handler: Any) -> None:
        target = location if isinstance(location, str) else location(handler)
        handler.head({"Location": target, "Content-Length": "0"}, f"{status} Moved")

    return act


def echo(status: int, code: str = "") -> Callable[[Any], None]:
    """Answer with an error that repeats the token in every place, with terminal escapes."""

    def act(handler: Any) -> None:
        token = (handler.headers.get("Authorization") or "").removeprefix("Bearer ")
        text = f"\x1b]0;{token}\x07 {token[::-1]} {token.encode().hex()} \x1b[2J {token}"
        data = json.dumps({"error": text, "errors": [{"message": text}]}).encode()
        headers = {"X-Error-Message": token, "X-Error-Code": code or token, "X-Request-Id": token,
                   "X-HF-Warning": f"t; {token}", "Content-Length": str(len(data)),
                   "Content-Type": "application/json"}  # fmt: skip
        handler.head(headers, f"{status} {token}")
        handler.raw(data)

    return act


def honest_but(**headers: str) -> Attack:
    """Answer honestly, with other headers in addition."""

    def attack(handler: Any) -> bool:
        send = type(handler).__mro__[2].send

        def with_headers(status: int, data: bytes, own: dict[str, str]) -> None:
            more = {key.replace("_", "-"): value for key, value in headers.items()}
            kept = {k: v for k, v in own.items() if k.lower() not in {m.lower() for m in more}}
            send(handler, status, data, {**kept, **more})

        handler.send = with_headers
        return False

    return attack
