"""Check adapters on a GPU against the CPU: outputs, gradients, graphs, caches, quantized weights.

    python benchmarks/gpu/correctness.py --out gpu.json          # all architectures and methods
    python benchmarks/gpu/correctness.py --processes 14 --seconds 240 --out gpu.json
    python benchmarks/gpu/correctness.py --small --out cpu.json  # three methods, also on a CPU
    python benchmarks/gpu/correctness.py --methods deft,boft --places bert,llama,nf4
    python benchmarks/gpu/correctness.py --table gpu.json

Each cell is a tiny model of the contract suite with one method. The reference is the same adapter
on the same weights in fp32 on the CPU; differences are relative, ||a - b|| / ||b||:

    fp32        outputs and gradients, without TF32                        below 1e-3
    bf16        outputs and gradients, in each attention implementation;   below 0.1
                flash attention of rows without padding, with lora and
                pfeiffer; flex attention of the methods of --small
                (without methods that decompose the weights again)
    routed      rows of a batch with it and without, beside each alone     below 1e-4
    graph       replays of a CUDA graph with other inputs, also routed     below 1e-5
    compiled    the model under torch.compile, of the cells of --small     below 1e-3
                (on a CPU, of those with LoRA)
    static      greedy tokens with a static cache, with the methods of     the same tokens
                --small, alora and loreft: on a GPU each step is compiled
    reloaded    the saved adapter, loaded on the device                    equal
    detached    outputs and weights after it is detached                   equal
    nf4, ...    outputs and gradients of a quantized backbone, beside      below 0.3
                the same backbone with its weights dequantized to fp32
    fp8         the same of a checkpoint in FP8, whose kernels             below 0.3
                transformers fetches from the Hub; on a CPU it is decoded

A check that a cell has no part in (a cache in an encoder) is left out; one that adapterhub refuses
by name is counted as refused, and any other error is a failure. The record is written after each
cell. Cells are divided among processes, and what has not begun after --seconds is left out and
counted.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import StaticCache

import adapterhub as ah
from adapterhub.backbones.torch_free_checks import QUANTIZATION_LIBRARIES
from adapterhub.backbones.weights import read_weight
from adapterhub.errors import SiteError
from adapterhub.methods import METHODS

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.kit import matrix, own_models, tiny_models

ATTENTION = ("eager", "sdpa", "flash", "flex_attention")
LIMITS = {"fp32": 1e-3, "bf16": 0.1, "routed": 1e-4, "graph": 1e-5, "compiled": 1e-3}
QUANTIZED = 0.3  # small gradients, as of AdapterFusion's softmax, keep few digits in bf16
SMALL = {"methods": ("lora", "pfeiffer", "prefix"), "architectures": ("bert", "llama")}
CHECKED = {  # methods
    "flash": ("lora", "pfeiffer"),
    "flex_attention": SMALL["methods"],
    "static": (*SMALL["methods"], "alora", "loreft"),
}
# Heads of 16 are the smallest that flash and flex attention compute on a GPU.
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


class Cell:
    """A model with one method, on the device, and its reference on the CPU.

    Args:
        method: the name of the method.
        architecture: that of the tiny model.
        device: where it is checked.
    """

    def __init__(self, method: str, architecture: str, device: str) -> None:
        self.method, self.architecture, self.device = method, architecture, device
        self.decodes = architecture in tiny_models.DECODERS
        model = build(architecture)
        self.bare = copy.deepcopy(model.state_dict())
        adapter = ah.attach(model, matrix.example(method), name="a")
        tiny_models.scramble(adapter, std=0.05)
        self.tensors = {name: t.detach().clone() for name, t in adapter.tensors().items()}
        self.reference = passed(model, "cpu")
        flash = method in CHECKED["flash"]
        self.unpadded = passed(model, "cpu", padded=False) if flash else {}
        roles = {placed.site.role for placed in adapter.placed}
        self.shared = bool(roles & {*matrix.SHARED.get(architecture, ())})

    def attached(self, dtype: torch.dtype = torch.float32, attention: str = "") -> nn.Module:
        """Return a new model on the device with the same adapter."""
        model = build(self.architecture)
        if attention:
            model.set_attn_implementation("sdpa" if attention == "flash" else attention)
        model = model.to(self.device, dtype)
        adapter = ah.attach(model, matrix.example(self.method), name="a")
        with torch.no_grad():
            for name, tensor in adapter.tensors().items():
                tensor.copy_(self.tensors[name])
        return model

    def fp32(self) -> float:
        """Compare outputs and gradients in fp32."""
        return far(passed(self.attached(), self.device), self.reference)

    def bf16(self, attention: str) -> float:
        """Compare outputs and gradients in bf16 with one attention implementation."""
        flash = attention == "flash"
        with flash_alone() if flash else nullcontext():
            model = self.attached(torch.bfloat16, attention)
            found = passed(model, self.device, padded=not flash)
        return far(found, self.unpadded if flash else self.reference)

    def routed(self) -> float:
        """Compare rows of one batch with each row alone."""
        model, rows = self.attached(), ["a", None, "a"]
        with torch.no_grad():
            with ah.route(model, rows):
                together = logits(model, self.device)
            alone = []
            for number, name in enumerate(rows):
                ah.activate(model, *([name] if name else []))
                alone.append(logits(model, self.device)[number])
        return relative(together, torch.stack(alone))

    def graph(self, rows: list[str | None] | None) -> float:
        """Compare replays of a CUDA graph with computed outputs."""
        model = self.attached()
        inputs = {name: t.to(self.device) for name, t in tiny_models.batch().items()}
        inputs |= tiny_models.decoder_inputs(model, inputs)
        with torch.no_grad(), ah.route(model, rows) if rows else nullcontext():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    model(**inputs)
            torch.cuda.current_stream().wait_stream(stream)
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                output = model(**inputs)[0]
            inputs["input_ids"].copy_(tiny_models.batch(seed=5)["input_ids"])
            recorded.replay()
            return relative(output.clone(), model(**inputs)[0])

    def compiled(self) -> float:
        """Compare the outputs of the compiled model."""
        model = self.attached()
        torch._dynamo.reset()
        backend = "inductor" if self.device == "cuda" else "eager"
        compiled: Any = torch.compile(model, backend=backend)
        with torch.no_grad():
            return relative(logits(compiled, self.device), logits(model, self.device))

    def static(self) -> float:
        """Return the share of greedy tokens that differ with a static cache."""
        model = self.attached()
        ids = tiny_models.batch()["input_ids"].to(self.device)
        cache = StaticCache(config=model.config, max_cache_len=64)
        ask = functools.partial(model.generate, ids, max_new_tokens=8, min_new_tokens=8,
                                do_sample=False)  # fmt: skip
        return float((ask() != ask(past_key_values=cache)).float().mean())

    def reloaded(self) -> float:
        """Compare outputs with those of the adapter saved and loaded again."""
        model = self.attached()
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            before = logits(model, self.device)
            ah.adapters(model)["a"].save(Path(folder) / "a")
            ah.detach(model)
            ah.load(model, Path(folder) / "a")
            return 0.0 if torch.equal(before, logits(model, self.device)) else 1.0

    def detached(self) -> float:
        """Compare the weights with those before the adapter was attached."""
        model = self.attached()
        passed(model, self.device)
        ah.detach(model)
        left = model.state_dict()
        same = left.keys() == self.bare.keys() and all(
            torch.equal(left[name].cpu(), tensor) for name, tensor in self.bare.items()
        )
        return 0.0 if same else 1.0

    def checks(self) -> Iterator[tuple[str, float, Callable[[], float]]]:
        """List the checks that this cell has a part in, with their limits."""
        yield "fp32", LIMITS["fp32"], self.fp32
        again = any(part.decomposes_again() for part in matrix.example(self.method).parts())
        for attention in ATTENTION if self.device == "cuda" else ATTENTION[:2]:
            if again or self.method not in CHECKED.get(attention, METHODS):
                continue  # components of rounded weights are others, and loading them is refused
            if attention == "eager" or self.architecture in SMALL["architectures"]:
                yield f"bf16 {attention}", LIMITS["bf16"], functools.partial(self.bf16, attention)
        routes = not METHODS[self.method].trains_backbone and not self.shared
        if routes:
            yield "routed", LIMITS["routed"], self.routed
        if self.device == "cuda":
            yield "graph", LIMITS["graph"], functools.partial(self.graph, None)
            if routes:
                rows = ["a", None, "a"]
                yield "graph routed", LIMITS["graph"], functools.partial(self.graph, rows)
        compiles = SMALL["methods"] if self.device == "cuda" else SMALL["methods"][:1]
        if self.method in compiles and self.architecture in SMALL["architectures"]:
            yield "compiled", LIMITS["compiled"], self.compiled
        if self.decodes and self.method in CHECKED["static"]:
            yield "static", 0.0, self.static
        yield "reloaded", 0.0, self.reloaded
        yield "detached", 0.0, self.detached


def build(architecture: str) -> Any:
    """Build the tiny model of an architecture: one that writes, or an encoder without a head."""
    wide = WIDE if architecture in SMALL["architectures"] else {}
    if architecture in tiny_models.ENCODER_DECODERS:
        return tiny_models.model(architecture, "seq2seq", **wide)
    task = "causal-lm" if architecture in tiny_models.DECODERS else "features"
    return tiny_models.model(architecture, task, **wide)


def logits(model: Any, device: str, padded: bool = True) -> Tensor:
    """Compute the first output of the batch that all checks share."""
    inputs = {name: tensor.to(device) for name, tensor in tiny_models.batch().items()}
    if not padded:  # every token counts
        del inputs["attention_mask"]
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    output: Tensor = model(**inputs)[0]
    return output


def passed(model: Any, device: str, padded: bool = True) -> dict[str, Tensor]:
    """Compute outputs, and the gradients of what the adapter trains."""
    (adapter,) = ah.adapters(model).values()
    outputs = logits(model, device, padded)
    target = torch.linspace(-1, 1, outputs.shape[-1], device=device)
    named = {name: t for name, t in adapter.tensors().items() if t.requires_grad}
    gradients = torch.autograd.grad(
        (outputs.float() @ target).sum(), [*named.values()], allow_unused=True
    )
    found = dict(zip(named, gradients, strict=True))
    return {"outputs": outputs.detach()} | {n: g for n, g in found.items() if g is not None}


def relative(found: Tensor, expected: Tensor) -> float:
    """Return ||found - expected|| / ||expected||; 1 where one of them is not finite."""
    found, expected = found.double().cpu(), expected.double().cpu()
    difference = ((found - expected).norm() / expected.norm().clamp_min(1e-12)).item()
    return difference if difference == difference else 1.0


def far(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the larger relative difference: of the outputs, or of all gradients together."""
    if found.keys() != expected.keys():
        return 1.0
    gradients = [
        torch.cat([t.double().cpu().flatten() for n, t in each.items() if n != "outputs"])
        for each in (found, expected)
    ]
    return max(relative(found["outputs"], expected["outputs"]), relative(*gradients))


def flash_alone() -> Any:
    """Return a context in which scaled_dot_product_attention is flash attention, or an error."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def quantized(kind: str, method: str, device: str, folder: Path) -> float:
    """Compare a quantized Llama with the same weights dequantized.

    Args:
        kind: a quantization, or fp8 for a checkpoint that has it.
        method: the name of the method.
        device: where it is checked.
        folder: of a plain checkpoint, or of one in FP8.
    """
    found, given = [], None if kind == "fp8" else kind
    for plain in (False, True):
        model, _ = ah.load_backbone(folder, task="causal-lm", quantize=given)
        model = model.to(device)
        if plain:
            model = dequantized(model, folder)
        torch.manual_seed(0)
        tiny_models.scramble(ah.attach(model, matrix.example(method), name="a"), std=0.05)
        found.append(passed(model, "cpu" if plain else device))
    return far(*found)


def dequantized(model: Any, folder: Path) -> Any:
    """Return an fp32 model on the CPU with the weights that a quantized one computes with."""
    plain, _ = ah.load_backbone(folder, task="causal-lm", dtype="fp32")
    with torch.no_grad():
        for path, module in plain.named_modules():
            if isinstance(module, nn.Linear):
                weight = read_weight(model.get_submodule(path))
                module.weight = nn.Parameter(
                    weight.to("cpu", torch.float32).reshape(module.out_features, -1)
                )
    return plain.to("cpu", torch.float32)


def save_llama(folder: Path) -> Path:
    """Save a tiny Llama with weights wide enough for blocks of 128, and its tokenizer."""
    from tests.kit.data import word_tokenizer

    tokenizer = word_tokenizer("<s>", "")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    model = tiny_models.model("llama", "causal-lm", **sizes, num_key_value_heads=4, head_dim=32)
    assert len(tokenizer) <= model.config.vocab_size
    model.save_pretrained(folder / "plain")
    tokenizer.save_pretrained(folder / "plain")
    own_models.save_checkpoint(model, folder / "fp8", (128, 128))
    return folder


def run(cell: str, limit: float, check: Callable[[], float]) -> dict[str, Any]:
    """Run one check; an error is a failure with its first line or its place, or a refusal."""
    start, refused = time.perf_counter(), False
    try:
        value, error = check(), ""
    except Exception as raised:
        refused = isinstance(raised, SiteError)
        first = (str(raised).splitlines() or [place_of(raised)])[0][:200]
        value, error = float("inf"), f"{type(raised).__name__}: {first}"
    seconds = round(time.perf_counter() - start, 2)
    facts = {"cell": cell, "value": value if value < float("inf") else None, "limit": limit}
    ok = refused or value <= limit
    return facts | {"ok": ok, "refused": refused, "error": error, "seconds": seconds}


def place_of(error: BaseException) -> str:
    """Return the file and line that raised an error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def cells(
    small: bool, methods: Sequence[str] = (), places: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """List methods and architectures, and methods and quantizations; the longest ones first.

    Args:
        small: only a few of each.
        methods: only these.
        places: only these architectures and quantizations.
    """
    kinds = [kind for kind, (library, _) in QUANTIZATION_LIBRARIES.items() if find_spec(library)]
    methods = methods or (SMALL["methods"] if small else tuple(METHODS))
    places = places or (*(SMALL["architectures"] if small else tiny_models.CORE), *kinds, "fp8")
    long = SMALL["architectures"]
    return [
        (method, place)
        for place in sorted(places, key=lambda place: place not in long)
        for method in methods
        if method != "head" and (method, place) not in matrix.REFUSED
        if place in tiny_models.CORE or not METHODS[method].trains_backbone
    ]


def measure(method: str, place: str, device: str, until: float) -> list[dict[str, Any]]:
    """Return the results of one cell: of an architecture, or of a quantized Llama.

    Args:
        method: the name of the method.
        place: an architecture, a quantization, or fp8.
        device: where it is checked.
        until: when nothing more begins, in seconds since the epoch.
    """
    if time.time() > until:
        return []
    torch.set_num_threads(1)
    if place in tiny_models.CORE:
        cell = Cell(method, place, device)
        return [run(f"{place}, {method}, {name}", *check) for name, *check in cell.checks()]
    with tempfile.TemporaryDirectory() as name:
        folder = save_llama(Path(name)) / ("fp8" if place == "fp8" else "plain")
        check = functools.partial(quantized, place, method, device, folder)
        return [run(f"llama, {method}, {place}", QUANTIZED, check)]


def measured(
    asked: list[tuple[str, str]], device: str, processes: int, seconds: float
) -> Iterator[list[dict[str, Any]]]:
    """Yield the results of each cell, by this process or by several."""
    until = time.time() + seconds
    if processes == 1:
        yield from (measure(*cell, device, until) for cell in asked)
        return
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # otherwise each process starts more
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        waiting = [pool.submit(measure, *cell, device, until) for cell in asked]
        yield from (done.result() for done in as_completed(waiting))


def table(record: dict[str, Any]) -> str:
    """Return the Markdown table of a record: the checks, and what failed."""
    counts: dict[str, Counter[str]] = {}
    for result in record["results"]:
        outcome = "refused" if result["refused"] else "passed" if result["ok"] else "failed"
        counts.setdefault(result["cell"].rpartition(", ")[2], Counter())[outcome] += 1
    lines = [record["device"], "", "| check | cells | refused | failed |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {count.total()} | {count['refused']} | {count['failed']} |"
        for name, count in counts.items()
    ]
    if record["left out"]:
        lines += ["", f"{record['left out']} cells did not begin in time."]
    failed = [result for result in record["results"] if not result["ok"]]
    lines += [""] + [f"{r['cell']}: {r['error'] or r['value']}" for r in failed]
    return "\n".join(lines)


def names(words: str) -> list[str]:
    """Split names at commas."""
    return words.split(",")


def main() -> None:
    """Check, write the record and print its table."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, metavar="RECORD")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--methods", type=names, default=[], metavar="NAME,NAME")
    parser.add_argument("--places", type=names, default=[], metavar="NAME,NAME")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text(encoding="utf-8"))))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "left out": 0,
        "results": [],
    }
    asked = cells(options.small, options.methods, options.places)
    for results in measured(asked, device, options.processes, options.seconds):
        record["results"] += results
        record["left out"] += not results
        if options.out:
            options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record))


if __name__ == "__main__":
    main()
