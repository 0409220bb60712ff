"""What the scripts that time operations in one process share: backbone, clocks, options, record."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
CLOCKS = {"process": time.process_time, "wall": time.perf_counter}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all of them have."""
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="process")
    parser.add_argument("--output", type=Path)


def write_record(
    options: argparse.Namespace, measured: dict[str, Any], unit: str = "milliseconds"
) -> None:
    """Print the record with its conditions, and write it to `--output`."""
    record = {
        "config": {name: str(value) for name, value in vars(options).items()},
        unit: measured,
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    text = json.dumps(record, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
