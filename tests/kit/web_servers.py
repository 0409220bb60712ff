"""Web servers on ports of their own, a client of one request, and a browser."""

import html.parser
import http.client
import importlib.util
import json
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# Web servers that send a folder, and one with the protocol of S3, each on a port of its own.


NGINX = """
daemon off; master_process off; pid {run}/pid; error_log {run}/errors;
events {{}}
http {{
  access_log off; gzip on; gzip_types *; default_type application/octet-stream;
  client_body_temp_path {run}/body; proxy_temp_path {run}/proxy; fastcgi_temp_path {run}/fastcgi;
  uwsgi_temp_path {run}/uwsgi; scgi_temp_path {run}/scgi;
  server {{ listen 127.0.0.1:{port}; root {folder}; }}
}}
"""


class Handler(SimpleHTTPRequestHandler):
    """Sends files; `answer` may answer in its place, and `requests` has what was asked."""

    answer = None
    requests = ()

    def do_GET(self):
        self.requests.append((self.path, dict(self.headers)))
        if self.answer is None or not self.answer():
            super().do_GET()

    def log_message(self, *_):
        pass


@contextmanager
def python(folder, answer=None):
    """Serve a folder by Python's server; yield the address, with `requests` of it."""
    handler = type("Own", (Handler,), {"answer": answer, "requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    with in_thread(server) as address:
        address = Address(address)
        address.requests = handler.requests
        yield address


@contextmanager
def in_thread(server):
    """Run a server of sockets in a thread; yield its address."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Address(str):
    """The address of a server, which can have attributes."""


@contextmanager
def nginx(folder):
    """Serve a folder by nginx, which compresses and sends tags; yield the address."""
    with tempfile.TemporaryDirectory() as run, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        config = Path(run) / "nginx.conf"
        config.write_text(NGINX.format(run=run, port=port, folder=folder))
        Path(run).chmod(0o755)
        process = subprocess.Popen(["nginx", "-c", str(config), "-e", f"{run}/errors"])
        try:
            wait_for(f"http://127.0.0.1:{port}")
            yield Address(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait()


def wait_for(address):
    """Wait until a server answers anything."""
    for _ in range(100):
        try:
            urllib.request.urlopen(address, timeout=1).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"{address} does not answer")


@contextmanager
def moto():
    """Serve S3 by moto, a request at a time, as it has no locks; yield obstore's options."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=False)
    with in_thread(server) as address:
        request = urllib.request.Request(f"{address}/bucket", method="PUT")
        request.add_header("authorization", "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/x")
        urllib.request.urlopen(request, timeout=10).close()
        yield {
            "endpoint": address, "access_key_id": "k", "secret_access_key": "s",
            "region": "us-east-1", "client_options": {"allow_http": True},
            "virtual_hosted_style_request": False,
        }  # fmt: skip


# A client of a server in tests: one request, its status, headers and JSON.


@dataclass(frozen=True)
class HttpAnswer:
    """What a server has answered."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.data)

    @property
    def message(self) -> str:
        """The words of an error, in either form."""
        error = self.json["error"]
        return str(error["message"] if isinstance(error, dict) else error)


def ask(
    url: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
    seconds: float = 60,
) -> HttpAnswer:
    """Send a request, with a body as JSON unless it is bytes."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=seconds)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers or {})
        answer = connection.getresponse()
        return HttpAnswer(answer.status, dict(answer.headers), answer.read())
    finally:
        connection.close()


def predict(url: str, model: str, *inputs: Any, **more: Any) -> HttpAnswer:
    """Ask /v1/predict; `token` is sent as a header."""
    token = more.pop("token", None)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return ask(url, "/v1/predict", {"model": model, "inputs": list(inputs), **more}, headers)


# Pages: parsed, and in chromium without a screen.
#
# AXE=path/to/axe.min.js    or npm install --no-save --prefix build axe-core


MISSING = [
    *(name for name in ("chromedriver", "chromium") if shutil.which(name) is None),
    *(["selenium"] if importlib.util.find_spec("selenium") is None else []),
]
ROOT = Path(__file__).parents[2]
AXE = Path(os.environ.get("AXE", ROOT / "build/node_modules/axe-core/axe.min.js"))
FOCUSED = "return document.activeElement.outerHTML.slice(0, 200)"


VOID = {"meta", "link", "br", "img", "hr", "input"}


class ParsedPage(html.parser.HTMLParser):
    """The elements, scripts and addresses of a page, whose tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)

    def values(self, *names: str) -> list[str]:
        """Return the values of attributes, of all elements."""
        return [own[name] for _, own in self.elements for name in names if name in own]


def browser(*, scripts: bool = True) -> Any:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    if not scripts:
        setting = "profile.managed_default_content_settings.javascript"
        options.add_experimental_option("prefs", {setting: 2})
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def shown_as(driver: Any, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def overflow(driver: Any) -> int:
    metrics = driver.execute_cdp_cmd("Page.getLayoutMetrics", {})
    return metrics["cssContentSize"]["width"] - metrics["cssLayoutViewport"]["clientWidth"]


def axe_findings(driver: Any) -> list[Any]:
    """What axe-core finds on the page that is shown."""
    # By the debugger's protocol: the page's policy allows no further script.
    driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text(encoding="utf-8")})
    return driver.execute_async_script(
        "const done = arguments[0]; axe.run().then((r) => done(r.violations.map("
        "(v) => [v.id, v.nodes.map((n) => n.html.slice(0, 160)).slice(0, 3)])))"
    )


def press(driver: Any, *keys: str) -> None:
    """Press keys, wherever the focus is."""
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


def tab_to(driver: Any, text: str) -> None:
    """Press Tab until the focus is on an element with this text; it must be seen to be there."""
    from selenium.webdriver.common.keys import Keys

    for _ in range(60):
        press(driver, Keys.TAB)
        if text in driver.execute_script(FOCUSED):
            style = "return getComputedStyle(document.activeElement).outlineStyle"
            assert driver.execute_script(style) != "none"
            return
    raise AssertionError(f"{text} cannot be reached")


def answering(status, headers=(), body=b"", only=""):
    """Return an answer to requests whose path ends so."""

    def answer(handler):
        if not handler.path.endswith(only):
            return False
        handler.send_response(status)
        for name, value in dict(headers).items():
            handler.send_header(name, value)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return True

    return answer
