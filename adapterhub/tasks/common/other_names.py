"""The names of tasks elsewhere: in transformers' pipelines, and common abbreviations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OTHER_NAMES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    (
        "text-classification sequence-classification seq-cls sentiment nli "
        "sentiment-analysis single-label multi-class paraphrase",
        "classification",
        {},
    ),
    ("multilabel multi-label-classification multilabel-classification", "multi-label", {}),
    ("sts sentence-similarity text-regression", "regression", {}),
    ("image-cls picture-classification vision-classification", "image-classification", {}),
    (
        "vqa visual-question-answering image-to-text image-captioning captioning",
        "image-text-to-text",
        {},
    ),
    (
        "audio-cls sound-classification speech-classification keyword-spotting",
        "audio-classification",
        {},
    ),
    ("asr automatic-speech-recognition speech-to-text transcription ctc", "speech-recognition", {}),
    ("ner token-classification token-cls", "tagging", {}),
    (
        "qa squad extractive-qa extractive-question-answering question-answer",
        "question-answering",
        {},
    ),
    ("summarization summarisation", "seq2seq", {"metric": "rouge"}),
    ("translation", "seq2seq", {"metric": "bleu"}),
    ("text2text-generation text2text seq2seq-lm", "seq2seq", {}),
    ("sft clm text-generation language-modeling instruction-tuning", "causal-lm", {}),
    ("chat conversational", "causal-lm", {"data": "chat"}),
    ("mlm fill-mask masked-language-modeling", "masked-lm", {}),
    ("sentence-embedding embeddings feature-extraction retrieval", "embedding", {}),
    ("reward-model reward-modeling", "reward", {}),
    ("dpo", "preference", {"loss_type": "dpo"}),
    ("ipo", "preference", {"loss_type": "ipo"}),
    ("orpo", "preference", {"loss_type": "orpo"}),
    ("cpo", "preference", {"loss_type": "cpo"}),
    ("simpo", "preference", {"loss_type": "simpo"}),
    ("kto", "preference", {"loss_type": "kto"}),
    ("rlvr", "grpo", {}),
    ("dapo", "grpo", {"loss_type": "dapo"}),
    ("dr-grpo", "grpo", {"loss_type": "dr_grpo"}),
    ("gspo", "grpo", {"importance": "sequence"}),
    ("reranker rerank cross-encoder text-ranking", "reranking", {}),
    ("mcq mcqa multi-choice", "multiple-choice", {}),
    ("zero-shot-classification zero-shot few-shot pet", "prompted", {}),
)
"""Names in transformers' pipelines and common abbreviations: the task, and options they imply."""
