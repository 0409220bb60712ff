"""The bytes of an adapter's tensors: four for each number that trains, without the head.

What only training needs is left out, and fixed random numbers are computed again. `FIXED` has the
methods whose files have other numbers: the end of their tensors' names, and why they are stored.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

import adapterhub as ah
from tests.kit import tiny_models
from tests.kit.matrix import METHODS, example
from tests.kit.selection import long_table

_COMPONENTS = "computed from the weight, and another decomposition may have other signs"
FIXED: dict[str, tuple[str, str]] = {
    "adamss": (r"\.places", "clusters, which another release of a library may compute otherwise"),
    "adapterfusion": (r"\.members\..*", "the fused adapters, which may no longer exist elsewhere"),
    "cartridge": (r"\.first", "keys and values of the first tokens of a text"),
    "delora": (r"\.norms", "norms of the weight, which a quantized backbone does not have exactly"),
    "kasa": (r"\.[AB]0", _COMPONENTS),
    "lora-fa": (r"\.A", "drawn by torch, or computed from the data"),
    "lora-ga": (r"\.[AB]0", "computed from gradients on the data"),
    "lora-xs": (r"\.[AB]0", f"{_COMPONENTS}; `stored: false` leaves them out"),
    "mica": (r"\.B", _COMPONENTS),
    "olora": (r"\.[AB]0", _COMPONENTS),
    "pissa": (r"\.[AB]0", _COMPONENTS),
    "psoft": (r"\.[AB]0", f"{_COMPONENTS}; `stored: false` leaves them out"),
    "tinylora": (r"\.[AB]0", f"{_COMPONENTS}; `stored: false` leaves them out"),
}
FORMAT = Path(__file__).parents[3] / "docs" / "reference" / "format.md"


def tensor_bytes(folder: Path) -> tuple[dict[str, int], int]:
    """Return the bytes of each tensor of an adapter file, and of all of them."""
    file = folder / "adapter.safetensors"
    tensors = load_file(file)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    header = int.from_bytes(file.read_bytes()[:8], "little")
    return sizes, file.stat().st_size - 8 - header


def check(spec: str, folder: Path, fixed: str | None) -> None:
    """Check that a file has the head, the trained numbers, and what `fixed` matches."""
    adapter = ah.attach(tiny_models.model("bert"), example(spec))
    adapter.save(folder)
    sizes, total = tensor_bytes(folder)
    forms = (method.inference_form() for method in adapter.methods)
    trained = 4 * sum(form.count(adapter.anatomy) for form in forms)
    head = sum(size for name, size in sizes.items() if name.startswith("head."))
    more = sum(size for name, size in sizes.items() if fixed and re.search(f"{fixed}$", name))
    assert (more > 0) == (fixed is not None)
    assert total - head - more == trained


@long_table("method", sorted(METHODS), 4)
def test_a_file_has_four_bytes_for_each_trained_number(method, tmp_path):
    check(method, tmp_path / "a", FIXED[method][0] if method in FIXED else None)


@pytest.mark.parametrize(
    "spec",
    ["lora-xs(rank=4, stored=false)", "psoft(rank=4, stored=false)", "tinylora(stored=false)"],
)
def test_components_can_be_left_out(spec, tmp_path):
    check(spec, tmp_path / "a", None)


def test_the_specification_lists_the_methods_with_other_numbers():
    text = " ".join(FORMAT.read_text(encoding="utf-8").split())
    (listed,) = re.findall(r"four bytes for each number that trains, but for (.*?):", text)
    assert re.findall(r"`([a-z-]+)`", listed) == sorted(FIXED)
