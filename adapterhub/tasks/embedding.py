"""Sentence embeddings: one vector per text, similar for related texts.

    example      a text, its positive, and negatives; or two texts and their score
    row          the tokens of each text
    prediction   the vector of each text
    metrics      recall, MRR and nDCG of retrieving positives; or Spearman, Pearson of scores

A vector pools the token states of the backbone (Reimers & Gurevych 2019,
https://arxiv.org/abs/1908.10084); there is no head. Each text of a pair learns to find its partner
among all texts of its batch (Henderson et al. 2017, section 4.4, https://arxiv.org/abs/1705.00652):
a larger `train.batch_size` gives more negatives; `train.gradient_accumulation` does not.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

from adapterhub.backbones.torch_free_checks import check_vector_pooling
from adapterhub.config.options import option
from adapterhub.data.columns import WANTS, ColumnChoice
from adapterhub.data.options import DataOptions
from adapterhub.data.text_pairs import TextPair, has_scores, pair_columns, read_text_pairs
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks.common.base import Encoded, Prediction, Task, register_task
from adapterhub.tasks.common.batches import (
    OF_LOSS,
    Items,
    Loss,
    PairLoss,
    Passed,
    Row,
    Setting,
    batch_rows,
    cosent_loss,
    cosine_loss,
    each_row,
    limit_of,
    multiple_negatives_loss,
    pad,
    rows_from_columns,
    triplet_loss,
)
from adapterhub.tasks.common.metrics import (
    RANKED,
    RANKING_METRICS,
    TIE_DIGITS,
    Tied,
    query_metrics,
    ranking_metrics,
    regression_metrics,
)
from adapterhub.tasks.common.preview import tokens_line

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

    from adapterhub.backbones.sentence_modules import SentenceModules

    Vectors = NDArray[float32]

SCORED = ("cosent", "cosine")
_AT_ONCE = 256  # queries compared with all passages at a time
TEXTS, SCORES, SKIPPED = f"{OF_LOSS}texts", f"{OF_LOSS}scores", f"{OF_LOSS}skipped"


@dataclass(frozen=True)
class Nearest:
    """The passages that are most similar to a query.

    Attributes:
        texts: the passages, the most similar one first.
        ranked: the numbers of equally similar passages, and of the relevant ones among them.
        first: the relevant passages that are as similar as the first.
    """

    texts: tuple[str, ...]
    ranked: tuple[Tied, ...] = ()
    first: frozenset[str] = frozenset()

    def right(self, passage: str) -> float:
        """Return the chance that a relevant passage is ranked first; ties share it."""
        return 1 / self.ranked[0].size if passage in self.first else 0.0


@dataclass(frozen=True, eq=False)
class Embedded(Prediction):
    """The vectors of an example's texts, and the passages found by its first text.

    Attributes:
        vectors: the vectors of the texts, (texts, d).
        nearest: the passages that the first text finds, or None without a search.
        right: the chance that its positive is found first.
        scores: the ranking metrics of the first text, by name.
    """

    vectors: Vectors
    nearest: Nearest | None = None
    right: float = 0.0
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def similarity(self) -> float:
        """The cosine of the first two vectors."""
        import numpy as np

        first, second = self.vectors[:2].astype(np.float64)
        size = np.linalg.norm(first) * np.linalg.norm(second)
        return round(float(first @ second / max(size, 1e-12)), 7)

    def as_dict(self) -> dict[str, Any]:
        """Return the vector of the first text, and its similarity to the second if there is one."""
        import numpy as np

        vector = np.round(np.asarray(self.vectors[0], np.float64), 7)
        return {"vector": vector.tolist()} | (
            {"similarity": self.similarity} if len(self.vectors) > 1 else {}
        )

    def __str__(self) -> str:
        if len(self.vectors) > 1:
            return f"{self.similarity:.3f}"
        few = " ".join(f"{value:.3f}" for value in self.vectors[0][:4])
        return few + f" ... ({len(self.vectors[0])} numbers)" * (len(self.vectors[0]) > 4)


@register_task
@dataclass(frozen=True)
class Embedding(Task):
    """One vector per text, similar for related texts.

    Rows of `train.jsonl`:

        {"anchor": "how to boil an egg", "positive": "Put it into boiling water for 8 minutes."}
        {"anchor": "capital of France", "positive": "Paris is the capital of France."}

    A row may also have negatives, texts that do not belong to the anchor: a column `negative`,
    columns `negative_1`, `negative_2`, ..., or lists (`data.negatives` names others).
    Alternatively, each pair has a similarity in a column `score`, and no negatives.

    The loss follows from the data: multiple-negatives for pairs, cosent for scores.

    `predict` prints the vector of a text, and with `--pair` the similarity of two texts:

        0.600 -0.800
        {"vector": [0.6, -0.8]}
    """

    name = "embedding"
    summary = "one vector per text, similar for texts that belong together"
    groups = "queries"
    columns = WANTS["scored pairs"]
    printed_fields = ("vector", "similarity")
    cuts_as_trained = True

    loss_type: Literal["multiple-negatives", "triplet", "cosent", "cosine"] | None = option(
        None, "multiple-negatives or triplet for pairs, cosent or cosine for scores (null: by data)"
    )
    temperature: float = option(0.05, "divides the cosines (multiple-negatives, cosent)")
    margin: float = option(0.2, "by how much positives should be more similar (triplet)")
    pooling: str | None = option(
        None, "the vector of a text: the state of its first token (cls) or of its last, the mean, "
        "max, weightedmean or mean_sqrt_len_tokens of all, or several, cls+mean (null: as the "
        "backbone was trained, else mean)"
    )  # fmt: skip
    normalize: bool | None = option(
        None, "whether predicted vectors have length 1 (null: as the backbone was trained, else "
        "true)"
    )  # fmt: skip
    query_prefix: str | None = option(
        None, "put before each first text, such as 'query: ' (null: the backbone's default prompt)"
    )
    passage_prefix: str | None = option(
        None, "put before each other text, such as 'passage: ' (null: that prompt)"
    )
    modules: str | None = option(
        None, "the modules behind the pooling of a sentence encoder: none for vectors without "
        "them, or the digest of those of the training (null: those of the backbone)",
        omitted=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.pooling is not None:
            check_vector_pooling(self.pooling)
        if not self.temperature > 0 or not self.margin >= 0:
            raise ConfigError(
                f"temperature is {self.temperature}, margin is {self.margin}",
                expected="a temperature above 0, and a margin of 0 or more",
            )

    @property
    def scored(self) -> bool:
        """Return whether each pair has a score."""
        return self.loss_type in SCORED

    @property
    def main_metric(self) -> str:
        """Spearman's correlation of scores and cosines, else nDCG@10 of retrieval."""
        return "spearman" if self.scored else "ndcg@10"

    @property
    def outcomes(self) -> str:  # type: ignore[override]
        """Numbers for pairs with scores, else choices: the passage found."""
        return "numbers" if self.scored else "choices"

    def for_model(self, model: PreTrainedModel) -> Embedding:
        """Return the task with the settings of the backbone's training: pooling, prompts, modules.

        Raises:
            BackboneError: the backbone is a sentence encoder with unsupported modules.
            ConfigError: the backbone is an encoder-decoder, whose outputs do not represent the
                text.
            MismatchError: the task belongs to an adapter trained over other modules.
        """
        from adapterhub.backbones.sentence_modules import modules_of_model
        from adapterhub.backbones.task_models import text_config

        refuse_decoder(model)
        own = modules_of_model(model, self.modules)
        pooling = self.pooling or own.pooling
        own.check_sizes(pooling, text_config(model).hidden_size)
        prompts = (self.query_prefix, self.passage_prefix)
        query, passage = (own.prompt if text is None else text for text in prompts)
        return replace(
            self,
            pooling=pooling,
            normalize=own.normalize if self.normalize is None else self.normalize,
            query_prefix=query,
            passage_prefix=passage,
            modules=self.modules or own.digest,
        )

    @property
    def model_note(self) -> str:
        """A note on a sentence encoder's modules, prompts and similarity."""
        own = self._modules()
        vectors = ", ".join(own.shown) if own.steps else ""
        prompts = dict.fromkeys(filter(None, (self.query_prefix, self.passage_prefix)))
        facts = [
            f"vectors are those of {vectors}" if vectors else "",
            f"texts begin with {' or '.join(map(repr, prompts))}" if prompts else "",
            "" if own.similarity == "cosine" else
            f"similarities are cosines, where the encoder was trained for {own.similarity}",
        ]  # fmt: skip
        return "; ".join(filter(None, facts))

    def recorded(self) -> Embedding:
        """Return the task of a run that records no modules: its vectors do not pass through any."""
        from adapterhub.backbones.sentence_modules import WITHOUT

        return replace(self, modules=self.modules or WITHOUT)

    def _modules(self) -> SentenceModules:
        from adapterhub.backbones.sentence_modules import known_modules

        return known_modules(self.modules)

    # Examples

    def fitted(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> tuple[Task, ColumnChoice]:
        """Infer the columns, and the loss from whether pairs have scores."""
        task = self
        if self.loss_type is None and labelled:
            scored = has_scores(source, options, split)
            task = replace(self, loss_type="cosent" if scored else "multiple-negatives")
        choice = pair_columns(source, options, split, scored=task.scored, labelled=labelled)
        return task, choice

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[TextPair]:
        """Read pairs with scores or negatives; for prediction, only the first texts."""
        scored = self.scored or (self.loss_type is None and has_scores(source, options, split))
        pairs = read_text_pairs(source, options, split, scored=scored, labelled=labelled)
        if self.loss_type == "triplet" and labelled and not all(pair.negatives for pair in pairs):
            raise DataError(
                f"{source} has rows without a negative, and loss_type is triplet",
                expected="a column negative, or data.negatives=COLUMN",
                hint="embedding(loss_type=multiple-negatives) needs none",
            )
        if self.loss_type == "cosine" and (far := [p for p in pairs if abs(p.label or 0) > 1]):
            raise DataError(
                f"{source} has scores that no cosine reaches, such as {far[0].label}",
                expected="scores from -1 to 1",
                hint="embedding(loss_type=cosent), for which only their order counts",
            )
        return pairs

    def example(self, fields: Sequence[str], options: DataOptions) -> TextPair:
        """Build an example of a text and others to compare it with."""
        return TextPair(fields[0], fields[1] if len(fields) > 1 else None, tuple(fields[2:]))

    def fields(self, options: DataOptions) -> int:
        """Return 0: one text, or several."""
        return 0

    def shown(self, example: TextPair) -> list[str]:
        """Return the text and its partner."""
        return list(example.texts[:2])

    def group_of(self, example: TextPair) -> Hashable:
        """Return the first text: the query."""
        return example.text

    # Rows

    def rows_of(self, example: TextPair, setting: Setting, *, labelled: bool) -> list[Row]:
        """Return one row: the tokens of each text."""
        own, limit = self._modules(), limit_of(setting)
        first, others = self.query_prefix or "", self.passage_prefix or ""
        prefixes = [first, *[others] * (len(example.texts) - 1)]
        pairs = zip(prefixes, example.texts, strict=True)
        texts = [own.text(prefix + text) for prefix, text in pairs]
        parts = rows_from_columns(setting.tokenizer(texts, truncation=True, max_length=limit))
        longest = max((part["input_ids"] for part in parts), key=len)
        row: Row = {"texts": parts, "numbers": list(map(text_number, example.texts))}
        if not own.pools_prompt:
            row["skipped"] = [own.skipped(each, setting.tokenizer, limit) for each in prefixes]
        row["input_ids"] = longest
        return [row | ({} if example.label is None else {"score": example.label})]

    def fits(self, row: Row, setting: Setting) -> bool:
        """Return whether the longest text fits."""
        return len(row["input_ids"]) <= limit_of(setting)

    def show_row(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the tokens of each text, and the score."""
        names = ("anchor", "positive", *[f"negative {n}" for n in range(1, len(row["texts"]))])
        lines = [tokens_line(part["input_ids"], setting.tokenizer) for part in row["texts"]]
        score = {"score": str(row["score"])} if "score" in row else {}
        return dict(zip(names, lines, strict=False)) | score

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Pad the tokens of all texts of all rows: (texts, tokens)."""
        import torch  # slow to import

        own: list[Row] = [
            {"labels": row["numbers"]} | ({"score": row["score"]} if "score" in row else {})
            for row in rows
        ]
        facts = pad(own, setting.tokenizer, "right")
        batch = {TEXTS: facts["labels"].clamp(min=0)}
        batch |= {SCORES: facts["score"]} if "score" in facts else {}
        if skipped := [number for row in rows for number in row.get("skipped", ())]:
            batch[SKIPPED] = torch.tensor(skipped)
        parts = [part for row in rows for part in row["texts"]]
        return batch | pad(parts, setting.tokenizer, self.padding_side(setting))

    def loss(self, train: Encoded) -> Loss | None:
        """Return the loss of the vectors of a batch."""
        by_name: Mapping[str, PairLoss] = {
            "multiple-negatives": lambda v, t, _: multiple_negatives_loss(v, t, self.temperature),
            "triplet": lambda v, t, _: triplet_loss(v, t, self.margin),
            "cosent": lambda v, _, s: cosent_loss(v, s, self.temperature),  # type: ignore[arg-type]
            "cosine": lambda v, _, s: cosine_loss(v, s),  # type: ignore[arg-type]
        }
        return partial(self._loss, by_name[self.loss_type or "multiple-negatives"])

    def loss_items(self, train: Encoded) -> Items:
        """Return a function that counts rows, or for triplets their negatives."""
        if self.loss_type == "triplet":
            return lambda batch: int((batch[TEXTS][:, 2:] != 0).sum())
        return batch_rows

    def _loss(self, of_vectors: PairLoss, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return of_vectors(self.vectors(output, batch), batch[TEXTS], batch.get(SCORES))

    def vectors(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors of a batch, (batch, columns, d); 0 where a row has fewer texts."""
        pooled = self._modules().vectors(
            output.last_hidden_state, batch["attention_mask"], pooling=self.pooling or "mean",
            normalize=False, skip=batch.get(SKIPPED),
        )  # fmt: skip
        there = batch[TEXTS] != 0
        vectors = pooled.new_zeros(*there.shape, pooled.shape[-1])
        vectors[there] = pooled
        return vectors

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the vectors of each example; pairs without a score also find their partners."""
        import torch.nn.functional as F

        def read(passed: Passed) -> Iterator[Vectors]:
            grid = self.vectors(passed.output, passed.batch)
            grid = F.normalize(grid, dim=-1) if self.normalize else grid
            for index, row in zip(passed.indices, grid.cpu().numpy(), strict=True):
                yield row[: len(data.examples[index].texts)]

        every = each_row(model, data, batch_size, read)
        if self.scored or any(e.pair is None or e.label is not None for e in data.examples):
            return [Embedded(each) for each in every]
        return _with_passages(data.examples, every)

    # Metrics

    def metric_names(self, examples: Sequence[TextPair]) -> tuple[str, ...]:
        """Return the metrics of scores or of retrieval."""
        return ("spearman", "pearson") if self.scored else RANKING_METRICS

    def metrics(
        self, examples: Sequence[TextPair], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compare cosines with scores, or the passages found for each query with its positives.

        A query finds passages among all positives and negatives of the examples, each text once.
        """
        embedded = [p for p in predictions if isinstance(p, Embedded)]
        if self.scored:
            cosines = [p.similarity for p in embedded]
            both = regression_metrics([e.label or 0.0 for e in examples], cosines)
            return {name: both[name] for name in self.metric_names(examples)}
        right = _partners(examples)
        nearest = {e.text: p.nearest for e, p in zip(examples, embedded, strict=True)}
        ranked = [near.ranked if (near := nearest[query]) else () for query in right]
        return ranking_metrics(ranked, [[1.0] * len(texts) for texts in right.values()])

    def outcome(self, example: TextPair, prediction: Prediction) -> dict[str, Any]:
        """Return the score and the cosine, or the positive and the passage found."""
        assert isinstance(prediction, Embedded)
        if self.scored:
            texts = self.shown(example)
            return {"texts": texts, "label": example.label, "prediction": prediction.similarity}
        nearest = prediction.nearest.texts if prediction.nearest else ()
        return {
            "texts": [example.text],
            "label": str(example.pair),
            "prediction": nearest[0] if nearest else "",
            "score": prediction.similarity,
            "right": prediction.right,
            "query": text_number(example.text),
            "ranking": dict(prediction.scores),
        }


def _partners(examples: Sequence[TextPair]) -> dict[str, set[str]]:
    """Return the positives of each first text."""
    right: dict[str, set[str]] = {}
    for example in examples:
        right.setdefault(example.text, set()).add(str(example.pair))
    return right


def refuse_decoder(model: PreTrainedModel) -> None:
    """Reject a backbone whose outputs do not represent the text.

    Raises:
        ConfigError: the backbone is an encoder-decoder.
    """
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"{model.config.model_type} is an encoder-decoder, which has no state of each text",
            expected="an encoder or a decoder, such as sentence-transformers/all-MiniLM-L6-v2",
        )


def text_number(text: str) -> int:
    """Return a positive number that identifies a text."""
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=7).digest()
    return int.from_bytes(digest, "big") + 1


def _with_passages(examples: Sequence[TextPair], every: Sequence[Vectors]) -> list[Prediction]:
    """Return the predictions with the passages that each example's first text finds."""
    queries = {e.text: vectors[0] for e, vectors in zip(examples, every, strict=True)}
    passages = {
        text: vector
        for example, vectors in zip(examples, every, strict=True)
        for text, vector in zip(example.texts[1:], vectors[1:], strict=True)
    }
    right = _partners(examples)
    nearest = nearest_passages(queries, passages, right)
    scores = {
        query: dict(zip(RANKING_METRICS, query_metrics(near.ranked, [1.0] * len(right[query])),
                        strict=True))
        for query, near in nearest.items()
    }  # fmt: skip
    return [
        Embedded(vectors, near, near.right(str(example.pair)), scores[example.text])
        for example, vectors in zip(examples, every, strict=True)
        for near in [nearest[example.text]]
    ]


def nearest_passages(
    queries: Mapping[str, Vectors],
    passages: Mapping[str, Vectors],
    relevant: Mapping[str, Collection[str]] | None = None,
) -> dict[str, Nearest]:
    """Return the passages that are most similar to each query.

    Similarity is the cosine. A query that is also a passage does not find itself.

    Args:
        queries: their vectors, (d,), by text.
        passages: their vectors, by text.
        relevant: the relevant passages of each query.
    """
    import numpy as np

    names, texts = list(passages), list(queries)
    places = {name: number for number, name in enumerate(names)}
    matrix, nearest = _of_length_1(np.stack([*passages.values()])), {}
    for start in range(0, len(texts), _AT_ONCE):
        some = texts[start : start + _AT_ONCE]
        scores = _of_length_1(np.stack([queries[text] for text in some])) @ matrix.T
        for text, row in zip(some, scores, strict=True):
            if text in places:
                row[places[text]] = -np.inf
            own = [places[name] for name in (relevant or {}).get(text, ()) if name in places]
            nearest[text] = _nearest(names, row, own)
    return nearest


def _nearest(names: Sequence[str], scores: Vectors, relevant: Sequence[int]) -> Nearest:
    """Return the passages with the highest scores; -inf excludes a passage."""
    import numpy as np

    best = [i for i in np.argsort(-scores, kind="stable")[:RANKED] if scores[i] > -np.inf]
    if not best:
        return Nearest(())
    equal = np.round(scores.astype(np.float64), TIE_DIGITS)
    levels, sizes = np.unique(equal[equal >= equal[best[-1]]], return_counts=True)
    hits = [int((equal[relevant] == level).sum()) if relevant else 0 for level in levels]
    ranked = [Tied(int(n), (1.0,) * k) for n, k in zip(sizes, hits, strict=True)]
    first = frozenset(names[i] for i in relevant if equal[i] == levels[-1])
    return Nearest(tuple(names[i] for i in best), tuple(reversed(ranked)), first)


def _of_length_1(vectors: Any) -> Any:
    import numpy as np

    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
