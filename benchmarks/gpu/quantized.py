"""A Llama of 8 B parameters in nf4 with LoRA on all projections, beside peft: tokens/s and memory.

    python benchmarks/gpu/quantized.py --out 8b.json             # one GPU of 80 GB, about 5 minutes
    python benchmarks/gpu/quantized.py --small --out small.json  # the same on a CPU, in seconds
    python benchmarks/gpu/quantized.py --table 8b.json

The weights are random and never leave the device. All variants share them, the batch, the values of
A and B, and the optimizer (AdamW, fused, fp32). First all give one loss (1e-3, relative) and one
gradient (2e-2); only then is anything timed, in the order A B .. B A: 3 warm-up steps, then the
median. The variants:

    adapterhub      attach(model, "lora"); bf16 without autocast
    peft            get_peft_model under autocast in bf16: the best that peft does
    peft-kbit       with prepare_model_for_kbit_training, as its documentation says
    trainer         peft in transformers' Trainer (bf16=True), timed from step to step
    --methods       further methods of adapterhub on the same backbone, timed only
    routed          row i of the batch through LoRA i, each of the same size, timed only

The record is written after each run, so that what was measured is kept if a later one fails.
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
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import torch
import transformers
from backbone import EIGHT_B, SMALL, build
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import adapterhub as ah
from adapterhub.training.activation_memory import activation_bytes
from adapterhub.training.plan import weight_bytes

LOSS, GRADIENT = 1e-3, 2e-2  # relative; autocast rounds to bf16 at other places
RANK, ALPHA, LEARNING_RATE = 16, 16, 1e-4
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SITES = ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.down")


@dataclass
class Setting:
    """What all variants share."""

    device: str
    rows: int
    length: int
    steps: int
    warm_up: int = 3


@dataclass
class Timed:
    """The steps of one variant, in seconds, and bytes at its peak (0 where there is no GPU)."""

    seconds: list[float] = field(default_factory=list)
    allocated: int = 0
    reserved: int = 0


def batch_of(model: LlamaForCausalLM, setting: Setting) -> dict[str, torch.Tensor]:
    """One batch without padding, the same for all."""
    generator = torch.Generator().manual_seed(1)
    size = (setting.rows, setting.length)
    ids = torch.randint(1, model.config.vocab_size, size, generator=generator).to(setting.device)
    return {"input_ids": ids, "labels": ids}


def values(path: str, shapes: tuple[torch.Size, torch.Size]) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of one projection; B is not zero, so that both have a gradient."""
    generator = torch.Generator().manual_seed(sum(map(ord, path)))
    a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    return a / shapes[0][1] ** 0.5, 0.01 * b


@dataclass
class Live:
    """A variant on the model: what is called, and its A and B by the path of their projection."""

    model: nn.Module
    factors: dict[str, tuple[nn.Parameter, nn.Parameter]]
    context: Callable[[], Any]
    parameters: list[nn.Parameter]


@contextmanager
def ours(model: LlamaForCausalLM, setting: Setting, spec: Any = None) -> Iterator[Live]:
    """adapterhub."""
    lora = {"lora": {"rank": RANK, "alpha": ALPHA, "sites": SITES}}
    adapter = ah.attach(model, spec or lora)
    placed = [p for p in adapter.placed if spec is None]
    factors = {p.site.host: (p.module.A, p.module.B) for p in placed}
    try:
        yield Live(model, factors, nullcontext, adapter.parameters())
    finally:
        ah.detach(model)


@contextmanager
def routed(model: LlamaForCausalLM, setting: Setting) -> Iterator[Live]:
    """adapterhub, with a LoRA for each row of the batch."""
    names = [f"row-{number}" for number in range(setting.rows)]
    lora = {"lora": {"rank": RANK, "alpha": ALPHA, "sites": SITES}}
    adapters = [ah.attach(model, lora, name=name) for name in names]
    try:
        with ah.route(model, names):  # gradients too are computed inside
            yield Live(model, {}, nullcontext, [p for a in adapters for p in a.parameters()])
    finally:
        ah.detach(model)


@contextmanager
def theirs(model: LlamaForCausalLM, setting: Setting, kbit: bool = False) -> Iterator[Live]:
    """peft."""
    plain = {n: p.data for n, p in model.named_parameters() if not hasattr(p, "quant_state")}
    if kbit:
        peft.prepare_model_for_kbit_training(
            model, gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS))
    wrapped = peft.get_peft_model(model, config)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    assert {type(m).__name__ for m in layers.values()} == {"Linear4bit"}, "peft took another layer"
    pairs = {n: (m.lora_A["default"], m.lora_B["default"]) for n, m in layers.items()}
    factors = {n: (a.weight, b.weight) for n, (a, b) in pairs.items()}
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    autocast = partial(torch.autocast, setting.device, dtype=torch.bfloat16)
    try:
        yield Live(wrapped, factors, autocast, parameters)
    finally:
        wrapped.unload()
        for name, parameter in model.named_parameters():
            if name in plain:
                parameter.data = plain[name]


def fill(live: Live) -> None:
    """The same A and B in every variant."""
    with torch.no_grad():
        for path, (a, b) in live.factors.items():
            new = values(path, (a.shape, b.shape))
            a.copy_(new[0])
            b.copy_(new[1])


def recompute(model: LlamaForCausalLM, on: bool) -> None:
    """Gradient checkpointing of every layer, which transformers renamed in 5.23."""
    new = hasattr(model, "activation_checkpointing_enable")
    stem = "activation_checkpointing" if new else "gradient_checkpointing"
    getattr(model, f"{stem}_{'enable' if on else 'disable'}")()


def check(model: LlamaForCausalLM, batch: dict[str, torch.Tensor], setting: Setting) -> dict:
    """The loss of each variant, and the largest relative difference of a gradient from ours."""
    losses, gradients = {}, {}
    for name, variant in compared().items():
        with variant(model, setting) as live:
            fill(live)
            model.train()
            with live.context():
                loss = live.model(**batch).loss
            loss.backward()
            losses[name] = loss.item()
            gradients[name] = {
                (path, i): p.grad.float().cpu()
                for path, pair in live.factors.items()
                for i, p in enumerate(pair)
            }
        _free()
    own, start = gradients["adapterhub"], losses["adapterhub"]
    far = {
        name: max(((g[k] - own[k]).norm() / own[k].norm()).item() for k in own)
        for name, g in gradients.items()
    }
    assert all(abs(loss / start - 1) < LOSS for loss in losses.values()), losses
    assert max(far.values()) < GRADIENT, far
    return {"loss": losses, "gradient": far}


def compared() -> dict[str, Any]:
    """The variants that must agree."""
    return {
        "adapterhub": ours,
        "peft": theirs,
        "peft-kbit": lambda model, setting: theirs(model, setting, kbit=True),
    }


def time_steps(
    variant: Any, model: LlamaForCausalLM, batch: dict[str, torch.Tensor], setting: Setting
) -> Timed:
    """Steps of one variant."""
    _free()
    timed = Timed()
    with variant(model, setting) as live:
        model.train()
        fused = torch.optim.AdamW(live.parameters, lr=LEARNING_RATE, fused=True)
        for number in range(setting.warm_up + setting.steps):
            if number == setting.warm_up:
                _reset_peak(setting)
            start = _now(setting)
            with live.context():
                loss = live.model(**batch).loss
            loss.backward()
            fused.step()
            fused.zero_grad(set_to_none=True)
            timed.seconds.append(_now(setting) - start)
        _note_peak(timed, setting)
    return replace(timed, seconds=timed.seconds[setting.warm_up :])


class Clock(TrainerCallback):
    """Times the steps of a Trainer."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.seconds, self.start = setting, [], 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if len(self.seconds) == self.setting.warm_up:
            _reset_peak(self.setting)
        self.start = _now(self.setting)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(_now(self.setting) - self.start)


def time_trainer(
    model: LlamaForCausalLM, batch: dict[str, torch.Tensor], setting: Setting
) -> Timed:
    """peft in the stock Trainer."""
    _free()
    rows = [{name: t[i].cpu() for name, t in batch.items()} for i in range(setting.rows)]
    with theirs(model, setting) as live, tempfile.TemporaryDirectory() as folder:
        clock = Clock(setting)
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=setting.rows, bf16=True, report_to=[],
            max_steps=setting.warm_up + setting.steps, learning_rate=LEARNING_RATE,
            save_strategy="no", logging_strategy="no", disable_tqdm=True, optim="adamw_torch_fused",
            use_cpu=setting.device == "cpu",
        )  # fmt: skip
        Trainer(live.model, arguments, train_dataset=rows * 64, callbacks=[clock]).train()
        timed = Timed(clock.seconds[setting.warm_up :])
        _note_peak(timed, setting)
    return timed


def _now(setting: Setting) -> float:
    if setting.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _reset_peak(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _note_peak(timed: Timed, setting: Setting) -> None:
    if setting.device == "cuda":
        timed.allocated = torch.cuda.max_memory_allocated()
        timed.reserved = torch.cuda.max_memory_reserved()


def predicted(model: LlamaForCausalLM, setting: Setting, checkpointing: bool) -> dict[str, int]:
    """What `adapterhub train --dry-run` would say of the memory."""
    adapter = ah.attach(model, {"lora": {"rank": RANK, "sites": SITES}})
    trained = sum(p.numel() for p in adapter.parameters())
    found = {
        "backbone weights": weight_bytes(adapter),
        "adapter, gradients, optimizer": 16 * trained,
        "activations": activation_bytes(adapter, setting.rows, setting.length, checkpointing),
    }
    ah.detach(model)
    return found


def measure(
    words: argparse.Namespace, setting: Setting, write: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The whole run. `write` is called with what is known, again and again."""
    model = build(SMALL if words.small else EIGHT_B, setting.device)
    recompute(model, words.checkpointing)
    batch = batch_of(model, setting)
    variants = compared()
    record: dict[str, Any] = {
        "setting": asdict(setting) | {"checkpointing": words.checkpointing, "small": words.small},
        "device": _device(setting),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft, bnb)}
        | {"python": platform.python_version()},
        "backbone": torch.cuda.memory_allocated() if setting.device == "cuda" else 0,
        "agreement": check(model, batch, setting),
        "predicted": predicted(model, setting, words.checkpointing),
        "variants": {},
    }
    more = words.methods.split(",") if words.methods else []
    variants |= {m: lambda model, s, m=m: ours(model, s, m) for m in more}
    variants["routed"] = routed
    runs: dict[str, list[Timed]] = {name: [] for name in variants}
    for name in [*variants, *reversed(variants)]:
        runs[name].append(time_steps(variants[name], model, batch, setting))
        record["variants"][name] = _summary(runs[name], setting)
        write(record)
    record["variants"]["trainer"] = _summary([time_trainer(model, batch, setting)], setting)
    write(record)
    return record


def _device(setting: Setting) -> str:
    gpu = setting.device == "cuda"
    return torch.cuda.get_device_name() if gpu else f"CPU ({platform.machine()})"


def _summary(runs: list[Timed], setting: Setting) -> dict[str, Any]:
    seconds = [s for run in runs for s in run.seconds]
    median = statistics.median(seconds)
    return {
        "tokens_per_second": setting.rows * setting.length / median,
        "seconds": {"median": median, "min": min(seconds), "max": max(seconds)},
        "medians": [statistics.median(run.seconds) for run in runs],
        "allocated": max(run.allocated for run in runs),
        "reserved": max(run.reserved for run in runs),
    }


def table(record: dict[str, Any]) -> str:
    """The Markdown table of a record."""
    gpu = not record["device"].startswith("CPU")
    head = record["device"] if gpu else f"{record['device']}, small form: not measured on GPU yet"
    lines = [head, "", "| variant | tokens/s | beside peft | peak memory |", "|---|---|---|---|"]
    base = record["variants"]["peft"]["tokens_per_second"]
    for name, facts in record["variants"].items():
        speed = facts["tokens_per_second"]
        memory = f"{facts['allocated'] / 1e9:.1f} GB" if gpu else "-"
        lines.append(f"| {name} | {speed:,.0f} | {speed / base:.2f} | {memory} |")
    if gpu:
        peak, whole = (
            record["variants"]["adapterhub"]["allocated"],
            sum(record["predicted"].values()),
        )
        lines += ["", f"Memory predicted {whole / 1e9:.1f} GB, measured {peak / 1e9:.1f} GB."]
    return "\n".join(lines)


def main() -> None:
    """Measure, write the record, print the table."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, metavar="RECORD")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--methods", default="houlsby,prefix,mam")
    words = parser.parse_args()
    if words.table:
        print(table(json.loads(words.table.read_text(encoding="utf-8"))))
        return
    setting = Setting("cpu", 2, 64, 4) if words.small else Setting("cuda", 4, 2048, 10)

    def write(record: dict[str, Any]) -> None:
        if words.out:
            words.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    record = measure(words, setting, write)
    print(json.dumps(record["agreement"], indent=2), table(record), sep="\n\n")


if __name__ == "__main__":
    main()
