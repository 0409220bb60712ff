"""Forging adapter files: a valid adapter, and functions that change it and fix its digest."""

import hashlib
import json
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import adapterhub as ah
from adapterhub.errors import AdapterhubError
from adapterhub.files.schema import canonical_json
from adapterhub.registry.version_files import DATE_FILE
from tests.kit import tiny_models

Tree = dict[str, Any]
LABELS = {
    "id2label": {0: "ham", 1: "eggs", 2: "spam"},
    "label2id": {"ham": 0, "eggs": 1, "spam": 2},
}
TENSORS, MANIFEST, CARD = "adapter.safetensors", "adapter.json", "README.md"
SECONDS = 10.0  # far longer than any refusal, far shorter than an attack on CPU time


def new_model() -> PreTrainedModel:
    """Build the backbone of the valid adapter."""
    return tiny_models.model("bert", **LABELS)


def save_valid(folder: Path, method: Any = "lora(rank=2)") -> Path:
    """Save a valid adapter of `new_model`."""
    adapter = ah.attach(new_model(), method)
    tiny_models.scramble(adapter)
    adapter.save(folder)
    return folder


def read_tree(folder: Path) -> Tree:
    """Read the manifest as JSON."""
    tree: Tree = json.loads((folder / MANIFEST).read_bytes())
    return tree


def sealed(tree: Tree) -> bytes:
    """Return the canonical bytes of a manifest with a correct digest, so that it looks genuine."""
    rest = {name: value for name, value in tree.items() if name != "sha256"}
    return canonical_json({**rest, "sha256": hashlib.sha256(canonical_json(rest)).hexdigest()})


def forge(folder: Path, change: Callable[[Tree], None]) -> None:
    """Change the manifest, update its digest, and leave out the one that was published."""
    tree = read_tree(folder)
    change(tree)
    (folder / MANIFEST).write_bytes(sealed(tree))
    if (stamp := folder / DATE_FILE).exists():
        stamp.write_bytes(stamp.read_bytes().partition(b"\n")[0] + b"\n")


def forge_file(folder: Path, name: str, data: bytes) -> None:
    """Replace a file and update its digest in the manifest."""
    (folder / name).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    if name in read_tree(folder)["files"]:
        forge(folder, lambda tree: tree["files"].update({name: digest}))


def split_header(data: bytes) -> tuple[Tree, bytes]:
    """Split a safetensors file into its header and its data."""
    length = int.from_bytes(data[:8], "little")
    header: Tree = json.loads(data[8 : 8 + length])
    return header, data[8 + length :]


def join_header(header: Tree | bytes, data: bytes, length: int | None = None) -> bytes:
    """Build a safetensors file; `length` is its claimed header length."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    claimed = len(head) if length is None else length
    return claimed.to_bytes(8, "little") + head + data


class Bomb:
    """An object whose pickle creates a file when loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def bomb(canary: Path) -> bytes:
    """Return a pickle that creates `canary` when loaded."""
    data = pickle.dumps(Bomb(canary))
    pickle.loads(data)
    assert canary.exists(), "this pickle would not reveal that it was loaded"
    canary.unlink()
    return data


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """Capture everything about a model that a refused adapter must leave unchanged."""
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return {
        "class": type(model),
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "attributes": sorted(vars(model)),
        "hooks": [len(getattr(m, kind)) for m in model.modules() for kind in hooks],
        "parameters": [(n, id(p), p.requires_grad) for n, p in model.named_parameters()],
        "bytes": {
            name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            for name, tensor in model.state_dict().items()
        },
        "config": model.config.to_dict(),
    }


def peak() -> int:
    """Return the most resident memory of this process since the last call, in kB; 0 without Linux.

    Not `ru_maxrss`, which begins with the memory of the process that started this one.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


@contextmanager
def limited(megabytes: int = 100, most: int = 2 << 30) -> Iterator[None]:
    """Interrupt a block that waits, and fail one that computes for long or takes much memory.

    `most` are the bytes of its address space beyond those of now.
    """

    def late(*_: object) -> None:
        raise TimeoutError("waits for something")

    import resource  # not on Windows

    handler = signal.signal(signal.SIGALRM, late)
    timer = signal.setitimer(signal.ITIMER_REAL, 6 * SECONDS)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform.startswith("linux"):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + most, limits[1]))
    peak()
    start, before = time.process_time(), peak()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
    assert time.process_time() - start < SECONDS
    assert peak() - before < megabytes << 10, "takes much memory"


@contextmanager
def refused(model: PreTrainedModel, text: str = "") -> Iterator[None]:
    """Expect one readable AdapterhubError, quickly, in little memory, and an unchanged model."""
    before = state_of(model)
    assert "_adapterhub" not in before["attributes"]
    with pytest.raises(AdapterhubError) as error, limited():
        yield
    assert state_of(model) == before
    message = str(error.value)
    assert text in message
    assert error.value.problem
    assert len(message) < 20_000
    assert harmless_text(message), message


_SPINNER = re.compile("[\u2800-\u28ff] [^\r\n]*\r+")  # a stage, which the next one overwrites


def harmless_text(text: str) -> bool:
    """Whether text has no control character but tab and newline, no bidi override, no surrogate."""
    text = _SPINNER.sub("", text)
    bad = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
    bad |= {*range(0xD800, 0xE000), 0x2028, 0x2029}
    return not {ord(c) for c in text} & (bad - {0x09, 0x0A})
