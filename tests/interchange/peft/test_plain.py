"""Plain rows and aLoRA: equal logits in both libraries and directions, or a refusal by name."""

import re

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import adapterhub as ah
from adapterhub.errors import AdapterhubError, MismatchError
from adapterhub.interchange.peft.plain import PLAIN
from tests.kit import tiny_models
from tests.kit.peers import edit
from tests.kit.peft_differential import PLAIN_KINDS, VARIANT_KINDS, Differential, new_model
from tests.kit.selection import long_table
from tests.kit.tiny_models import logits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
MODELS = [("bert", "classification"), ("llama", "causal-lm"), ("t5", "seq2seq"),
          ("gpt2", "causal-lm")]  # fmt: skip
CELLS = [(kind, *model) for kind in PLAIN_KINDS | VARIANT_KINDS for model in MODELS]
REFUSED = {
    ("miss: bat", "import"), ("miss: bat", "back"),
    # peft draws the matrices again, in a dtype that depends on the machine.
    ("randlora: without matrices", "import"), ("randlora: without matrices", "back"),
    # They are imported as vera and lora-xs, which peft has in another form, or not.
    ("tinylora", "back"), ("tinylora: without matrices", "back"),
    # shira has as many values as a LoRA.
    ("supertuning", "back"), ("supertuning: smallest", "back"),
    # peft draws the places again, by torch's generator.
    ("fourierft", "back"), ("waveft", "back"),
}  # fmt: skip
NOT_ON = {("osf", "gpt2")}  # peft adapts nothing there


def test_every_row_is_compared():
    names = {kind.partition(":")[0].upper() for kind in PLAIN_KINDS}
    assert names == PLAIN.keys()


@long_table(("kind", "architecture", "task"), CELLS, len(MODELS), nightly=6)
def test_equal_or_refused(tmp_path, kind, architecture, task):
    outcomes = Differential(kind, architecture, task, tmp_path).run()
    wrong = {cell: o.reason for cell, o in outcomes.items() if o.word == "wrong"}
    assert wrong == {}
    refused = {(kind, direction) for (direction, _), o in outcomes.items() if o.word == "refused"}
    name = kind.partition(":")[0].upper()
    turned = kind in VARIANT_KINDS or PLAIN[name].turned
    known = REFUSED | ({(kind, "export")} if architecture == "gpt2" and not turned else set())
    known |= {(kind, "import"), (kind, "back")} if (kind, architecture) in NOT_ON else set()
    assert refused <= known, [o.reason for o in outcomes.values() if o.word == "refused"][:1]


@long_table("kind", [kind for kind in PLAIN_KINDS if ":" not in kind], 8, nightly=2)
def test_a_damaged_checkpoint_is_read_or_refused_and_raises_nothing_else(tmp_path, kind):
    """Each tensor of the first module and of all modules together, missing or twice as long."""
    Differential(kind, "bert", "classification", tmp_path)._reference()
    path = tmp_path / "theirs" / "adapter_model.safetensors"
    tensors = load_file(path)
    refused = 0
    for name in {
        re.sub(r"layer\.\d+\.", "", n).rpartition("dense")[2]: n for n in tensors
    }.values():
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        for damaged in (rest, rest | {name: torch.cat([tensors[name]] * 2)}):
            save_file(damaged, path)
            try:
                ah.load(new_model("bert", "classification"), path.parent)
            except AdapterhubError:
                refused += 1
    assert refused


def test_clusters_of_another_processor_are_refused(tmp_path, monkeypatch):
    """AdaMSS files do not hold their clusters: a file of other components is not guessed at."""
    case = Differential("adamss", "bert", "classification", tmp_path)
    case._reference()
    exact = torch.svd_lowrank

    def elsewhere(weight, q, niter):
        u, s, v = exact(weight, q=q, niter=niter)
        turn = torch.linalg.qr(torch.randn(q, q, generator=torch.Generator().manual_seed(1)))[0]
        return u @ turn, s, v @ turn

    def turned(weight, q, niter):
        return tuple(-each for each in exact(weight, q=q, niter=niter))

    with monkeypatch.context() as patched:
        patched.setattr(torch, "svd_lowrank", elsewhere)
        with pytest.raises(MismatchError) as error:
            ah.load(case._new(), tmp_path / "theirs")
    assert "the clusters, which the file does not hold, cannot be known" in str(error.value)
    with monkeypatch.context() as patched:  # signs are those of no component
        patched.setattr(torch, "svd_lowrank", turned)
        ah.load(case._new(), tmp_path / "theirs")


# aLoRA: texts that are invoked twice, once and never.

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
INVOCATION = [40, 41]
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn"]}


def inputs(side):
    """Return three texts: invoked twice, once, and never; the last two are padded."""
    batch = tiny_models.padded_batch(side)
    ids = batch["input_ids"]
    ids[0, 1:3] = ids[0, 5:7] = ids[1, 4:6] = torch.tensor(INVOCATION)
    return batch


def of_peft(architecture, folder, **options):
    """Save an adapter of peft; return the model with it."""
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=TARGETS[architecture], task_type="CAUSAL_LM",
        alora_invocation_tokens=INVOCATION, init_lora_weights=False, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_models.language_model(architecture), config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("architecture", TARGETS)
def test_logits_are_equal_in_both_directions(architecture, side, tmp_path):
    theirs, batch = of_peft(architecture, tmp_path / "peft"), inputs(side)
    ours = tiny_models.language_model(architecture)
    bare = logits(ours, **batch)
    adapter = ah.load(ours, tmp_path / "peft", any_backbone=True)
    (method,) = adapter.methods
    assert (method.name, method.invocation) == ("alora", (40, 41))
    real = batch["attention_mask"].bool()
    expected = logits(theirs, **batch)
    torch.testing.assert_close(logits(ours, **batch)[real], expected[real], atol=2e-5, rtol=0)
    assert not torch.allclose(expected[:2][real[:2]], bare[:2][real[:2]], atol=1e-2)
    assert torch.equal(logits(ours, **batch)[2], bare[2])
    adapter.export(tmp_path / "back")
    again = tiny_models.language_model(architecture)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "back")
    torch.testing.assert_close(logits(again, **batch)[real], expected[real], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"task_type": None}, "applies no update"), ({"use_dora": True}, "use_dora"),
     ({"init_lora_weights": "olora"}, "olora")],
)  # fmt: skip
def test_what_peft_computes_otherwise_is_refused(changed, reason, tmp_path):
    of_peft("llama", tmp_path)
    edit(tmp_path, **changed)
    with pytest.raises(AdapterhubError) as error:
        ah.load(tiny_models.language_model("llama"), tmp_path, any_backbone=True)
    assert any("alora" in each and reason in each for each in error.value.offenders)


def test_gguf_has_the_invocation(tmp_path):
    gguf = pytest.importorskip("gguf")
    model = tiny_models.language_model("llama")
    ah.attach(model, {"alora": {"invocation": [7, 9]}}, name="a")
    model._adapterhub.adapters["a"].export(tmp_path / "a.gguf", format="gguf")
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    assert fields["adapter.alora.invocation_tokens"].contents() == [7, 9]
