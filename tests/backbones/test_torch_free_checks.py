"""Checks of a backbone before any library is imported."""

from __future__ import annotations

import pytest

from adapterhub.anatomy.backbone import DTYPES
from adapterhub.backbones.quantized import QUANTIZATIONS
from adapterhub.backbones.torch_free_checks import (
    DTYPE_NAMES,
    QUANTIZATION_LIBRARIES,
    check_backbone_options,
)
from adapterhub.errors import BackboneError, ConfigError


def test_the_names_are_those_of_loading():
    assert set(DTYPE_NAMES) == DTYPES.keys()
    assert QUANTIZATIONS.keys() == QUANTIZATION_LIBRARIES.keys()


def test_folders_and_hub_ids_pass(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    check_backbone_options(str(tmp_path), "bf16", None)
    check_backbone_options("sentence-transformers/all-MiniLM-L6-v2")
    check_backbone_options("bert-base-uncased")


@pytest.mark.parametrize(
    ("file", "place", "problem"),
    [
        *((None, name, "no backbone") for name in ("./nothing", "a/b/c", "/no/such", "a b")),
        ("x.bin", "x.bin", "is a file"),
        ("x.bin", ".", r"lacks config\.json"),
        ("model/config.json", ".", r"--backbone .*model"),  # the one checkpoint in a folder
    ],
)
def test_a_place_without_a_checkpoint_is_refused(file, place, problem, tmp_path):
    if file:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    with pytest.raises(BackboneError, match=problem):
        check_backbone_options(str(tmp_path / place) if file else place)


@pytest.mark.parametrize(
    ("dtype", "quantize", "problem"), [("fp8", None, "fp8"), (None, "nf5", "nf5")]
)
def test_unknown_precisions_are_refused(dtype, quantize, problem):
    with pytest.raises(ConfigError, match=problem):
        check_backbone_options("a/b", dtype, quantize)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"(?s)bitsandbytes.*adapterhub\[quantized\]"):
        check_backbone_options("a/b", None, "nf4")
