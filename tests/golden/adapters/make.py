"""Write the golden vectors of the library `adapters`: what it saves, and what it computes with it.

    python -m venv other && other/bin/pip install adapters==1.3.0 torch
    other/bin/python tests/golden/adapters/make.py

It runs in an environment of its own, for `adapters` 1.3.0 needs transformers 4.57. For each
architecture it writes

    ARCHITECTURE/backbone/             a tiny random backbone, by save_pretrained
    ARCHITECTURE/CASE/                 an adapter with random tensors and its head, by save_adapter
    ARCHITECTURE/expected.safetensors  the inputs, and for each case the last hidden state
                                       (CASE.hidden), and what the head gives (CASE.NAME)

A case is one row of CASES: a new configuration is a new row.
"""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import adapters
import torch
from adapters import (
    AutoAdapterModel,
    CompacterConfig,
    CompacterPlusPlusConfig,
    ConfigUnion,
    DoubleSeqBnConfig,
    IA3Config,
    LoRAConfig,
    LoReftConfig,
    MAMConfig,
    NoReftConfig,
    ParBnConfig,
    PrefixTuningConfig,
    SeqBnConfig,
    SeqBnInvConfig,
    UniPELTConfig,
)
from adapters.heads import ClassificationHead
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

HERE = Path(__file__).parent
WIDTH, VOCABULARY, PAD, EOS = 16, 32, 1, 2
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": 3}
PLAIN = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 16,
}  # fmt: skip
BART = {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "max_position_embeddings": 16, "decoder_start_token_id": EOS, "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "d_model": WIDTH, "num_layers": 2, "num_heads": 2, "d_ff": 24, "d_kv": 8,
    "decoder_start_token_id": PAD, "relative_attention_num_buckets": 8,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bert": PLAIN,
    "roberta": PLAIN,
    "distilbert": {
        "dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 16,
    },
    "electra": PLAIN | {"embedding_size": WIDTH},
    "xlm-roberta": PLAIN,
    "gpt2": {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": 16},
    "llama": PLAIN | {"num_key_value_heads": 1},
    "mistral": PLAIN | {"num_key_value_heads": 1},
    "t5": T5,
    "mt5": T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "bart": BART,
    "mbart": BART,
}  # fmt: skip
CORE = ("bert", "roberta", "gpt2", "t5", "bart")
TWO_STACKS = ("t5", "mt5", "bart", "mbart")
DECODERS = ("gpt2", "llama", "mistral")
OTHERS = ("distilbert", "electra", "xlm-roberta", "llama", "mistral", "mt5", "mbart")
SMALL = {"reduction_factor": 4}
FLAT = PrefixTuningConfig(flat=True, prefix_length=3)


class Case(NamedTuple):
    """An adapter's configuration, the head beside it, and the architectures to try both on."""

    config: Callable[[], Any]
    head: str = "classification"
    architectures: tuple[str, ...] = CORE
    pickled: bool = False  # `adapters` cannot write prefixes as safetensors: they share memory


CASES = {
    "houlsby": Case(lambda: DoubleSeqBnConfig(**SMALL), architectures=(*CORE, "llama")),
    "pfeiffer": Case(lambda: SeqBnConfig(**SMALL), "tagging", (*CORE, "llama")),
    "parallel": Case(lambda: ParBnConfig(**SMALL), "qa", (*CORE, "llama")),
    "learned-scale": Case(lambda: ParBnConfig(scaling="learned", **SMALL), "lm"),
    "everywhere": Case(
        lambda: SeqBnConfig(
            mh_adapter=True, cross_adapter=True, leave_out=[0], non_linearity="swish",
            reduction_factor={"1": 8, "default": 4}, scaling="channel",
        ),
        "linear",
    ),
    "mam": Case(lambda: MAMConfig(FLAT, ParBnConfig(**SMALL)), pickled=True),
    "prefix": Case(
        lambda: PrefixTuningConfig(prefix_length=3, bottleneck_size=8), "tagging", pickled=True
    ),
    "prefix-flat": Case(
        lambda: PrefixTuningConfig(flat=True, prefix_length=3, leave_out=[0]), "qa",
        (*CORE, "llama"), pickled=True,
    ),
    "lora": Case(lambda: LoRAConfig(r=2, alpha=4), architectures=(*CORE, "llama")),
    "lora-all": Case(
        lambda: LoRAConfig(
            r=2, alpha=6, attn_matrices=["q", "k", "v"], intermediate_lora=True, output_lora=True
        ),
        "qa", (*CORE, "llama"),
    ),
    "ia3": Case(lambda: IA3Config(), "tagging", (*CORE, "llama")),
    "compacter": Case(lambda: CompacterConfig(phm_dim=2, **SMALL), "linear"),
    "compacter++": Case(lambda: CompacterPlusPlusConfig(phm_dim=2, phm_rank=2, **SMALL)),
    "mixed": Case(
        lambda: ConfigUnion(
            SeqBnConfig(mh_adapter=True, output_adapter=False, **SMALL),
            ParBnConfig(**SMALL),
            LoRAConfig(r=1, output_lora=True),
        ),
        "qa",
        OTHERS,
    ),
    "unipelt": Case(
        lambda: UniPELTConfig(FLAT, SeqBnConfig(**SMALL), LoRAConfig(r=2, alpha=5)),
        "tagging", (*CORE, "mt5"), pickled=True,
    ),
    "unipelt-parts": Case(
        lambda: ConfigUnion(
            PrefixTuningConfig(flat=True, prefix_length=2, leave_out=[0], use_gating=True),
            DoubleSeqBnConfig(scaling=2.0, use_gating=True, **SMALL),
            LoRAConfig(r=1, attn_matrices=["v"]),
        ),
        "qa", ("bert",), pickled=True,
    ),
    "gated-lora": Case(
        lambda: LoRAConfig(
            r=2, attn_matrices=["k"], output_lora=True, leave_out=[1], use_gating=True
        ),
        "qa", ("bert", "t5", "bart"),
    ),
    "unipelt-encoder": Case(
        lambda: UniPELTConfig(
            FLAT.replace(leave_out=[2, 3]),
            SeqBnConfig(leave_out=[2, 3], original_ln_before=False, **SMALL),
            LoRAConfig(r=2, leave_out=[2, 3]),
        ),
        "classification", ("bart",), pickled=True,
    ),
    "madx": Case(lambda: SeqBnInvConfig(**SMALL), "lm", (*CORE, "llama")),
    "loreft": Case(
        lambda: LoReftConfig(r=2, prefix_positions=2, suffix_positions=1),
        architectures=("bert", "roberta", "gpt2", "llama"),
    ),
    "noreft": Case(
        lambda: NoReftConfig(r=2, layers=[1], suffix_positions=2, tied_weights=True), "qa",
        ("bert", "gpt2", "t5"),
    ),
    "static": Case(lambda: SeqBnConfig(**SMALL), "static", ("bert", "roberta")),
    "pickle": Case(lambda: SeqBnConfig(**SMALL), "tagging", ("bert",), pickled=True),
}  # fmt: skip


def main() -> None:
    """Write everything anew."""
    assert adapters.__version__ == "1.3.0", adapters.__version__
    for architecture, config in ARCHITECTURES.items():
        folder = HERE / architecture
        shutil.rmtree(folder, ignore_errors=True)
        make_backbone(architecture, config, folder / "backbone")
        expected = inputs(architecture)
        for name, case in CASES.items():
            if architecture in case.architectures:
                expected |= run(architecture, name, case, folder)
        expected = {k: v.contiguous() for k, v in expected.items()}
        save_file(expected, folder / "expected.safetensors")


def make_backbone(architecture: str, config: dict[str, Any], folder: Path) -> None:
    """A backbone without a head; its norms and biases are random too, so that each one counts."""
    model = AutoModel.from_config(AutoConfig.for_model(architecture, **TOKENS, **config))
    randomize(model.named_parameters(), seed=0, std=0.3)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def randomize(named: Any, seed: int, std: float) -> None:
    """Normal noise, around 1 for the scales of norms, by sorted names."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(named):
            norm = "norm" in name.lower() or ".ln_" in name
            start = 1.0 if norm and name.endswith("weight") else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std + start)
            if name.endswith("parametrizations.weight.original"):
                parameter.diagonal().fill_(1)  # torch reads its signs here


def inputs(architecture: str) -> dict[str, torch.Tensor]:
    """Two rows, the second one with padding; both end with EOS, which some heads look for."""
    ids = torch.randint(5, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    ids[0, -1] = EOS
    ids[1, 4:] = torch.tensor([EOS, PAD, PAD])
    given = {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}
    if architecture in TWO_STACKS:
        given["decoder_input_ids"] = ids.roll(1, dims=1)
    return given


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "classification": ("classification", {"num_labels": 3, "id2label": {0: "a", 1: "b", 2: "c"}}),
    "linear": ("classification", {"num_labels": 2, "layers": 1}),
    "score": ("classification", {"num_labels": 2, "layers": 1, "bias": False}),
    "pooled": ("classification", {"num_labels": 2, "layers": 1, "use_pooler": True}),
    "tagging": ("tagging", {"num_labels": 3}),
    "qa": ("qa", {}),
    "causal": ("causal_lm", {}),
    "masked": ("masked_lm", {}),
    "seq2seq": ("seq2seq_lm", {}),
}


def head_of(architecture: str, head: str) -> tuple[str, dict[str, Any]] | None:
    """The head of an architecture by its method's name, with options; None where it has none."""
    two_stacks = architecture in TWO_STACKS
    decoder = architecture in DECODERS
    if head == "lm":
        head = "seq2seq" if two_stacks else "causal" if decoder else "masked"
    if head == "linear" and (architecture == "bert" or decoder):
        head = "score" if decoder else "pooled"
    if head == "static" or (head == "tagging" and two_stacks):
        return None
    if head == "qa" and architecture == "gpt2":
        head = "tagging"
    return HEADS[head]


def run(architecture: str, name: str, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Save one adapter, and return what the backbone computes with it."""
    torch.manual_seed(0)  # language-model heads keep their initial values
    with contextlib.chdir(folder):  # what it saves names the backbone as it was given
        static = case.head == "static"
        auto = AutoModelForSequenceClassification if static else AutoAdapterModel
        labels = {"id2label": {0: "x", 1: "y", 2: "z"}} if static else {}
        model = auto.from_pretrained("backbone", attn_implementation="eager", **labels)
        adapters.init(model)
    model.add_adapter("own", config=case.config())
    head = head_of(architecture, case.head)
    if head is not None:
        if "bias" in head[1]:
            model.add_prediction_head(ClassificationHead(model, "own", **head[1]))
        else:
            getattr(model, f"add_{head[0]}_head")("own", **head[1])
    base = set(AutoModel.from_pretrained(folder / "backbone").state_dict())
    prefix = f"{model.base_model_prefix}."
    lm = head is not None and head[0].endswith("_lm")
    if static:
        head = ("static", {})
        heads = [(n, p) for n, p in model.named_parameters() if not n.startswith(prefix)]
        randomize(heads, seed=3, std=0.3)
    added = [
        (n, p)
        for n, p in model.named_parameters()
        if n.removeprefix(prefix) not in base
        and n.removeprefix(prefix).replace("base_layer.", "") not in base
        and not (lm and n.startswith("heads."))
        and not (static and not n.startswith(prefix))
    ]
    assert added
    assert all("own" in n for n, _ in added), [n for n, _ in added]
    randomize(added, seed=2, std=0.3)
    model.set_active_adapters("own")
    model.eval()
    model.save_adapter(str(folder / name), "own", use_safetensors=not case.pickled)
    given = inputs(architecture)
    with torch.no_grad():
        if head is None:
            model.active_head = None
        hidden = model.base_model(**given)[0]
        output = model(**given) if head is not None else {}
    found = {f"{name}.hidden": hidden}
    for part in ("logits", "start_logits", "end_logits"):
        if part in output:
            found[f"{name}.{part}"] = output[part]
    return found


if __name__ == "__main__":
    main()
