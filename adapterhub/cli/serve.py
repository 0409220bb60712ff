"""`adapterhub serve`."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from adapterhub.cli._format import bytes_text, print_table, say
from adapterhub.cli._options import registry_option, several_options
from adapterhub.errors import ConfigError, ServingError, counted
from adapterhub.files.shown_table import ShownTable
from adapterhub.status import doing

if TYPE_CHECKING:
    from adapterhub.serving.http.request import Service
    from adapterhub.serving.options import ServeOptions

_what = several_options(
    click.option("--config", "file", metavar="FILE", help="YAML with the same options."),
    click.option("--backbone", help="Load all adapters' backbone from this Hub id or folder."),
    click.option(
        "--allow",
        multiple=True,
        metavar="PATTERN",
        help="Also serve adapters that match: team-*, hf:acme/*.",
    ),
    registry_option,
    click.option(
        "--require-signature",
        is_flag=True,
        default=None,
        help="Refuse adapters that no trusted key has signed.",
    ),
    click.option(
        "--check", is_flag=True, help="Load all adapters, predict once with each, and exit."
    ),
)
_where = several_options(
    click.option("--host", help="Address to listen at.  [default: 127.0.0.1]"),
    click.option("--port", type=int, help="Port to listen at.  [default: 8000]"),
    click.option(
        "--tokens", metavar="FILE", help="File of client tokens.  [default: your own file]"
    ),
    click.option(
        "--metrics",
        type=click.Choice(["open", "predict", "admin", "off"]),
        help="Who may read /metrics if tokens are required.  [default: admin]",
    ),
    click.option("--admin/--no-admin", default=None, help="Serve /admin, or not.  [default: yes]"),
    click.option(
        "--allow-origin",
        multiple=True,
        metavar="ORIGIN",
        help="Allow requests from pages of this origin: https://app.example.org.",
    ),
    click.option(
        "--try",
        "try_page",
        is_flag=True,
        default=None,
        help="Serve a page to try the adapters at /.",
    ),
)
_limits = several_options(
    click.option("--batch-tokens", type=int, help="Maximum number of tokens in a batch."),
    click.option(
        "--max-length", type=int, help="Longest input, in tokens.  [default: the backbone's limit]"
    ),
    click.option(
        "--queue-tokens", type=int, help="Maximum number of tokens in the queue.  [default: 131072]"
    ),
    click.option(
        "--adapter-memory", metavar="SIZE", help="Memory for cached adapters.  [default: 2GiB]"
    ),
    click.option(
        "--refresh",
        metavar="TIME",
        help="Interval between checks for new versions.  [default: 10s]",
    ),
    click.option(
        "--deadline", metavar="TIME", help="Longest time a request may wait.  [default: 30s]"
    ),
    click.option(
        "--drain",
        metavar="TIME",
        help="Longest time to finish requests at shutdown.  [default: 30s]",
    ),
    click.option(
        "--write-timeout",
        metavar="TIME",
        help="Longest time to write to a slow client.  [default: 30s]",
    ),
    click.option("--body", metavar="SIZE", help="Maximum size of a request.  [default: 4MiB]"),
    click.option(
        "--inputs", type=int, help="Maximum number of inputs in a request.  [default: 1024]"
    ),
    click.option(
        "--requests-per-minute", type=int, help="Limit for each token.  [default: unlimited]"
    ),
    click.option(
        "--metric-adapters",
        type=int,
        help="Maximum number of adapters with separate metrics.  [default: 100]",
    ),
    click.option(
        "--log-requests/--no-log-requests",
        default=None,
        help="Log one line for each request, or not.",
    ),
)
_how = several_options(
    click.option("--threads", type=int, help="Number of torch threads."),
    click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N."),
    click.option("--dtype", help="fp32, bf16 or fp16.  [default: as in training]"),
    click.option("--quantize", help="nf4, int8, ...  [default: as in training]"),
    click.option("--ray", is_flag=True, default=None, help="Run replicas on a Ray cluster."),
    click.option("--ray-address", metavar="HOST:PORT", help="Address of a running cluster."),
    click.option(
        "--workers", type=int, help="Number of replicas.  [default: one per GPU, or per 4 CPUs]"
    ),
)


@click.command("serve")
@click.argument("adapters", nargs=-1, metavar="[ADAPTER | NAME=ADAPTER]...")
@_what
@_where
@_limits
@_how
def command(adapters: tuple[str, ...], file: str | None, check: bool, **given: Any) -> None:
    """Answer requests to any ADAPTER over HTTP, in batches that they share.

    An ADAPTER is a run folder, an adapter folder or a published name; without one, all
    adapters that the registry has for the backbone. Clients may use the adapters named here and
    those that match --allow. POST /v1/predict has every task; /docs lists all paths.
    """
    from adapterhub.serving.http import check_serve_extra

    check_serve_extra()
    with doing("loading torch"):
        from adapterhub.serving.options import read_serve_options

    from adapterhub.web.connections import raise_file_limit

    flags = {name: value for name, value in given.items() if value not in (None, ())}
    options = read_serve_options(file, flags | ({"adapters": adapters} if adapters else {}))
    if not check and (files := raise_file_limit()):
        say(files)
    if options.ray:
        _serve_on_ray(options)
        return
    _use_device(options)
    with doing("opening the server"):
        from adapterhub.serving.http.lifecycle import HttpServer, open_service

        service = open_service(options)
    if check:
        _check(service)
        return
    _log_to_stderr(options)
    HttpServer(service, options, lambda address: _say_started(service, address)).run()


def _serve_on_ray(options: ServeOptions) -> None:
    from adapterhub.serving.http.lifecycle import HttpServer
    from adapterhub.serving.ray_front import open_replicas

    with doing("starting replicas"):
        service, endpoints = open_replicas(options)
    _log_to_stderr(options)
    HttpServer(service, options, lambda address: _say_started(service, address), endpoints).run()


def _check(service: Service) -> None:
    """Predict once with each adapter, and report the findings.

    Raises:
        ServingError: some adapters cannot be served.
    """
    from adapterhub.serving.http.lifecycle import check_all

    try:
        with doing("loading adapters"):
            service.list_published()
            problems = check_all(service)
    finally:
        _show_adapters(service)
        service.engine.close(1.0)
    if problems:
        offenders = [f"{name}: {problem}" for name, problem in problems.items()]
        count = counted(len(problems), "adapter")
        raise ServingError(f"{count} cannot be served", offenders=offenders)
    say(f"{counted(len(service.allowed.names), 'adapter')} can be served")


def _show_adapters(service: Service) -> None:
    """Print the adapters that share a model, and the reasons for the others."""
    uses = service.engine.models()
    if not uses:
        return
    columns = ("adapter", "model", "shares batches", "size", "why not")
    rows = [
        (
            use.reference or service.backbone,
            use.model,
            "yes" if use.shared else "no",
            bytes_text(use.bytes),
            use.reason,
        )
        for use in sorted(uses, key=lambda use: use.reference)
    ]
    print_table(ShownTable(columns, rows), optional=("size",), elsewhere="widen the terminal")


def _say_started(service: Service, address: str) -> None:
    _show_adapters(service)
    allowed = service.allowed
    if more := len(allowed.names) - len(allowed.named):
        say(f"{more:,} more of the registry are loaded at their first request")
    if allowed.patterns:
        say(f"clients may also use {', '.join(allowed.patterns)}")
    needs = "needs a token" if service.tokens is not None else "this machine only, no token needed"
    say(f"ready: {address} ({needs}); {address}/docs lists all paths")
    sys.stdout.flush()


def _use_device(options: ServeOptions) -> None:
    """Limit torch to one device and a number of threads.

    Raises:
        ConfigError: the device is unknown or missing.
    """
    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    kind, _, number = (options.device or "").partition(":")
    if kind not in ("", "cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
        raise ConfigError(f"unknown device {options.device!r}", expected="cpu, cuda or cuda:N")
    if kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read on the first use of CUDA
    elif number:
        os.environ["CUDA_VISIBLE_DEVICES"] = number
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {options.device!r} is not available", hint="--device cpu")


def _log_to_stderr(options: ServeOptions) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = logging.INFO if options.log_requests else logging.WARNING
    for name in ("adapterhub.requests", "adapterhub.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name == "adapterhub.requests" else logging.WARNING)
