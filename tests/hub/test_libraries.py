"""peft, transformers and datasets, as they are released, by HF_ENDPOINT alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from huggingface_hub.utils._runtime import is_xet_available

from adapterhub.hub.upload_endpoints import TOO_LARGE
from tests.kit import real_hub
from tests.kit.selection import ALL

pytestmark = pytest.mark.skipif(not ALL, reason="ADAPTERHUB_TESTS=all")

MODELS = """
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification as Auto, BertConfig
from transformers import BertForSequenceClassification

sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
config = BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
BertForSequenceClassification(config).push_to_hub("acme/bert", private=True)
backbone = Auto.from_pretrained("acme/bert")
model = get_peft_model(backbone, LoraConfig(task_type="SEQ_CLS", init_lora_weights=False)).eval()
rows = torch.tensor([[1, 2, 3], [4, 5, 6]])
expected = model(rows).logits
model.push_to_hub("acme/lora", private=True)
found = PeftModel.from_pretrained(Auto.from_pretrained("acme/bert"), "acme/lora").eval()
assert torch.equal(found(rows).logits, expected)
found = AutoPeftModelForSequenceClassification.from_pretrained("acme/lora").eval()
assert torch.equal(found(rows).logits, expected)
assert torch.equal(Auto.from_pretrained("acme/lora").eval()(rows).logits, expected)
"""

OFFLINE = """
from transformers import AutoModelForSequenceClassification as Auto
Auto.from_pretrained("acme/lora")
"""

DATASETS = """
from datasets import Dataset, load_dataset
Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}).push_to_hub("acme/rows", private=True)
assert load_dataset("acme/rows")["train"]["text"][:] == ["a", "b"]
"""


@pytest.fixture(scope="module", params=["root", "prefix", "processes"])
def hub(request, tmp_path_factory):
    place, bucket = tmp_path_factory.mktemp("hub") / "hub", None
    if request.param == "processes":
        place, bucket = request.getfixturevalue("new_state")()
    prefix = "/below" if request.param == "prefix" else ""
    with real_hub.serving(place, prefix, bucket) as running:
        running.org("acme")
        running.user("ada", acme="write")
        yield running


def run(hub, home, program, **environment):
    environment = {
        **os.environ, "HF_ENDPOINT": hub.address, "HF_TOKEN": hub.tokens["ada"],
        "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **environment,
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )


# What the client does with Xet is the same for each kind of hub.
@pytest.mark.parametrize(
    ("hub", "xet"),
    [("root", "0"), ("root", "1"), ("prefix", "1"), ("processes", "0")],
    indirect=["hub"],
)
def test_models_and_adapters_give_equal_logits(hub, tmp_path, xet):
    done = run(hub, tmp_path, MODELS, HF_HUB_DISABLE_XET=xet)
    assert done.returncode == 0, done.stderr
    done = run(hub, tmp_path, OFFLINE, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr


def test_a_data_set_is_pushed_without_xet_and_says_so_with_it(hub, tmp_path):
    done = run(hub, tmp_path, DATASETS, HF_HUB_DISABLE_XET="1")
    assert done.returncode == 0, done.stderr
    done = run(hub, tmp_path, DATASETS.replace("acme/rows", "acme/more"))
    assert (done.returncode != 0) is is_xet_available(), done.stderr
    assert (TOO_LARGE in done.stderr) is is_xet_available()
