"""AdapterFusion: outputs equal those of the `adapters` library; members are independent copies."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, BertForSequenceClassification

import adapterhub as ah
from adapterhub.errors import AttachError, ConfigError, MismatchError, SiteError
from tests.kit import tiny_models
from tests.kit.tiny_models import logits

GOLDEN = Path(__file__).parents[1] / "golden" / "adapters"


def attach_members(model, **methods):
    """Attach adapters by name, with noise in their tensors."""
    for number, (name, method) in enumerate(methods.items()):
        tiny_models.scramble(ah.attach(model, method, name=name), seed=number)


def test_logits_equal_those_of_adapters():
    tensors = load_file(GOLDEN / "fusion-bert.safetensors")
    config = json.loads((GOLDEN / "fusion-bert.json").read_text(encoding="utf-8"))
    model = BertForSequenceClassification(AutoConfig.for_model(**config)).eval()

    def part(prefix):
        return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}

    def fill(adapter, prefix):
        targets = {n: t for n, t in adapter.tensors().items() if not n.startswith("head.")}
        golden = part(prefix)
        assert golden.keys() == {n for n in targets if ".members." not in n}
        with torch.no_grad():
            for name, tensor in golden.items():
                targets[name].copy_(tensor)

    model.load_state_dict(part("backbone."))
    fill(ah.attach(model, "pfeiffer(size=8)", name="a"), "a.")
    fill(ah.attach(model, "pfeiffer(size=4)", name="b"), "b.")
    fill(ah.attach(model, "adapterfusion(adapters=['a', 'b'])", name="fused"), "fusion.")
    with torch.no_grad():
        output = model(**part("input.")).logits
    torch.testing.assert_close(output, tensors["logits"], atol=1e-5, rtol=1e-5)


MIXES = {
    "a": "pfeiffer(size=8)",
    "b": "parallel(size=4)",
    "c": "compacter(size=8, sites=['ffn'])",
}
FUSED = "adapterfusion(adapters=['a', 'b', 'c'])"


def test_each_token_mixes_the_updates_of_its_members():
    model = tiny_models.model("bert")
    attach_members(model, **MIXES)
    fused = ah.attach(model, FUSED, name="fused")
    tiny_models.scramble(fused)
    assert [p.site.id for p in fused.placed] == ["encoder.0.ffn", "encoder.1.ffn"]
    assert fused.count() == 2 * (3 * 32 * 32 + 32)
    trained = {name for group in fused.groups() if group.method for name, _ in group.named}
    assert {name.partition(".adapterfusion.")[2] for name in trained} == {
        "query.weight", "query.bias", "key.weight", "value.weight",
    }  # fmt: skip
    site, fusion = fused.placed[0].site, fused.placed[0].module
    x, y = torch.randn(2, 5, site.d_in), torch.randn(2, 5, site.d_out)
    updates = [member(x, y) - y for member in fusion.members]
    scores = [(fusion.query(y) * fusion.key(u)).sum(-1) for u in updates]
    shares = torch.stack(scores).softmax(0)
    expected = y + sum(s[..., None] * fusion.value(u) for s, u in zip(shares, updates, strict=True))
    torch.testing.assert_close(fusion(x, y), expected, atol=1e-4, rtol=1e-4)


def test_a_fusion_has_its_own_copies_of_its_members(tmp_path):
    """Members come from the model or from folders; later changes to them have no effect."""
    model = tiny_models.model("bert")
    attach_members(model, **MIXES)
    adapters = [ah.attach(model, "pfeiffer(size=8)", name=n) for n in ("d", "e")]
    for number, adapter in enumerate(adapters):
        tiny_models.scramble(adapter, seed=number + 10)
        adapter.save(tmp_path / "runs" / adapter.name / "adapter")
    outputs = []
    for names in (["d", "e"], [str(tmp_path / "runs" / n) for n in "de"]):
        torch.manual_seed(0)
        fused = ah.attach(model, {"adapterfusion": {"adapters": names}}, name="fused")
        tensors = fused.tensors()
        for number, adapter in enumerate(adapters):
            for name, tensor in adapter.tensors().items():
                if not name.startswith("head."):
                    site, _, rest = name.partition(".pfeiffer.")
                    copied = tensors[f"{site}.adapterfusion.members.{number}.{rest}"]
                    assert torch.equal(copied, tensor)
                    assert copied.data_ptr() != tensor.data_ptr()
                    assert not copied.requires_grad
        outputs.append(logits(model))
        saved = fused.save(tmp_path / f"fused-{len(outputs)}")
        assert saved.methods[0]["adapterfusion"]["adapters"] == ["d", "e"]
        assert str(tmp_path) not in (tmp_path / f"fused-{len(outputs)}/adapter.json").read_text()
        if len(outputs) == 1:
            fused.detach()
    assert torch.equal(*outputs)
    for adapter in adapters:
        tiny_models.scramble(adapter, seed=99)
        adapter.detach()
    assert torch.equal(logits(model), outputs[0])
    shutil.rmtree(tmp_path / "runs")
    other = tiny_models.model("bert")
    ah.load(other, tmp_path / "fused-1")
    assert torch.equal(logits(other), outputs[0])


def test_members_have_no_dropout_in_training():
    model = tiny_models.model("bert", **tiny_models.NO_DROPOUT)
    fused = ah.attach(model, {"adapterfusion": {"members": ["lora(dropout=0.5)"] * 2}})
    tiny_models.scramble(fused)
    expected = logits(model)
    fused.train_mode()
    assert torch.equal(logits(model), expected)
    model.train()
    assert torch.equal(logits(model), expected)


def test_methods_that_cannot_be_fused_are_refused(subtests):
    cases = [
        ((), ConfigError, "adapterfusion(adapters=["),
        (("a",), ConfigError, "adapterfusion of 1 adapters"),
        (("a", "z", "runs/none"), AttachError, "'runs/none'"),
        (("a", "houlsby"), SiteError, "- 'houlsby'"),
        (("a", "bitfit"), SiteError, "- bitfit"),
        (("a", "dora"), SiteError, "- dora"),
        (("a", "ia3"), SiteError, "- ia3"),
        (("a", "unipelt"), SiteError, "- prefix"),
        (("a", "full"), SiteError, "- full"),
        (("loreft", "direft"), SiteError, "cannot be mixed"),
    ]
    for adapters, error, words in cases:
        with subtests.test(adapters=adapters):
            model = tiny_models.model("bert")
            ah.attach(model, MIXES["a"], name="a")
            for name in adapters:
                if name not in ("a", "z", "runs/none"):
                    ah.attach(model, name, name=name)
            before, keys = logits(model), list(model.state_dict())
            with pytest.raises(error) as raised:
                ah.attach(model, {"adapterfusion": {"adapters": adapters}}, name="fused")
            assert words in str(raised.value)
            assert list(model.state_dict()) == keys
            assert torch.equal(logits(model), before)


def test_a_member_of_another_backbone_is_refused(tmp_path):
    other = tiny_models.model("bert", seed=1)
    ah.attach(other, "pfeiffer").save(tmp_path / "other")
    model = tiny_models.model("bert")
    ah.attach(model, "pfeiffer", name="a")
    with pytest.raises(MismatchError, match="a different backbone"):
        ah.attach(model, {"adapterfusion": {"adapters": ["a", str(tmp_path / "other")]}}, name="f")


def test_a_recipe_fuses_the_adapters_of_earlier_runs(train, adapterhub, backbone, data, tmp_path):
    model, _ = ah.load_backbone(str(backbone), task="classification", labels=["neg", "pos"])
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        ah.attach(model, "pfeiffer(size=4)", name=folder[-1]).save(f"{folder}/adapter")
    words = ("--method", f"adapterfusion(adapters={folders})", "train.epochs=1")
    code, _, err = train(*words, output=tmp_path / "fused")
    assert code == 0, err
    for name in "ab":
        (tmp_path / name).rename(tmp_path / f"gone-{name}")
    code, out, err = adapterhub("eval", tmp_path / "fused", "--data", data[1], "--json")
    assert code == 0, err
    assert json.loads(out)["examples"] == 22
