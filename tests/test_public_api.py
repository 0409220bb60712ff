"""The functions of `import adapterhub as ah`, used together."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import adapterhub as ah
from adapterhub import extend
from adapterhub.errors import ConfigError, MismatchError, RegistryError
from adapterhub.methods import METHODS, Method
from tests.kit import tiny_models


def test_every_exported_name_is_importable_and_no_other():
    assert len(ah.__all__) > 20
    for module in (ah, extend):
        assert all(getattr(module, name) is not None for name in module.__all__)
    assert dir(ah) == sorted(ah.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lora'"):
        ah.lora  # noqa: B018


def test_the_python_verbs_take_any_reference(own_registry, tmp_path):
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "lora", name="polite")
    for parameter in adapter.parameters():
        parameter.data.normal_()
    logits = model(**tiny_models.batch()).logits
    adapter.save(tmp_path / "out")
    entry = ah.publish(tmp_path / "out", tags=("best",))
    adapter.detach()
    for reference in (str(tmp_path / "out"), tmp_path / "out", "polite", "polite@best", "polite@1"):
        loaded = ah.load(model, reference)
        assert model(**tiny_models.batch()).logits.equal(logits)
        loaded.detach()
    assert [found.reference for found in ah.search(method="lora")] == [entry.reference]
    assert ah.pull("polite").is_dir()
    ah.yank("polite@v1", "no")
    with pytest.raises(RegistryError, match="yanked"):
        ah.load(model, "polite")


def test_load_takes_the_adapter_of_the_models_own_backbone(own_registry, tmp_path):
    for number, seed in enumerate((0, 1)):
        model = tiny_models.model("bert", seed=seed)
        adapter = ah.attach(model, "lora", name="polite")
        adapter.save(tmp_path / f"out-{number}")
        ah.publish(tmp_path / f"out-{number}")
    adapter.detach()
    assert ah.load(model, "polite").manifest().backbone.fingerprint
    with pytest.raises(RegistryError, match="has no adapter 'polite' for"):
        ah.load(tiny_models.model("bert", seed=2), "polite")
    with pytest.raises(MismatchError):
        ah.load(tiny_models.model("bert", seed=2), tmp_path / "out-0")


@pytest.fixture
def own_registry(tmp_path, monkeypatch):
    """Use an empty registry and cache."""
    monkeypatch.setenv("ADAPTERHUB_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_every_method_is_a_class_for_editors():
    """Each class of METHODS is exported under its own name, and no other."""
    classes = {cls.__name__: cls for cls in METHODS.values()}
    assert len(classes) == len(METHODS)
    exported = {name: getattr(ah, name) for name in ah.__all__}
    assert {n: c for n, c in exported.items() if isinstance(c, type) and issubclass(c, Method)} == (
        classes
    )
    tree = ast.parse(Path(ah.__file__).read_text(encoding="utf-8"))
    declared = {
        alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        for alias in node.names if alias.asname
    }  # fmt: skip
    assert classes.keys() <= declared, "visible to type checkers"


@pytest.mark.parametrize(
    "method", [ah.LoRA(rank=2), [ah.LoRA(rank=2)], "lora(rank=2)", [{"lora": {"rank": 2}}]], ids=str
)
def test_a_method_object_is_a_spec(method):
    adapter = ah.attach(tiny_models.model("bert"), method)
    assert adapter.methods == ah.attach(tiny_models.model("bert"), "lora", rank=2).methods


def test_options_beside_the_method():
    model = tiny_models.model("bert")
    assert ah.attach(model, "lora", name="a", r=2, sites=["attn.q"]).methods == (
        ah.LoRA(rank=2, sites=("attn.q",)),
    )
    for method, options in (("lora", {"rnak": 2}), (["lora", "bitfit"], {"rank": 2})):
        with pytest.raises(ConfigError, match="rank"):
            ah.attach(model, method, name="b", **options)
    assert list(ah.adapters(model)) == ["a"]


class Bias(extend.OutputModule):
    def __init__(self, site, scale):
        super().__init__()
        self.bias, self.scale = torch.nn.Parameter(torch.zeros(site.d_out)), scale

    def forward(self, x, y):
        return y + self.scale * self.bias


@dataclass(frozen=True)
class Shift(extend.ProjectionMethod):
    name = "shift"
    paper = "none"
    summary = "a bias at each projection"
    learning_rate = 1e-3

    scale: float = extend.option(1.0, "factor of the bias")

    def module(self, site, rank, anatomy):
        return Bias(site, self.scale)

    def size(self, site, rank):
        return site.d_out


def test_a_method_outside_the_package_needs_extend_alone(monkeypatch, tmp_path):
    monkeypatch.setitem(METHODS, "shift", Shift)
    model = tiny_models.model("bert")
    adapter = ah.attach(model, "shift(scale=2)")
    tiny_models.scramble(adapter)
    changed = model(**tiny_models.batch()).logits
    adapter.save(tmp_path / "shift")
    adapter.detach()
    ah.load(model, tmp_path / "shift")
    assert model(**tiny_models.batch()).logits.equal(changed)
