"""(IA)^3 computes the same here and in peft."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.errors import MismatchError
from tests.kit import tiny_models

peft = pytest.importorskip("peft")
from tests.kit.peers import compare_import, core  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


IA3 = {
    "bert": (["key", "value", "output.dense"], ["output.dense"]),
    "gpt2": (["c_attn", "mlp.c_proj"], ["mlp.c_proj"]),
    "llama": (["k_proj", "v_proj", "down_proj"], ["down_proj"]),
    "t5": (["k", "v", "wo"], ["wo"]),
    "phi3": (["qkv_proj", "down_proj"], ["down_proj"]),
}


@pytest.mark.parametrize("architecture", core(IA3, "bert", "gpt2"))
def test_ia3(tmp_path, architecture):
    targets, inputs = IA3[architecture]
    config = peft.IA3Config(
        task_type="SEQ_CLS",
        target_modules=targets,
        feedforward_modules=inputs,
        fan_in_fan_out=architecture == "gpt2",
    )
    compare_import(tmp_path, architecture, config)


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox"])
def test_the_input_of_a_part_is_refused(tmp_path, architecture):
    """Peft would rescale that of the other parts too."""
    adapter = ah.attach(tiny_models.model(architecture), "ia3(sites=[attn.q], inputs=[attn.q])")
    with pytest.raises(MismatchError) as error:
        adapter.export(tmp_path / "peft")
    assert "decoder.0.attn.q: peft rescales the input of the whole" in str(error.value)
    assert not (tmp_path / "peft").exists()
