"""Sweep all model types of the installed transformers: which methods work on which of them.

    python scripts/sweep.py                      # all of them, into docs/architectures.md
    python scripts/sweep.py qwen3 gpt_oss --methods lora,prefix
    python scripts/sweep.py --peft               # with peft's LoRA on the same models
    python scripts/sweep.py rwkv mra --peft --update     # some of them again, in the page

Ctrl-C or SIGTERM ends it; with --update, what was found until then is written.

Each type is built tiny, with random weights, from the defaults of its configuration, in a process
of its own with limits of time and memory. What is checked of a cell is in sweep_cells.py. A type
that cannot be built is not counted: it needs a package that is missing here, or a configuration
without defaults.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architectures.md"
METHODS = (
    "lora",
    "pfeiffer",
    "ia3",
    "dora",
    "prefix",
    "prompt",
    "bitfit",
    "norms",
    "head",
    "freeze",
    "unfreeze",
    "full",
)
SECONDS = 240
GIGABYTES = 10
Result = dict[str, Any]


def main() -> None:
    """Sweep, and write the page."""
    options = _options()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    import torch
    import transformers

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "scripts"))
    import every_type
    from sweep_page import findings, page, read

    types = options.types or every_type.TYPES
    methods = tuple(options.methods.split(","))
    started = time.monotonic()
    results = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):  # the page is updated by what was found until then
        for result in _sweep(types, methods, options.processes, options.peft):
            if "reason" not in result:
                print(_line(result), flush=True)
            results.append(result)
    stopped = len(results) < len(types)
    seconds = time.monotonic() - started
    found = findings(results, transformers.__version__, seconds, methods)
    for row in found.counts():
        print("{:16}{:>6} work ({}), {} refused, {} refused in use, {} fail".format(*row))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    if options.update:
        kept = read(PAGE.read_text("utf-8"))
        kept.update(found)
        found = kept
    if options.update or not (options.types or stopped or methods != METHODS):
        PAGE.write_text(page(found), "utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("types", nargs="*", help="model types; all of them by default")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--peft", action="store_true", help="attach peft's LoRA as well")
    parser.add_argument("--update", action="store_true", help="replace these types in the page")
    parser.add_argument("--json", type=Path, help="write all results, with the reasons")
    return parser.parse_args()


def _sweep(
    types: Iterable[str], methods: tuple[str, ...], processes: int, peft: bool
) -> Iterator[Result]:
    """Yield the results of each type, computed in forks of this process."""
    _import_all()
    pool = ThreadPoolExecutor(processes)
    try:
        yield from pool.map(lambda each: _in_a_process(each, methods, peft), types)
    finally:
        pool.shutdown(cancel_futures=True)


def _import_all() -> None:
    """Import and compute, once, what every fork needs."""
    from every_type import build
    from sweep_cells import cell, inputs_for

    import adapterhub as ah

    for name in dir(ah):
        getattr(ah, name)
    if (model := build("bert", "AutoModelForMaskedLM", tiny=True)) is not None:
        for method in ah.METHODS:
            cell(model, method, inputs_for(model))


def _in_a_process(model_type: str, methods: tuple[str, ...], peft: bool) -> Result:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(model_type, methods, peft, theirs))
    process.start()
    theirs.close()
    result: Result = {"type": model_type, "cells": {}, "reason": "its process ended"}
    deadline = time.monotonic() + SECONDS
    while ours.poll(max(deadline - time.monotonic(), 0)):
        try:
            result = ours.recv()
        except EOFError:
            break
    else:
        result |= {"reason": f"more than {SECONDS} s"}
    process.kill()
    process.join()
    return result


def _child(model_type: str, methods: tuple[str, ...], peft: bool, pipe: Connection) -> None:
    """Send the results of a type: after each method, so that none is lost if the next one dies."""
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    from every_type import ADAPTED, autos, build
    from sweep_cells import cell, inputs_for

    result: Result = {"type": model_type, "cells": {}}
    pipe.send(result | {"reason": "it cannot be built"})
    auto = next(iter(autos(model_type, ADAPTED)), None)
    model = build(model_type, auto, tiny=True) if auto else None
    if model is None:
        pipe.send(result | {"reason": "it cannot be built from its defaults"})
        return
    inputs = inputs_for(model)
    result |= {"class": type(model).__name__, "inputs": inputs is not None}
    for method in methods:
        pipe.send(result | {"cells": result["cells"] | {method: "error: its process ended"}})
        result["cells"][method] = cell(model, method, inputs)
        pipe.send(result)
    if peft:
        result["peft"] = {each: _peft(model_type, auto, each) for each in (None, "all-linear")}
        pipe.send(result)


def _peft(model_type: str, auto: str, targets: str | None) -> str:
    """Return whether peft attaches LoRA, with its own targets or to all linear layers."""
    from every_type import build
    from peft import LoraConfig, get_peft_model

    try:
        get_peft_model(build(model_type, auto, tiny=True), LoraConfig(target_modules=targets))
    except Exception as error:
        return f"error: {str(error).splitlines()[0] if str(error) else type(error).__name__}"[:150]
    return "ok"


def _line(result: Result) -> str:
    cells = result["cells"]
    words = " ".join(f"{method}={_word(text)}" for method, text in cells.items())
    return f"{result['type']} ({result.get('class')}): {words}"


def _word(text: str) -> str:
    return text.partition(":")[0].partition(",")[0]


if __name__ == "__main__":
    main()
