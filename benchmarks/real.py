"""Run each recipe on its real dataset, and print the table of results.

    python benchmarks/real.py DATA [--out runs/recipes] [--only cola-lora,rte-lora]
    python benchmarks/real.py --table

DATA holds the datasets as published: glue/cola, glue/rte, wnut17, squad, multi30k, gsm8k. Records
are written to benchmarks/results/. Two recipes use pre-trained language models; if `stand_in` is
set, a small model of the same architecture is trained from scratch instead, including its
tokenizer, on the training data alone: this shows that the pipeline works, not what the method can
reach.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import records

COLUMNS = ("recipe", "method", "score on eval", "trained", "adapter", "time", "peak memory")


@dataclass(frozen=True)
class Run:
    """A recipe with its overrides, and the scores to show."""

    recipe: str
    method: str
    data: dict[str, str]
    scores: tuple[str, ...]
    options: tuple[str, ...] = ()
    stand_in: Callable[[Path, Path], None] | None = None


def squad(data: Path, out: Path) -> None:
    """Split the sample file: its first article is held out, the others are for training."""
    whole = json.loads((data / "squad/dev-sample.json").read_text(encoding="utf-8"))
    for name, articles in {"eval": whole["data"][:1], "train": whole["data"][1:]}.items():
        text = json.dumps({"version": whole["version"], "data": articles})
        (out / f"squad-{name}.json").write_text(text, encoding="utf-8")


def tiny_t5(data: Path, out: Path) -> None:
    """Make a random T5 of 3 + 3 layers, hidden size 256; train its tokenizer on both languages."""
    from transformers import T5Config, T5ForConditionalGeneration

    def lines() -> Iterator[str]:
        for language in ("en", "de"):
            with gzip.open(data / f"multi30k/train.{language}.gz", "rt", encoding="utf-8") as file:
                yield from file

    config = T5Config(
        vocab_size=8000, d_model=256, d_kv=64, d_ff=1024, num_layers=3, num_heads=4,
        feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    save_random(T5ForConditionalGeneration, config, lines(), out / "tiny-t5")


def tiny_llama(data: Path, out: Path) -> None:
    """Make a random Llama of 3 layers, hidden size 128; train its tokenizer on the texts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def texts() -> Iterator[str]:
        with open(data / "gsm8k/train.jsonl", encoding="utf-8") as file:
            for row in map(json.loads, file):
                yield from (row["question"], row["answer"])

    config = LlamaConfig(
        vocab_size=4000, hidden_size=128, intermediate_size=352, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    save_random(LlamaForCausalLM, config, texts(), out / "tiny-llama")


def save_random(cls: type, config: object, texts: Iterator[str], folder: Path) -> None:
    """Save a random model and a byte-level BPE tokenizer (pad 0, end 1) as a checkpoint."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    if config.is_encoder_decoder:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", model_max_length=512
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    cls(config).save_pretrained(folder)


COLA = {"train": "glue/cola/train.tsv", "eval": "glue/cola/dev.tsv"}
RTE = {"train": "glue/rte/train.tsv", "eval": "glue/rte/dev.tsv"}
WNUT17 = {"train": "wnut17/train.conll", "eval": "wnut17/dev.conll"}
SQUAD = {"train": "OUT/squad-train.json", "eval": "OUT/squad-eval.json"}
MULTI30K = {
    "train": "multi30k/train.en.gz",
    "train_target": "multi30k/train.de.gz",
    "eval": "multi30k/val.en.gz",
    "eval_target": "multi30k/val.de.gz",
}
GSM8K = {"train": "gsm8k/train.jsonl", "eval": "gsm8k/test.jsonl"}
WORDS = "bag-of-words"
SCRATCH = ("train.learning_rate=0.001", "train.batch_size=64", "train.schedule=cosine")
RUNS = {
    **{
        f"{task}-{m.replace(' ', '-')}": Run(task, m, files, scores)
        for task, files, scores in (
            ("cola", COLA, ("matthews", "accuracy")), ("rte", RTE, ("accuracy",)),
        )
        for m in ("bag of words", "lora", "pfeiffer")
    },
    "wnut17-lora": Run("wnut17", "lora", WNUT17, ("f1", "precision", "recall")),
    "squad-pfeiffer": Run(
        "squad", "pfeiffer", SQUAD, ("exact_match", "f1", "has_answer_f1"),
        ("train.epochs=8",), stand_in=squad,
    ),
    "multi30k-full": Run(
        "multi30k", "full", MULTI30K, ("bleu", "chrf"),
        ("backbone=OUT/tiny-t5", "train.epochs=12", *SCRATCH), tiny_t5,
    ),
    "gsm8k-full": Run(
        "gsm8k", "full", GSM8K, ("perplexity", "exact_match"),
        ("backbone=OUT/tiny-llama", "train.epochs=5", *SCRATCH, "train.batch_size=8",
         "train.eval_batch_size=64"), tiny_llama,
    ),
}  # fmt: skip


def command(name: str, data: str, out: str) -> list[str]:
    """Return the command line of one run."""
    run = RUNS[name]
    files = {
        key: path.replace("OUT", out) if path.startswith("OUT") else f"{data}/{path}"
        for key, path in run.data.items()
    }
    return [
        "adapterhub", "train", f"recipes/{run.recipe}.yaml",
        f"method={'head' if name.endswith(WORDS) else run.method}",
        *(f"data.{key}={path}" for key, path in files.items()),
        *(option.replace("OUT", out) for option in run.options),
        f"output={out}/{name}",
    ]  # fmt: skip


def table() -> str:
    """Return the Markdown table of all records."""
    rows = [row(name, record) for name in RUNS if (record := records.read(name))]
    return records.markdown(COLUMNS, rows)


def row(name: str, record: dict) -> tuple[str, ...]:
    """Return one row of the table."""
    run = RUNS[name]
    scores = records.scores(record, run.scores)
    scratch = " (tiny, from scratch)" if "backbone" in "".join(run.options) else ""
    return (run.recipe + scratch, run.method, scores, *records.cost(record))


def main() -> None:
    """Run the selected recipes, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", nargs="?")
    parser.add_argument("--out", default="runs/recipes")
    parser.add_argument("--only", default=",".join(RUNS))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    for name in options.only.split(",") if options.data else ():
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        if (make := RUNS[name].stand_in) is not None:
            make(Path(options.data), out)
        executed = command(name, options.data, options.out)
        start = records.run_words if name.endswith(WORDS) else records.run
        start(name, executed, command(name, "DATA", "runs"), out / name)
    print(table())


if __name__ == "__main__":
    main()
