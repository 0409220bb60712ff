"""Serve batches whose rows use many LoRA adapters, beside the plain backbone and peft.

    python benchmarks/gpu/many_adapters.py --out many.json           # one GPU of 80 GB
    python benchmarks/gpu/many_adapters.py --small --out small.json  # the same on a CPU, in seconds
    python benchmarks/gpu/many_adapters.py --table many.json

A random Llama of the shape of Llama 3.2 1B in bf16, and 64 rows. Each row uses one of `n` LoRA
adapters on all projections, of ranks 4, 8 and 16. Before anything is timed, rows of the batch must
be those of each adapter alone, and of peft's mixed batch with equal A and B (5e-2, in bf16).

    prefill     128 tokens a row
    decode      one more token a row with a static cache, and as a CUDA graph

Times are medians after 3 warm-up runs, in turns (plain, adapterhub, peft, peft, adapterhub, plain),
the better of two.
peft loops over the adapters of a batch in Python, and is left out above 64. Then come the times to
load an adapter from its file, to activate another one and to begin a route, and what each takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from backbone import SMALL
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import adapterhub as ah

ONE_B = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": True,
}  # fmt: skip
RANKS = (4, 8, 16)
PROJECTIONS = {
    "attn.q": "q_proj", "attn.k": "k_proj", "attn.v": "v_proj", "attn.o": "o_proj",
    "ffn.gate": "gate_proj", "ffn.up": "up_proj", "ffn.down": "down_proj",
}  # fmt: skip
MOST_OF_PEFT, AGREEMENT, WARM_UP = 64, 5e-2, 3


@dataclass
class Setting:
    """The settings that all variants share."""

    device: str
    rows: int
    tokens: int
    counts: tuple[int, ...]
    steps: int


def lora(number: int) -> dict[str, Any]:
    """Return the method of one adapter; ranks take turns."""
    rank = RANKS[number % len(RANKS)]
    return {"lora": {"rank": rank, "alpha": rank, "sites": tuple(PROJECTIONS)}}


def fill(number: int, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Set A and B of one adapter: the same in every library."""
    generator = torch.Generator().manual_seed(number)
    for path in sorted(pairs):
        a, b = pairs[path]
        with torch.no_grad():
            a.copy_(torch.randn(a.shape, generator=generator) / a.shape[1] ** 0.5)
            b.copy_(torch.randn(b.shape, generator=generator) * 0.02)


def attach(model: LlamaForCausalLM, number: int) -> None:
    """Attach one adapter with adapterhub."""
    adapter = ah.attach(model, lora(number), name=f"a{number}")
    fill(number, {p.site.host: (p.module.A, p.module.B) for p in adapter.placed})


def wrapped_by_peft(model: LlamaForCausalLM, count: int) -> Any:
    """Attach adapters with peft."""
    wrapped: Any = None
    for number in range(count):
        rank = RANKS[number % len(RANKS)]
        config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=[*PROJECTIONS.values()])
        if wrapped is None:
            wrapped = peft.get_peft_model(model, config, adapter_name="a0")
        else:
            wrapped.add_adapter(f"a{number}", config)
        layers = {n: m for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.Linear)}
        key = f"a{number}"
        fill(number, {n: (m.lora_A[key].weight, m.lora_B[key].weight) for n, m in layers.items()})
    return wrapped.eval()


def names_of(setting: Setting, count: int) -> list[str]:
    """Return the adapter of each row: as many different ones as there are."""
    return [f"a{row * max(count // setting.rows, 1) % count}" for row in range(setting.rows)]


class Serving:
    """Prefill and decode steps of one batch through one variant.

    Args:
        call: computes the model's output.
        setting: the sizes.
        config: the model's configuration, for its cache.
    """

    def __init__(self, call: Callable[..., Any], setting: Setting, config: Any) -> None:
        self.call, self.setting = call, setting
        generator = torch.Generator().manual_seed(1)
        size = (setting.rows, setting.tokens)
        self.ids = torch.randint(1, config.vocab_size, size, generator=generator).to(setting.device)
        # Each decode step adds a token, those of a graph too.
        room = setting.tokens + 2 * (setting.steps + WARM_UP) + 8
        self.cache = StaticCache(config=config, max_cache_len=room)

    def prefill(self) -> Tensor:
        """Compute the states of all tokens, and the logits of the last."""
        logits: Tensor = self.call(input_ids=self.ids, use_cache=False, logits_to_keep=1).logits
        return logits

    def decode(self) -> Tensor:
        """Compute one more token of each row."""
        one = self.ids[:, :1]
        logits: Tensor = self.call(input_ids=one, past_key_values=self.cache).logits
        return logits

    def begin(self) -> None:
        """Fill the cache."""
        self.cache.reset()
        self.call(input_ids=self.ids, past_key_values=self.cache, logits_to_keep=1)


@contextmanager
def plain(model: LlamaForCausalLM, names: list[str]) -> Iterator[Callable[..., Any]]:
    """Call the backbone with no adapter active."""
    with ah.disabled(model) if ah.adapters(model) else nullcontext():
        yield model


@contextmanager
def routed(model: LlamaForCausalLM, names: list[str]) -> Iterator[Callable[..., Any]]:
    """Call the model within a route."""
    with ah.route(model, names):
        yield model


def median(step: Callable[[], object], setting: Setting) -> float:
    """Return the median time of a step in milliseconds."""
    times = []
    for number in range(WARM_UP + setting.steps):
        start = now(setting)
        step()
        if number >= WARM_UP:
            times.append((now(setting) - start) * 1e3)
    return statistics.median(times)


def now(setting: Setting) -> float:
    """Return the clock when the device is done."""
    if setting.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def graph_of(step: Callable[[], object]) -> Callable[[], None]:
    """Record a step as a CUDA graph, and return what replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def times_of(call: Callable[..., Any], setting: Setting, config: Any) -> dict[str, Any]:
    """Time one variant. An error of a CUDA graph is a result."""
    serving = Serving(call, setting, config)
    found: dict[str, Any] = {"prefill": median(serving.prefill, setting)}
    serving.begin()
    found["decode"] = median(serving.decode, setting)
    if setting.device == "cuda":
        serving.begin()
        try:
            found["decode, graph"] = median(graph_of(serving.decode), setting)
        except Exception as error:
            found["graph error"] = f"{type(error).__name__}: {error}"[:300]
            torch.cuda.synchronize()
    return found


def check(model: LlamaForCausalLM, names: list[str], setting: Setting, mixed: Any) -> float:
    """Compare rows of the batch with each alone, and with peft's; return the largest difference."""
    serving = Serving(model, setting, model.config)
    with ah.route(model, names):
        together = serving.prefill().float()
    far = 0.0
    for row in sorted({0, setting.rows // 2, setting.rows - 1}):
        ah.activate(model, names[row])
        alone = serving.prefill()[row].float()
        far = max(far, ((together[row] - alone).norm() / alone.norm()).item())
    if mixed is not None:
        theirs = Serving(mixed, setting, model.config).prefill().float()
        far = max(far, ((together - theirs).norm() / theirs.norm()).item())
    assert far < AGREEMENT, f"rows differ by {far:.3f}"
    return far


def build(options: argparse.Namespace, device: str) -> LlamaForCausalLM:
    """Build the random backbone; equal for both libraries."""
    config = LlamaConfig(**(SMALL if options.small else ONE_B), pad_token_id=0)
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def of_peft(options: argparse.Namespace, setting: Setting, count: int) -> tuple[Any, Any]:
    """Return peft's model, and a call of it with the names of the rows."""
    wrapped = wrapped_by_peft(build(options, setting.device), count)
    names = names_of(setting, count)

    def call(**inputs: Any) -> Any:
        return wrapped(**inputs, adapter_names=names)

    return wrapped, call


def cell(
    model: LlamaForCausalLM, options: argparse.Namespace, setting: Setting, count: int
) -> dict[str, Any]:
    """Check and time one number of adapters, which are attached."""
    names, found = names_of(setting, count), dict[str, Any]()
    wrapped, mixed = of_peft(options, setting, count) if count <= MOST_OF_PEFT else (None, None)
    found["difference"] = check(model, names, setting, mixed)
    variants: list[tuple[str, Any]] = [("plain", plain), ("adapterhub", routed)]
    if mixed is not None:
        variants.append(("peft", lambda *_, call=mixed: nullcontext(call)))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in variants}
    for name, variant in [*variants, *reversed(variants)]:
        with variant(model, names) as call:
            runs[name].append(times_of(call, setting, model.config))
    for name, both in runs.items():
        found[name] = {
            key: value if isinstance(value, str) else min(run.get(key, value) for run in both)
            for key, value in both[0].items()
        }
    del wrapped, mixed, variants
    gc.collect()
    return found


def lifecycle(model: LlamaForCausalLM, setting: Setting, count: int) -> dict[str, float]:
    """Time loading, swapping and routing with many adapters attached, in milliseconds."""
    names = names_of(setting, count)
    with tempfile.TemporaryDirectory() as folder:
        ah.adapters(model)["a0"].save(Path(folder) / "a")
        times = []
        for number in range(5):
            start = now(setting)
            ah.load(model, Path(folder) / "a", name=f"more{number}")
            times.append((now(setting) - start) * 1e3)
            ah.detach(model, f"more{number}")

    def begin_route() -> None:
        with ah.route(model, names):
            pass

    turns = iter(range(10**6))
    return {
        "load": statistics.median(times),
        "activate": median(lambda: ah.activate(model, f"a{next(turns) % count}"), setting),
        "begin a route": median(begin_route, setting),
    }


def measure(options: argparse.Namespace, setting: Setting, write: Callable[..., None]) -> None:
    """Run the benchmark; `write` is called with the record after each number of adapters."""
    gpu = setting.device == "cuda"
    record: dict[str, Any] = {
        "setting": asdict(setting) | {"small": options.small},
        "device": torch.cuda.get_device_name() if gpu else f"CPU ({platform.machine()})",
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)},
        "adapters": {},
    }
    model, attached = build(options, setting.device), 0
    with torch.inference_mode():
        for count in setting.counts:
            start, before = now(setting), torch.cuda.memory_allocated() if gpu else 0
            with torch.inference_mode(mode=False):
                for number in range(attached, count):
                    attach(model, number)
            facts = {"attach": (now(setting) - start) * 1e3 / (count - attached)}
            if gpu:
                held = torch.cuda.memory_allocated() - before
                facts["megabytes each"] = held / (count - attached) / 1e6
            attached = count
            found = cell(model, options, setting, count)
            with torch.inference_mode(mode=False):
                found["lifecycle"] = facts | lifecycle(model, setting, count)
            record["adapters"][str(count)] = found
            write(record)


def table(record: dict[str, Any]) -> str:
    """Return the Markdown table of a record."""
    lines = [record["device"], "", "| adapters | variant | prefill | decode | decode, graph |",
             "|---|---|---|---|---|"]  # fmt: skip
    for count, found in record["adapters"].items():
        base = found["plain"]
        for name in ("plain", "adapterhub", "peft"):
            times = found.get(name, {})
            shown = [
                f"{times[key]:.1f} ms: {times[key] / base[key]:.2f} x" if key in times else "-"
                for key in ("prefill", "decode", "decode, graph")
            ]
            if times:
                lines.append(f"| {count} | {name} | {' | '.join(shown)} |")
    for count, found in record["adapters"].items():
        facts = ", ".join(f"{name} {value:.1f}" for name, value in found["lifecycle"].items())
        lines += ["", f"{count} adapters, milliseconds: {facts}"]
    return "\n".join(lines)


def main() -> None:
    """Measure, write the record and print its table."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, metavar="RECORD")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--counts", default="1,8,64,1000", help="numbers of adapters")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text(encoding="utf-8"))))
        return
    counts = tuple(int(count) for count in options.counts.split(","))
    large = Setting("cuda", 64, 128, counts, options.steps)
    setting = Setting("cpu", 8, 16, (1, 8, 24), 3) if options.small else large

    def write(record: dict[str, Any]) -> None:
        if options.out:
            options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(table(record), flush=True)

    measure(options, setting, write)


if __name__ == "__main__":
    main()
