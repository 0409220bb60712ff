"""Golden vectors of AdapterFusion, computed by the `adapters` library.

    pip install adapters==1.3.0 transformers==4.57.6 torch==2.13.0
    python tests/golden/adapters/make_fusion.py

The file holds a tiny random BERT (`backbone.`), the tensors of two adapters (`a.`, `b.`) and of
their fusion (`fusion.`) by the names of our adapter files, the inputs (`input.`) and the logits.
The adapters read the feed-forward output before the residual connection, as ours do. The bias of
its keys, which adds the same to the score of every adapter, has no name in ours.
"""

import re
from pathlib import Path

import adapters
import torch
from adapters import SeqBnConfig
from adapters.composition import Fuse
from safetensors.torch import save_file
from transformers import BertConfig, BertForSequenceClassification

CONFIG = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=24, max_position_embeddings=16, initializer_range=0.15, num_labels=3,
    attn_implementation="eager",
)  # fmt: skip
LAYER = r".*layer\.(\d+)\.output\."
NAMES = {
    LAYER + r"adapters\.([ab])\.adapter_down\.0\.(\w+)": r"\2.encoder.\1.ffn.pfeiffer.down.\3",
    LAYER + r"adapters\.([ab])\.adapter_up\.(\w+)": r"\2.encoder.\1.ffn.pfeiffer.up.\3",
    LAYER + r"adapter_fusion_layer\.a,b\.(query\.\w+|key\.weight|value\.weight)":
        r"fusion.encoder.\1.ffn.adapterfusion.\2",
}  # fmt: skip


def our_name(name: str) -> str:
    """Our name of one of their parameters, "" where ours has none."""
    fitting = [(p, ours) for p, ours in NAMES.items() if re.fullmatch(p, name)]
    return re.sub(*fitting[0], name) if fitting else ""


def main() -> None:
    """Write the file."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(CONFIG)
    tensors = {f"backbone.{k}": t.clone() for k, t in model.state_dict().items()}
    adapters.init(model)
    for name, reduction in (("a", 2), ("b", 4)):
        model.add_adapter(name, SeqBnConfig(reduction_factor=reduction, original_ln_before=False))
    model.add_adapter_fusion(["a", "b"], "dynamic")
    model.set_active_adapters(Fuse("a", "b"))
    model.eval()
    ids = torch.randint(3, 32, (2, 7))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".adapters." in name or "fusion" in name:
                parameter.normal_(std=0.5)
            if ours := our_name(name):
                tensors[ours] = parameter.clone()
        logits = model(input_ids=ids).logits
    tensors |= {"input.input_ids": ids, "logits": logits}
    path = Path(__file__).with_name("fusion-bert.safetensors")
    save_file({k: t.contiguous() for k, t in tensors.items()}, path)
    path.with_suffix(".json").write_text(model.config.to_json_string())


if __name__ == "__main__":
    main()
