"""An interrupt or an error before any line of the package: the state before, or the state after.

By default some lines of each operation are tried, with ADAPTERHUB_MATRIX=full each one, at its
first, its last and another run.
"""

import contextlib
import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import adapterhub as ah
from adapterhub.adapters.state import find_state
from adapterhub.errors import AdapterhubError
from adapterhub.files.native import Saved, write_adapter
from tests.kit import tiny_models
from tests.kit.compare import batch_of, differences, observed, observed_state
from tests.kit.data import word_tokenizer
from tests.kit.selection import long_table
from tests.kit.session import Lines, interrupt, out_of_memory, sample

# None: each line of the package that an operation runs, up to three times.
INTERRUPTS, ERRORS = (None, None) if tiny_models.FULL_MATRIX else (2, 1)
# What runs after an error to undo a change, and what ends a `with` block: it has no second net.
UNDOING = frozenset({"restore", "_close", "__exit__"})
NEW = ["<a>", "<b>"]
TEMPLATE = "{{ messages }}{# a stranger's #}"


@dataclass
class World:
    """A model with its tokenizer, and a folder with saved adapters."""

    model: Any
    tokenizer: Any
    folders: Path

    def attach(self, spec: Any, name: str, scale: float = 0.2) -> None:
        """Attach an adapter that has an effect."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(len(name))
            tiny_models.scramble(ah.attach(self.model, spec, name=name), std=scale)


def as_it_is(world: World) -> None:
    """Prepare nothing more."""


@dataclass
class Case:
    """An operation on a model with some adapters, each a spec and a name."""

    attached: tuple[tuple[Any, str], ...]
    operate: Callable[[World], Any]
    architecture: str = "bert"
    task: str = "classification"
    then: Callable[[World], Any] = as_it_is  # the rest of the preparation
    scale: float = 0.2
    half: bool = False  # the backbone in bf16


TWO = (("lora(rank=2)", "a"), ("ia3", "b"))
BOTTLENECKS = (("pfeiffer", "a"), ("pfeiffer", "b"))
NORMS = (("bitfit", "a"), ("lora(rank=2)", "b"))
PROMPT = (("prompt(length=2)", "a"),)


def load(world: World) -> None:
    ah.load(world.model, world.folders / "stranger", tokenizer=world.tokenizer)


def refused(world: World) -> None:
    with contextlib.suppress(AdapterhubError):
        ah.load(world.model, world.folders / "refused", tokenizer=world.tokenizer)


def routed(*rows: list[Any], **inputs: Any) -> Callable[[World], None]:
    """Return what routes rows, each list inside of the one before, and computes with inputs."""

    def run(world: World) -> None:
        with contextlib.ExitStack() as stack:
            for each in rows:
                stack.enter_context(ah.route(world.model, each))
            if inputs:
                compute(world, **inputs)

    return run


def disabled(world: World) -> None:
    with ah.disabled(world.model):
        pass


def attach(spec: Any) -> Callable[[World], Any]:
    return lambda world: ah.attach(world.model, spec, name="new")


def activate(*parts: Any) -> Callable[[World], Any]:
    return lambda world: ah.activate(world.model, *parts)


def detach(name: str | None = None) -> Callable[[World], Any]:
    return lambda world: ah.detach(world.model, name)


def compute(world: World, **inputs: Any) -> None:
    with torch.no_grad():
        world.model(**batch_of(world.model), **inputs)


ONE = (("lora(rank=2)", "a"),)
A, AVERAGE = activate("a"), activate(ah.Average(["a", "b"]))
CASES = {
    "compute in fp32": Case(NORMS, compute, then=A, half=True),
    "compute an average": Case(TWO, compute, then=AVERAGE),
    "compute tokens": Case((), compute, "llama", "causal-lm", then=load),
    "compute a prompt": Case(PROMPT, compute, "t5", "seq2seq"),
    "compute a mix": Case((("scalar-mix", "a"),), compute, "bert", "features"),
    "compute a prefix": Case((("prefix(length=2)", "a"),), compute, "llama", "causal-lm"),
    "attach lora": Case((), attach("lora(rank=2)")),
    "attach bitfit to others": Case(NORMS, attach("bitfit"), then=A, half=True),
    "attach prefix": Case((), attach("prefix(length=2)"), "llama", "causal-lm"),
    "attach prompt": Case(TWO, attach("prompt(length=2)"), "bert", "features"),
    "attach full": Case(TWO, attach("full"), "gpt2", "causal-lm"),
    "attach dora": Case((), attach("dora(rank=2)"), "llama", "causal-lm"),
    "attach mix": Case((), attach("scalar-mix"), "bert", "features"),
    "attach a fusion": Case(
        BOTTLENECKS, attach("adapterfusion(adapters=['a', 'b'])"), "bert", "features"
    ),
    "load with tokens": Case(TWO, load, "llama", "causal-lm"),
    "load refused": Case(TWO, refused, "llama", "causal-lm"),
    "activate a stack": Case(NORMS, activate("b", "a"), then=A),
    "activate none": Case(NORMS, activate(), then=A, half=True),
    "activate an average": Case(TWO, AVERAGE),
    "leave an average": Case(TWO, A, then=AVERAGE),
    "route rows": Case(TWO, routed(["a", None, "b"])),
    "route one": Case(NORMS, routed(["a"] * 3), then=A),
    "disabled": Case(NORMS, disabled, then=A),
    "route tokens": Case((), routed(["stranger"] * 3), "llama", "causal-lm", then=load),
    "route a loss": Case(TWO, routed(["a", "b", None], labels=torch.tensor([0, 1, 2]))),
    "routes nested": Case(TWO, routed(["a", "b", None], ["b"] * 3)),
    "detach one": Case(NORMS, detach("a"), then=A, half=True),
    "detach all": Case(TWO, detach(), then=AVERAGE),
    "detach tokens": Case((), detach("stranger"), "llama", "causal-lm", then=load),
    "detach prompt": Case(PROMPT, detach("a"), "t5", "seq2seq"),
    "merge": Case(
        ONE, lambda world: ah.merge(world.model), "bert", "features",
        then=lambda world: world.model.pooler.train(), scale=0.01,
    ),
    "unmerge": Case(
        ONE, lambda world: ah.unmerge(world.model), "gpt2", "causal-lm",
        then=lambda world: ah.merge(world.model), scale=0.01,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Save an adapter with new tokens and a chat template, and one that is refused."""
    folder = tmp_path_factory.mktemp("strangers")
    tokenizer = word_tokenizer("<s>", "")
    model = tiny_models.model("llama", "causal-lm", vocab_size=len(tokenizer))
    adapter = ah.attach(model, "lora(rank=2)", name="stranger", tokenizer=tokenizer)
    ah.detach(model)
    tokenizer.add_tokens(NEW)
    tokenizer.chat_template = TEMPLATE
    adapter = ah.attach(model, "lora(rank=2)", name="stranger", tokenizer=tokenizer)
    tiny_models.scramble(adapter)
    adapter.save(folder / "stranger")
    manifest, tensors = Saved.at(folder / "stranger").read()
    assert len(manifest.tokens) == len(NEW)
    other = replace(manifest.backbone, fingerprint="v1-" + "0" * 64)
    write_adapter(folder / "refused", replace(manifest, backbone=other), tensors)
    return folder


def new_world(case: Case, folders: Path) -> World:
    tokenizer = word_tokenizer("<s>", "") if case.architecture == "llama" else None
    size = {} if tokenizer is None else {"vocab_size": len(tokenizer)}
    model = tiny_models.model(case.architecture, case.task, **size)
    world = World(model.bfloat16() if case.half else model, tokenizer, folders)
    for spec, name in case.attached:
        world.attach(spec, name, case.scale)
    case.then(world)
    return world


def operated(case: Case, world: World, lines: Lines) -> BaseException | None:
    torch.manual_seed(3)  # of new modules
    return lines.run(lambda: case.operate(world))


def restored(world: World) -> dict[str, Any]:
    """Attach and detach an adapter, and then all of them."""
    model = world.model
    while getattr(model, "_adapterhub_merges", None) and not find_state(model):
        ah.unmerge(model)
    ah.attach(model, "lora(rank=2)", name="next").detach()
    if find_state(model):
        ah.detach(model)
    return observed(model.eval(), world.tokenizer)


@pytest.fixture(autouse=True)
def python_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Trial:
    """An operation that ran without a fault: what was observed, and the lines that it ran."""

    def __init__(self, case: Case, folders: Path) -> None:
        self.case, self.folders = case, folders
        world = new_world(replace(case, attached=(), then=as_it_is), folders)
        self.pristine = observed(world.model, world.tokenizer)
        operated(case, new_world(case, folders), Lines())  # what is done once only
        world = new_world(case, folders)
        self.before = observed(world.model, world.tokenizer)
        self.lines = Lines(spared=UNDOING)
        assert operated(case, world, self.lines) is None
        self.after = observed(world.model, world.tokenizer)

    def run(self, fault: Callable[[], None], count: int | None) -> None:
        """Run it again and again, with a fault before another line each time."""
        chosen = sample(self.lines, count, seed=len(repr(self.before)))
        if fault is out_of_memory:
            chosen = [line for line in chosen if line not in self.lines.undoing]
        problems: list[str] = []
        fired = 0
        for line in chosen:
            world, attempt = new_world(self.case, self.folders), Lines(line, fault)
            error = operated(self.case, world, attempt)
            fired += attempt.fired
            at = f"{line}, {type(error).__name__}"
            try:
                problems += [f"{at}: {found}" for found in self.problems(world)]
            except Exception as other:
                problems.append(f"{at}: {type(other).__name__}: {other}")
        assert not problems, "\n".join([f"{len(problems)} of {fired}", *problems[:40]])
        assert len(self.lines.runs) > 40
        assert fired >= len(chosen) // 2  # what runs depends a little on the order of sets

    def problems(self, world: World) -> list[str]:
        """List in what a model is neither as before nor as after, and what cannot be undone."""
        found: list[str] = []
        if self.case.operate is compute:
            own = observed_state(world.model)["adapters"]
            found += differences(self.before["state"]["adapters"], own)
            compute(world)  # a call that did not end leaves its copy until the next one
        now = observed(world.model, world.tokenizer)
        if now not in (self.before, self.after):
            found += min((differences(e, now) for e in (self.before, self.after)), key=len)[:2]
        later = differences(self.pristine, restored(world))
        return found + [f"then: {line}" for line in later[:2]]


@pytest.fixture(scope="module")
def trials(folders) -> Callable[[str], Trial]:
    return functools.cache(lambda name: Trial(CASES[name], folders))


@long_table("name", CASES, parts=16, nightly=2)
def test_an_interrupt_before_any_line_leaves_no_half_state(name, trials):
    trials(name).run(interrupt, INTERRUPTS)


@long_table("name", CASES, parts=16, nightly=2)
def test_an_error_before_any_line_leaves_no_half_state(name, trials):
    trials(name).run(out_of_memory, ERRORS)
