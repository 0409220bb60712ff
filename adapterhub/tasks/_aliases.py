"""Other names of tasks: those of transformers' pipelines, and common abbreviations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Name -> task and the options that the name implies.
ALIASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    **dict.fromkeys(
        ("text-classification", "sequence-classification", "seq-cls", "sentiment", "nli",
         "sentiment-analysis", "single-label", "multi-class", "paraphrase"),
        ("classification", {}),
    ),
    **dict.fromkeys(
        ("multilabel", "multi-label-classification", "multilabel-classification"),
        ("multi-label", {}),
    ),
    **dict.fromkeys(("sts", "sentence-similarity", "text-regression"), ("regression", {})),
    **dict.fromkeys(
        ("image-cls", "picture-classification", "vision-classification"),
        ("image-classification", {}),
    ),
    **dict.fromkeys(
        ("vqa", "visual-question-answering", "image-to-text", "image-captioning", "captioning"),
        ("image-text-to-text", {}),
    ),
    **dict.fromkeys(
        ("audio-cls", "sound-classification", "speech-classification", "keyword-spotting"),
        ("audio-classification", {}),
    ),
    **dict.fromkeys(
        ("asr", "automatic-speech-recognition", "speech-to-text", "transcription", "ctc"),
        ("speech-recognition", {}),
    ),
    **dict.fromkeys(("ner", "token-classification", "token-cls"), ("tagging", {})),
    **dict.fromkeys(
        ("qa", "squad", "extractive-qa", "extractive-question-answering", "question-answer"),
        ("question-answering", {}),
    ),
    **dict.fromkeys(
        ("summarization", "summarisation"), ("seq2seq", {"metric": "rouge"}),
    ),
    "translation": ("seq2seq", {"metric": "bleu"}),
    **dict.fromkeys(("text2text-generation", "text2text", "seq2seq-lm"), ("seq2seq", {})),
    **dict.fromkeys(
        ("sft", "clm", "text-generation", "language-modeling", "instruction-tuning"),
        ("causal-lm", {}),
    ),
    **dict.fromkeys(("chat", "conversational"), ("causal-lm", {"data": "chat"})),
    **dict.fromkeys(("mlm", "fill-mask", "masked-language-modeling"), ("masked-lm", {})),
    **dict.fromkeys(
        ("sentence-embedding", "embeddings", "feature-extraction", "retrieval"), ("embedding", {})
    ),
    **dict.fromkeys(("reward-model", "reward-modeling"), ("reward", {})),
    "dpo": ("preference", {"loss_type": "dpo"}),
    "ipo": ("preference", {"loss_type": "ipo"}),
    "orpo": ("preference", {"loss_type": "orpo"}),
    **dict.fromkeys(
        ("reranker", "rerank", "cross-encoder", "text-ranking"), ("reranking", {})
    ),
    **dict.fromkeys(("mcq", "mcqa", "multi-choice"), ("multiple-choice", {})),
    **dict.fromkeys(
        ("zero-shot-classification", "zero-shot", "few-shot", "pet"), ("prompted", {})
    ),
}  # fmt: skip


def resolve_alias(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the task that a name means, and the options that the name implies."""
    spelled = name.strip().lower().replace("_", "-")
    return ALIASES.get(spelled, (spelled, {}))


def aliases_of(task: str) -> tuple[str, ...]:
    """List the other names of a task."""
    return tuple(alias for alias, (name, _) in ALIASES.items() if name == task)
