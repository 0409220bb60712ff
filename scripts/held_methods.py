"""What of peft and of adapters is here: the tables of docs/comparison.md, which tests compare.

`make catalogue` writes the tables. A row has the name there, our methods or options as they are
typed, and a note; without a method, the note is the reason.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Held(NamedTuple):
    """What is here in place of something of a peer: `what` is "" for nothing."""

    what: str
    note: str = ""


def _same(*names: str) -> dict[str, Held]:
    return {name: Held(name) for name in names}


# By peft's `PeftType`.
PEFT: dict[str, Held] = {
    **_same(
        "adalora", "adamss", "boft", "c3a", "deft", "delora", "fourierft", "glora", "gralora",
        "hira", "hra", "ia3", "loha", "lokr", "lora", "miss", "oft", "peanut", "psoft",
        "randlora", "road", "shira", "tinylora", "unilora", "vblora", "vera", "waveft",
    ),
    "adaption_prompt": Held("llama-adapter"),
    "beft": Held("beft"),
    "cartridge": Held("cartridge"),
    "cpt": Held("cpt", "without a loss of the labels of the examples; imported as `prompt`"),
    # Weights cast to bf16 and back change the logits by 0.013, and those of the backbone alone by
    # 0.0003; the adapter by 0.008 (all-MiniLM-L6-v2, attn.q and attn.v).
    "frod": Held(
        "",
        "two matrices as large as the weight for each site, one decomposed from all layers on each "
        "loading: bf16 weights change the logits 1.7 times as much as the adapter does",
    ),
    "lily": Held("lily", "weighs per token; peft per batch, so its checkpoints are refused"),
    "ln_tuning": Held("norms"),
    "multitask_prompt_tuning": Held("", "a model's pass has no number of its task"),
    "osf": Held("osf"),
    "p_tuning": Held("p-tuning"),
    "poly": Held("", "a model's pass has no number of its task"),
    "prefix_tuning": Held("prefix"),
    "prompt_tuning": Held("prompt"),
    "pvera": Held("vera", "draws noise in training; at inference, the VeRA of its means"),
    "shadow": Held("", "a second network beside the backbone"),
    "supertuning": Held("shira(places=largest, share=0.01)", "with a lora beside it: Supra"),
    "trainable_tokens": Held("chosen", "rows of new tokens; of others, the whole embedding"),
    "xlora": Held("", "adapters that a classifier of hidden states mixes"),
}  # fmt: skip

# Variants, starts and optimizers of peft's LoRA: configuration classes, layer variants without the
# ending, values of `init_lora_weights` and modules of peft.optimizers.
LORA: dict[str, Held] = {
    "ALora": Held("alora"),
    "Arrow": Held(
        "", "weighs adapters by token; `Average` has one weight for each, and reads no inputs"
    ),
    "BdLora": Held("bdlora"),
    "Corda": Held("lora(), train.init=corda"),
    "DoraConv1d": Held("dora", "at the path of the convolution"),
    "DoraConv2d": Held("dora", "at the path of the convolution"),
    "DoraConv3d": Held("dora", "at the path of the convolution"),
    "DoraEmbedding": Held("", "not at an embedding; an import stores the whole weight"),
    "DoraLinear": Held("dora"),
    "Eva": Held("lora(), train.init=eva-ranks", "each site keeps a rank; eva: equal ranks"),
    "Kasa": Held("kasa"),
    "LoftQ": Held("lora(), train.init=loftq", "one step, as in `replace_lora_weights_loftq`"),
    "LoraGA": Held("lora-ga"),
    "LoraRuntime": Held("", "an option of memory, not of what is computed"),
    "MiCA": Held("mica"),
    "MiCAEmbedding": Held("mica", "at the path of the embedding"),
    "Monteclora": Held("", "samples factors in each step; its checkpoints are refused by name"),
    "QALora": Held("", "for GPTQ weights of groups; its checkpoints are refused by name"),
    "Velora": Held("lora", "compresses what the backward pass keeps; checkpoints are plain LoRAs"),
    "gaussian": Held("lora", "another deviation of A; checkpoints are plain LoRAs"),
    "olora": Held("olora"),
    "orthogonal": Held("lora", "another start of A and B; checkpoints are plain LoRAs"),
    "pissa": Held("pissa"),
    "pissa_niter_": Held("pissa(iterations=16)"),
    "lorafa": Held("lora-fa"),
    "loraplus": Held("lora-plus"),
    "riemannian": Held("lora(), train.optimizer=riemannian", "damped by 0.01"),
}

# By the strings of adapters' configurations, and by class where there is none.
ADAPTERS: dict[str, Held] = {
    "seq_bn": Held("pfeiffer"),
    "double_seq_bn": Held("houlsby"),
    "par_bn": Held("parallel"),
    "scaled_par_bn": Held("scaled-parallel"),
    "seq_bn_inv": Held("madx"),
    "double_seq_bn_inv": Held("houlsby", "with `invertible` in one list"),
    "compacter": Held("compacter"),
    "compacter++": Held("compacter"),
    "prefix_tuning": Held("prefix(reparametrize=true)"),
    "prefix_tuning_flat": Held("prefix"),
    "prompt_tuning": Held("prompt"),
    "lora": Held("lora"),
    "dora": Held("dora"),
    "ia3": Held("ia3"),
    "vera": Held("vera"),
    "loreft": Held("loreft"),
    "noreft": Held("noreft"),
    "direft": Held("direft"),
    "mam": Held("mam"),
    "unipelt": Held("unipelt"),
    "AdapterPlusConfig": Held("adapterplus", "its checkpoints are refused, by option"),
    "MTLLoRAConfig": Held("", "a model's pass has no number of its task"),
    "BertFusion": Held("adapterfusion"),
}

# Methods that neither peer has.
ALONE = (
    "full", "head", "freeze", "unfreeze", "staged", "scalar-mix", "ssf", "svft", "lora-xs",
    "hydralora", "rslora", "chosen", "bitfit",
)  # fmt: skip


def _table(peer: str, rows: dict[str, Held]) -> str:
    lines = [f"| {peer} | here | note |", "|---|---|---|"]
    lines += [
        f"| {name} | {f'`{held.what}`' if held.what else 'no'} | {held.note} |"
        for name, held in sorted(rows.items(), key=lambda row: row[0].lower())
    ]
    return "\n".join(lines)


def written(page: str) -> str:
    """Return the page with the tables between their marks."""
    tables = {"peft": PEFT, "a LoRA of peft": LORA, "adapters": ADAPTERS}
    for name, rows in tables.items():
        mark = f"<!-- {name}: generated by make catalogue -->"
        block = f"{mark}\n{_table(name, rows)}\n"
        page = re.sub(rf"{re.escape(mark)}\n(?:\|.*\n)*", lambda _, block=block: block, page)
    return page
