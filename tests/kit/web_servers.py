"""Web servers that send a folder, and one with the protocol of S3, each on a port of its own."""

from __future__ import annotations

import logging
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    address = Address(f"http://127.0.0.1:{server.server_port}")
    address.requests = handler.requests
    try:
        yield address
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
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    request = urllib.request.Request(f"{address}/bucket", method="PUT")
    request.add_header("authorization", "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/x")
    urllib.request.urlopen(request, timeout=10).close()
    try:
        yield {
            "endpoint": address, "access_key_id": "k", "secret_access_key": "s",
            "region": "us-east-1", "client_options": {"allow_http": True},
            "virtual_hosted_style_request": False,
        }  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
