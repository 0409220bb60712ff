"""Compare LoRA on an 8 B Llama in nf4 or bf16, all projections, with peft: tokens/s and memory.

    python benchmarks/gpu/quantized.py --out 8b.json             # one GPU of 80 GB, about 5 minutes
    python benchmarks/gpu/quantized.py --small --out small.json  # the same on a CPU, in seconds
    python benchmarks/gpu/quantized.py --bf16 --out 8b-bf16.json # a backbone that is not quantized
    python benchmarks/gpu/quantized.py --table 8b.json

The weights are random and never leave the device. All variants share them, the batch, the values of
A and B, and the optimizer (AdamW, fused, fp32). First, losses and gradients of all variants are
compared: relative tolerances are 1e-3, and 5e-2 for all gradients together, 0.3 for peft-kbit,
which computes in fp32 between projections. Those that agree are timed, in the order A B .. B A: 3
warm-up steps, then the median. The variants:

    adapterhub      attach(model, "lora"); bf16 without autocast
    adapterhub-train
                    the same, with the loss of `adapterhub train`: logits of some tokens at a time
    adapterhub-compiled
                    adapterhub-train with train.compile; with --no-checkpointing
    peft            get_peft_model under autocast in bf16: peft's fastest setup
    peft-kbit       with prepare_model_for_kbit_training, as in its documentation; not with --bf16
    trainer         peft in transformers' Trainer (bf16=True), timed per step
    --methods       further methods of adapterhub on the same backbone, only timed
    routed          row i of the batch uses LoRA i, all of the same size, only timed

The record is written after each run, so measurements are kept if a later run fails.
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
from adapterhub.loop.engine import Engine
from adapterhub.loop.speedups import Speedups, Trial, with_and_without_padding
from adapterhub.loop.trainee import AdapterTrainee
from adapterhub.recipe.recipe import RunOptions
from adapterhub.speed.activation_memory import activation_bytes, logit_bytes
from adapterhub.speed.compiled_layers import compiled_layers
from adapterhub.speed.head_loss import HeadLoss
from adapterhub.tasks.common.language_models import logits_at_once
from adapterhub.training.plan import weight_bytes

LOSS, GRADIENT = 1e-3, 5e-2  # relative; autocast rounds to bf16 at different points
IN_FP32 = 0.3  # of gradients in fp32 beside those in bf16
COMPILED = RunOptions(compile=True)
RANK, ALPHA, LEARNING_RATE = 16, 16, 1e-4
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SITES = ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.down")


@dataclass
class Setting:
    """The settings that all variants share."""

    device: str
    rows: int
    length: int
    steps: int
    checkpointing: bool
    warm_up: int = 3


@dataclass
class Timed:
    """Step times of one variant in seconds, and peak memory in bytes (0 without a GPU)."""

    seconds: list[float] = field(default_factory=list)
    allocated: int = 0
    reserved: int = 0


def batch_of(model: LlamaForCausalLM, setting: Setting) -> dict[str, torch.Tensor]:
    """Make a batch without padding, the same for all variants."""
    generator = torch.Generator().manual_seed(1)
    size = (setting.rows, setting.length)
    ids = torch.randint(1, model.config.vocab_size, size, generator=generator).to(setting.device)
    return {"input_ids": ids, "labels": ids}


def values(path: str, shapes: tuple[torch.Size, torch.Size]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw A and B of one projection; B is not zero, so both get a gradient."""
    generator = torch.Generator().manual_seed(sum(map(ord, path)))
    a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    return a / shapes[0][1] ** 0.5, 0.01 * b


@dataclass
class Live:
    """An attached variant: the model to call, and A and B by the path of their projection."""

    model: nn.Module
    factors: dict[str, tuple[nn.Parameter, nn.Parameter]]
    context: Callable[[], Any]
    parameters: list[nn.Parameter]
    below_head: HeadLoss | None = None

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute the loss of a batch."""
        with self.context():
            return self.below_head(batch) if self.below_head else self.model(**batch).loss


@contextmanager
def attach_adapterhub(
    model: LlamaForCausalLM, setting: Setting, spec: Any = None
) -> Iterator[Live]:
    """Attach with adapterhub."""
    lora = {"lora": {"rank": RANK, "alpha": ALPHA, "sites": SITES}}
    adapter = ah.attach(model, spec or lora)
    placed = [p for p in adapter.placed if spec is None]
    factors = {p.site.host: (p.module.A, p.module.B) for p in placed}
    try:
        yield Live(model, factors, nullcontext, adapter.parameters())
    finally:
        ah.detach(model)


@contextmanager
def attach_train(model: LlamaForCausalLM, setting: Setting) -> Iterator[Live]:
    """Attach with adapterhub, and compute the loss as `adapterhub train` does."""
    with attach_adapterhub(model, setting) as live:
        (adapter,) = ah.adapters(model).values()
        yield replace(live, below_head=HeadLoss(adapter, model.lm_head, True, {}, ""))


@contextmanager
def attach_compiled(model: LlamaForCausalLM, setting: Setting) -> Iterator[Live]:
    """Attach with adapterhub, and compile the layers as `train.compile` does."""
    with attach_train(model, setting) as live:
        (adapter,) = ah.adapters(model).values()
        few = {name: rows[:2] for name, rows in batch_of(model, setting).items()}
        trial, notes = Trial(with_and_without_padding(few)), list[str]()
        layers = compiled_layers(adapter, COMPILED, lambda: trial, notes.append)
        with Speedups([layers] if layers else [], notes.append) as speedups:
            speedups.enter(Engine(AdapterTrainee(adapter), COMPILED))
            assert "compiled in" in notes[0], notes
            yield live


@contextmanager
def attach_routed(model: LlamaForCausalLM, setting: Setting) -> Iterator[Live]:
    """Attach one LoRA per row of the batch with adapterhub."""
    names = [f"row-{number}" for number in range(setting.rows)]
    lora = {"lora": {"rank": RANK, "alpha": ALPHA, "sites": SITES}}
    adapters = [ah.attach(model, lora, name=name) for name in names]
    try:
        with ah.route(model, names):  # gradients are computed inside too
            yield Live(model, {}, nullcontext, [p for a in adapters for p in a.parameters()])
    finally:
        ah.detach(model)


@contextmanager
def attach_peft(model: LlamaForCausalLM, setting: Setting, kbit: bool = False) -> Iterator[Live]:
    """Attach with peft."""
    plain = {n: p.data for n, p in model.named_parameters() if not hasattr(p, "quant_state")}
    if kbit:
        peft.prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=setting.checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS))
    wrapped = peft.get_peft_model(model, config)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    kind = "Linear4bit" if model.is_loaded_in_4bit else "Linear"
    assert {type(m).__name__ for m in layers.values()} == {kind}, "unexpected peft layer"
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
    """Set the same A and B in every variant."""
    with torch.no_grad():
        for path, (a, b) in live.factors.items():
            new = values(path, (a.shape, b.shape))
            a.copy_(new[0])
            b.copy_(new[1])


def recompute(model: LlamaForCausalLM, on: bool) -> None:
    """Switch gradient checkpointing of every layer; transformers 5.23 renamed the methods."""
    new = hasattr(model, "activation_checkpointing_enable")
    stem = "activation_checkpointing" if new else "gradient_checkpointing"
    getattr(model, f"{stem}_{'enable' if on else 'disable'}")()


def check(
    model: LlamaForCausalLM,
    batch: dict[str, torch.Tensor],
    setting: Setting,
    variants: dict[str, Any],
) -> dict[str, dict[str, Any]]:
    """Compare each variant's loss and gradients with adapterhub's.

    Returns:
        By variant: its loss, the relative difference of all gradients, the largest of one, and
        whether loss and gradients agree; or the error that it raised.
    """
    found: dict[str, dict[str, Any]] = {}
    own: dict[Any, torch.Tensor] = {}
    for name, variant in variants.items():
        try:
            loss, gradients = loss_and_gradients(variant, model, batch, setting)
        except Exception as error:  # the other variants are still worth their time
            found[name] = {"agrees": False, "error": f"{type(error).__name__}: {error}"[:500]}
            continue
        finally:
            _free()
        own = own or gradients
        each = [(gradients[k] - own[k]).norm() / own[k].norm() for k in own]
        flat, base = (torch.cat([g[k].flatten() for k in own]) for g in (gradients, own))
        far = ((flat - base).norm() / base.norm()).item()
        start = found["adapterhub"]["loss"] if found else loss
        limit = IN_FP32 if name == "peft-kbit" else GRADIENT
        agrees = abs(loss / start - 1) < LOSS and far < limit
        found[name] = {"loss": loss, "gradient": far, "largest": max(each).item(), "agrees": agrees}
    return found


def loss_and_gradients(
    variant: Any, model: LlamaForCausalLM, batch: dict[str, torch.Tensor], setting: Setting
) -> tuple[float, dict[Any, torch.Tensor]]:
    """Compute the loss of a variant, and the gradients of A and B."""
    with variant(model, setting) as live:
        fill(live)
        model.train()
        loss = live.loss(batch)
        loss.backward()
        pairs = live.factors.items()
        return loss.item(), {
            (path, i): p.grad.float().cpu() for path, pair in pairs for i, p in enumerate(pair)
        }


def compared(model: LlamaForCausalLM, setting: Setting) -> dict[str, Any]:
    """Return the variants whose losses and gradients must agree."""
    variants = {
        "adapterhub": attach_adapterhub,
        "adapterhub-train": attach_train,
        "peft": attach_peft,
    }
    if model.is_loaded_in_4bit:
        variants["peft-kbit"] = partial(attach_peft, kbit=True)
    if not setting.checkpointing:
        variants["adapterhub-compiled"] = attach_compiled
    return variants


def time_steps(
    variant: Any, model: LlamaForCausalLM, batch: dict[str, torch.Tensor], setting: Setting
) -> Timed:
    """Time the steps of one variant."""
    _free()
    timed = Timed()
    with variant(model, setting) as live:
        model.train()
        fused = torch.optim.AdamW(live.parameters, lr=LEARNING_RATE, fused=True)
        for number in range(setting.warm_up + setting.steps):
            if number == setting.warm_up:
                _reset_peak(setting)
            start = _now(setting)
            live.loss(batch).backward()
            fused.step()
            fused.zero_grad(set_to_none=True)
            timed.seconds.append(_now(setting) - start)
        _note_peak(timed, setting)
    return replace(timed, seconds=timed.seconds[setting.warm_up :])


class Clock(TrainerCallback):
    """Callback that times the steps of a Trainer."""

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
    """Time peft in the stock Trainer."""
    _free()
    rows = [{name: t[i].cpu() for name, t in batch.items()} for i in range(setting.rows)]
    with attach_peft(model, setting) as live, tempfile.TemporaryDirectory() as folder:
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


def predicted(model: LlamaForCausalLM, setting: Setting) -> dict[str, int]:
    """Return the memory that `adapterhub train --dry-run` would predict."""
    adapter = ah.attach(model, {"lora": {"rank": RANK, "sites": SITES}})
    size, checkpointing = (setting.rows, setting.length), setting.checkpointing
    trained = sum(p.numel() for p in adapter.parameters())
    memory = {
        "backbone weights": weight_bytes(adapter),
        "adapter, gradients, optimizer": 16 * trained,
        "activations": activation_bytes(adapter, *size, checkpointing)
        + logit_bytes(adapter, logits_at_once(model.lm_head, setting.rows * setting.length)),
    }
    ah.detach(model)
    return memory


def measure(
    options: argparse.Namespace, setting: Setting, write: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run the whole benchmark; `write` is called with the record after each run."""
    model = build(SMALL if options.small else EIGHT_B, setting.device, not options.bf16)
    recompute(model, setting.checkpointing)
    batch = batch_of(model, setting)
    more = options.methods.split(",") if options.methods else []
    others = {m: lambda model, s, m=m: attach_adapterhub(model, s, m) for m in more}
    others["routed"] = attach_routed
    variants = compared(model, setting)
    only = options.only.split(",") if options.only else [*variants, *others, "trainer"]
    variants = {name: v for name, v in variants.items() if name in ("adapterhub", *only)}
    record: dict[str, Any] = {
        "setting": asdict(setting) | {"small": options.small, "bf16": options.bf16},
        "device": _device(setting),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft, bnb)}
        | {"python": platform.python_version()},
        "backbone": torch.cuda.memory_allocated() if setting.device == "cuda" else 0,
        "agreement": (agreement := check(model, batch, setting, variants)),
        "predicted": predicted(model, setting),
        "variants": {},
    }
    write(record)
    variants = {name: v for name, v in variants.items() if agreement[name]["agrees"]} | others
    variants = {name: v for name, v in variants.items() if name in only}
    runs: dict[str, list[Timed]] = {name: [] for name in variants}
    for name in [*variants, *reversed(variants)]:
        try:
            runs[name].append(time_steps(variants[name], model, batch, setting))
        except torch.OutOfMemoryError:
            record.setdefault("out of memory", []).append(name)
            continue
        record["variants"][name] = _summary(runs[name], setting)
        write(record)
    if "trainer" in only:
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
    """Return the Markdown table of a record."""
    gpu = not record["device"].startswith("CPU")
    head = record["device"] if gpu else f"{record['device']}, small model, whose times mean nothing"
    lines = [head, "", "| variant | tokens/s | vs. peft | peak memory |", "|---|---|---|---|"]
    base = record["variants"]["peft"]["tokens_per_second"]
    for name, facts in record["variants"].items():
        speed = facts["tokens_per_second"]
        memory = f"{facts['allocated'] / 1e9:.1f} GB" if gpu else "-"
        lines.append(f"| {name} | {speed:,.0f} | {speed / base:.2f} | {memory} |")
    if gpu:
        peak, whole = (
            record["variants"]["adapterhub-train"]["allocated"],
            sum(record["predicted"].values()),
        )
        lines += ["", f"Memory predicted {whole / 1e9:.1f} GB, measured {peak / 1e9:.1f} GB."]
    return "\n".join(lines)


def main() -> None:
    """Measure, write the record and print the table."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, metavar="RECORD")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--methods", default="houlsby,prefix,mam")
    parser.add_argument("--only", metavar="VARIANTS", help="time these, separated by commas")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text(encoding="utf-8"))))
        return
    rows = 4 if options.checkpointing else 2
    sizes = ("cpu", 2, 64, 4) if options.small else ("cuda", rows, 2048, options.steps)
    setting = Setting(*sizes, options.checkpointing)

    def write(record: dict[str, Any]) -> None:
        if options.out:
            options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    record = measure(options, setting, write)
    print(json.dumps(record["agreement"], indent=2), table(record), sep="\n\n")


if __name__ == "__main__":
    main()
