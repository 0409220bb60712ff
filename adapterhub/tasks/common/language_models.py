"""Language models: text generation and token losses.

The logits of all tokens are the largest tensor of a pass: one number for each token and entry of
the vocabulary. The loss needs the logits of one token at a time, and only of learned tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, fields, replace
from functools import partial
from queue import Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from adapterhub.backbones.end_tokens import text_stops, with_stops
from adapterhub.config.options import option
from adapterhub.errors import ConfigError
from adapterhub.status import Display, showing
from adapterhub.tasks.common.base import Encoded, Generated, Prediction, Task
from adapterhub.tasks.common.batches import (
    IGNORED,
    Passed,
    Row,
    Setting,
    by_length,
    each_batch,
    in_order,
    in_step,
    model_inputs,
    next_token_loss,
    on_device,
    pad,
    results,
    rows_at_once,
    without_gradients,
)
from adapterhub.tasks.common.languages import LANGUAGE_COLUMNS, Pair, language_ids
from adapterhub.tasks.common.metrics import GENERATION_METRICS, answer_metrics, generation_metrics
from adapterhub.tasks.common.packing import Windows
from adapterhub.tasks.common.preview import tokens_line
from adapterhub.tasks.common.shared_prefix import shared_prefix

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_SEARCH: ContextVar[Mapping[str, Any] | None] = ContextVar("search", default=None)


@dataclass(frozen=True)
class Writing:
    """Generation options of some calls; None: the task's recorded option, without sampling.

    Attributes:
        max_new_tokens: the longest text, in tokens.
        temperature: divides the logits before sampling; 0 selects the most probable token.
        top_p: samples from the most probable tokens whose total probability reaches this value.
        beams: the number of beams of the search.

    Raises:
        ConfigError: an option is out of range.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    beams: int | None = None

    def __post_init__(self) -> None:
        tests: dict[str, Callable[[float], bool]] = {
            "max_new_tokens": lambda n: 0 < n <= 100_000,
            "temperature": lambda t: 0 <= t < math.inf,
            "top_p": lambda p: 0 < p <= 1,
            "beams": lambda n: 0 < n <= 1000,
        }
        if problems := [f"{n} is {v}" for n, v in self.given.items() if not tests[n](v)]:
            raise ConfigError(
                ", ".join(problems),
                expected="1 to 100000 tokens, a temperature of 0 or more, a top_p above 0 up to 1, "
                "1 to 1000 beams",
            )

    @property
    def given(self) -> dict[str, Any]:
        """The options that are not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def applied(self, task: Task) -> Task:
        """Return a generating task with the length and the beams of these options."""
        own = {"new_tokens": self.max_new_tokens, "beams": self.beams}
        return replace(task, **{name: v for name, v in own.items() if v is not None})  # type: ignore[type-var]

    @contextmanager
    def sampling(self, **more: Any) -> Iterator[None]:
        """Apply these options to calls of `generate` inside; `more` are for `model.generate`."""
        sampled = self.temperature != 0 and {self.temperature, self.top_p} != {None}
        options = {"temperature": self.temperature or 1.0, "top_p": self.top_p or 1.0, "top_k": 0}
        token = _SEARCH.set(({"do_sample": True} | options if sampled else {}) | more)
        try:
            yield
        finally:
            _SEARCH.reset(token)


def chosen_search() -> Mapping[str, Any]:
    """Return the options of `model.generate` that are set in this context."""
    return _SEARCH.get() or {}


INCOMPLETE = "\ufffd"  # written for bytes that do not form a character yet
_LOSSY = ("WordPiece", "NoneType")  # decoders that insert spaces between words
_UNSETTLED = 8  # characters that a later token may change if spaces are cleaned up


def cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether spaces before punctuation are removed from decoded texts.

    A tokenizer whose tokens lack spaces inserts one between all of them, and removes some again if
    it is configured to. A tokenizer whose tokens contain spaces (byte-level or SentencePiece)
    returns the text unchanged, whatever its configuration: cleaning up would alter the generated
    text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    loses = backend is not None and type(backend.decoder).__name__ in _LOSSY
    return loses and bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))


def written_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of generated tokens, without special tokens and language codes.

    All generated texts are decoded here: in evaluations, predictions, streams and servers.
    """
    codes = {*language_ids(tokenizer).values()}  # not special tokens in every tokenizer
    return str(
        tokenizer.decode(
            [i for i in ids if i not in codes],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=cleans_up(tokenizer),
        )
    )


class WrittenPieces:
    """The pieces of a text, token by token; together they are the text.

    A piece ends where later tokens no longer change it: a token may end within a character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.ids, self.given = tokenizer, list[int](), 0

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that tokens add."""
        self.ids += ids
        text = written_text(self.tokenizer, self.ids)
        settled = text.rstrip(INCOMPLETE)
        if cleans_up(self.tokenizer):
            settled = settled[:-_UNSETTLED]
        return self._piece(settled)

    def end(self) -> str:
        """Return the text that was held back."""
        return self._piece(written_text(self.tokenizer, self.ids))

    def _piece(self, text: str) -> str:
        piece = text[self.given :]
        self.given += len(piece)
        return piece


class _Streamer:
    """Streams the pieces of one text, which `generate` produces in another thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip: bool) -> None:
        self.text, self.skip = WrittenPieces(tokenizer), skip
        self.queue: Queue[str | None] = Queue()

    def put(self, ids: Tensor) -> None:
        """Receive tokens; the first ones are the prompt, if there is one."""
        if self.skip:
            self.skip = False
        else:
            self.queue.put(self.text.add(ids.flatten().tolist()))

    def end(self) -> None:
        """Emit the rest."""
        self.queue.put(self.text.end())

    def close(self) -> None:
        """End the stream for the reader."""
        self.queue.put(None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.queue.get, None)


def streamed(
    write: Callable[[], object],
    tokenizer: PreTrainedTokenizerBase,
    writing: Writing,
    *,
    prompt: bool,
) -> Iterator[str]:
    """Yield the pieces of the text generated by `write`, a call of `generate` for one prompt.

    The call runs in a thread, and ends early if the reader stops. With `prompt` the tokens of the
    prompt come first. The pieces join to the full text.

    Raises:
        Exception: any exception of `write`.
    """
    from transformers import StoppingCriteriaList

    pieces = _Streamer(tokenizer, prompt)
    unwanted, raised = Event(), list[Exception]()
    ends = StoppingCriteriaList([lambda ids, scores, **_: unwanted.is_set()])

    def work() -> None:
        try:
            # A bar would erase the line that the pieces are on.
            with showing(Display()), writing.sampling(streamer=pieces, stopping_criteria=ends):
                write()
        except Exception as error:
            raised.append(error)
        finally:
            pieces.close()

    thread = Thread(target=copy_context().run, args=(work,), daemon=True)
    thread.start()
    begun, held = False, ""
    try:
        for piece in pieces:
            text = held + piece if begun else (held + piece).lstrip()
            kept = text.rstrip()  # trailing space is not part of the text
            begun, held = begun or bool(kept), text[len(kept) :]
            if kept:
                yield kept
    finally:
        unwanted.set()
        thread.join()
    if raised:
        raise raised[0]


TOKEN_METRICS = frozenset({"loss", "perplexity"})

_RowLosses = list[tuple[int, tuple[float, int]]]
_BatchLoss = tuple[float, int, _RowLosses]


@dataclass(frozen=True)
class Generation:
    """Generation options: greedy search or beam search."""

    printed_fields: ClassVar[tuple[str, ...]] = ("generated",)

    new_tokens: int = option(64, "longest generated text, in tokens")
    beams: int = option(1, "beams of the search; 1 is greedy")

    def __post_init__(self) -> None:
        if not (0 < self.new_tokens <= 100_000 and 0 < self.beams <= 1000):
            raise ConfigError(
                f"new_tokens is {self.new_tokens}, beams is {self.beams}",
                expected="1 to 100000 tokens, 1 to 1000 beams",
            )

    def stops(self, setting: Setting) -> list[int]:
        """Return the token that the tokenizer appends to a text."""
        return text_stops(setting.tokenizer)

    def stop_texts(self, setting: Setting) -> tuple[str, ...]:
        """Return the stop texts, in addition to stop tokens: none here."""
        return ()

    def of_texts(self) -> Generation:
        """Return the task that reads a text unchanged, if texts are continued."""
        return self

    def between(self, languages: Pair) -> Generation:
        """Return the task between two languages; None keeps the task's own language.

        Raises:
            ConfigError: the task does not translate.
        """
        names = [n for n, each in zip(LANGUAGE_COLUMNS, languages, strict=True) if each]
        raise ConfigError(
            f"{' and '.join(names)}, and the adapter does not translate between languages",
            expected="an adapter for seq2seq on a backbone for several languages",
            hint=f"a request without {' and '.join(names)}",
        )

    def of_chats(self, setting: Setting) -> Generation:
        """Return the task that reads chats, if the tokenizer formats them."""
        return self

    def endless_note(self, setting: Setting) -> tuple[str, ...]:
        """Return a warning line if generation will not stop after an answer."""
        if self.stops(setting):
            return ()
        return (
            "no token ends an answer (the chat template writes none, or the tokenizer has none): "
            f"generation will go on to new_tokens={self.new_tokens}",
        )

    def prompt_batch(self, rows: Sequence[Row], setting: Setting, side: str) -> dict[str, Tensor]:
        """Return the model inputs for some prompts."""
        return pad(rows, setting.tokenizer, side)

    def generation_options(self, model: PreTrainedModel, prompts: Encoded) -> dict[str, Any]:
        """Return the options of `model.generate`, except the search options."""
        from adapterhub.anatomy.backbone import Backbone  # imports torch

        stops = prompts.task.stops(prompts.setting)
        ends = {"eos_token_id": with_stops(Backbone.of(model).stops, stops)} if stops else {}
        padding = prompts.setting.tokenizer.pad_token_id
        start = self.start_options(model, prompts.setting)
        return {"max_new_tokens": self.new_tokens, "pad_token_id": padding, **ends, **start}

    def start_options(self, model: PreTrainedModel, setting: Setting) -> dict[str, Any]:
        """Return the options of `model.generate` that choose the first token: none by default."""
        return {}


def check_writes(task: Task) -> None:
    """Reject a task that does not generate text.

    Raises:
        ConfigError: the task does not generate text.
    """
    if not isinstance(task, Generation):
        raise ConfigError(
            f"{task.name} does not generate texts",
            expected="an adapter for causal-lm, seq2seq or another task that writes texts",
        )


@dataclass(frozen=True)
class WritesTargets(Generation):
    """A target text of the decoder of an encoder-decoder."""

    def padding_side(self, setting: Setting) -> str:
        """Return the right side: the decoder starts at the first position."""
        return "right"

    def show_row(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the tokens of the input and of the target."""
        return {
            "tokens": tokens_line(row["input_ids"], setting.tokenizer),
            "target": tokens_line(row["labels"], setting.tokenizer),
        }


@dataclass(frozen=True)
class TokenLoss(Prediction):
    """The mean loss of the labelled tokens of an example, and their number."""

    loss: float
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Return the loss and the tokens."""
        return {"loss": self.loss, "tokens": self.tokens}

    def __str__(self) -> str:
        return f"{self.loss:.3f}"


class LearnsTokens(Task):
    """A task whose metrics include loss and perplexity of the labelled tokens."""

    lower_is_better = TOKEN_METRICS

    def token_metrics(
        self,
        model: PreTrainedModel,
        data: Encoded,
        batch_size: int,
        record: list[Prediction] | None = None,
    ) -> dict[str, float]:
        """Return loss and perplexity."""
        return token_loss(model, data, batch_size, shifted=self.predicts_next, record=record)


class WritesTexts(LearnsTokens):
    """A task with the option `metric`, which compares generated texts with labels."""

    metric: Literal["bleu", "rouge", "exact"]

    outcomes = "texts"

    @property
    def main_metric(self) -> str:
        """The main score of the option `metric`."""
        return {"bleu": "bleu", "rouge": "rougeL", "exact": "exact_match"}[self.metric]

    def metric_names(self, examples: Sequence[Any]) -> tuple[str, ...]:
        """Return the scores of the option `metric`, loss and perplexity."""
        return (*GENERATION_METRICS[self.metric], "loss", "perplexity")

    def metrics(
        self, examples: Sequence[Any], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute the scores of the option `metric`."""
        written = [p.text for p in predictions if isinstance(p, Generated)]
        return generation_metrics(self.metric, [str(e.label) for e in examples], written)

    def outcome(self, example: Any, prediction: Prediction) -> dict[str, Any]:
        """Return the label and the generated text, and their word F1 or exact match."""
        outcome = text_outcome(self.shown(example), str(example.label), prediction)
        if self.metric == "exact":
            outcome["score"] = self.metrics([example], [prediction])["exact_match"]
        return outcome


def text_outcome(texts: list[str], reference: str, prediction: Prediction) -> dict[str, Any]:
    """Return the reference, the generated text and their word F1."""
    assert isinstance(prediction, Generated)
    score = answer_metrics([[reference]], [prediction.text])["f1"]
    return {"texts": texts, "label": reference, "prediction": prediction.text, "score": score}


def generate(
    model: PreTrainedModel, prompts: Encoded, batch_size: int, generation: Generation
) -> list[Generated]:
    """Generate a text for each prompt, in order, without special tokens."""
    tokenizer, stops = prompts.setting.tokenizer, generation.stop_texts(prompts.setting)
    texts = (
        written_text(tokenizer, ids).strip()
        for ids in generated_tokens(model, prompts, batch_size, generation)
    )
    return [Generated(text_before(text, stops)) for text in texts]


def generated_tokens(
    model: PreTrainedModel, prompts: Encoded, batch_size: int, how: Generation
) -> list[list[int]]:
    """Generate the tokens that follow each prompt, in order, padded after their end.

    The tokens of an encoder-decoder begin with the token that starts its decoder.
    """
    # A decoder continues from the last position, which must not be padding.
    side = "right" if model.config.is_encoder_decoder else "left"
    options = how.generation_options(model, prompts)
    prefix = shared_prefix(model, prompts.rows)
    prefix = prefix if prefix and prefix.is_whole else None

    search = {"do_sample": False, "num_beams": how.beams, **chosen_search()}
    tokenizer, stops = prompts.setting.tokenizer, how.stop_texts(prompts.setting)

    def compute(indices: list[int]) -> list[tuple[int, list[int]]]:
        batch = how.prompt_batch([prompts.rows[i] for i in indices], prompts.setting, side)
        moved = on_device(batch, model, model.device)
        inputs = {k: v for k, v in moved.items() if k != "labels"}
        first = 0 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        room = max(prompts.setting.positions - max(first, 1), 1)
        most: dict[str, Any] = {"max_new_tokens": min(options["max_new_tokens"], room)}
        if prefix and indices[0] in prefix.rows:
            most["past_key_values"] = prefix.cached(len(indices) * how.beams)
        if stops:
            ends = search.get("stopping_criteria", ())
            most["stopping_criteria"] = [*ends, _StopTexts(tokenizer, stops, first)]
        with without_gradients():
            ids = model.generate(  # type: ignore[operator]
                **inputs, **options | search | most, use_cache=True, synced_gpus=in_step(),
            )  # fmt: skip
        return [*zip(indices, ids[:, first:].tolist(), strict=True)]

    model.eval()
    # Padding would come before the prefix.
    batches = results(by_length(prompts, batch_size, None, prefix, even=bool(prefix)), compute)
    return in_order({index: ids for batch in batches for index, ids in batch})


def text_before(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the stop texts, without trailing space."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text.rstrip() if stops else text


class _StopTexts:
    """Ends each row of `generate` after a stop text that follows other text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], first: int) -> None:
        self.tokenizer, self.stops, self.first = tokenizer, stops, first

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        import torch  # slow to import

        texts = (
            written_text(self.tokenizer, row).lstrip() for row in ids[:, self.first :].tolist()
        )
        ended = [any(stop in text for stop in self.stops) for text in texts]
        return torch.tensor(ended, device=ids.device)


def token_loss(
    model: PreTrainedModel,
    data: Encoded,
    batch_size: int,
    *,
    shifted: bool = False,
    record: list[Prediction] | None = None,
) -> dict[str, float]:
    """Return `loss`, the mean negative log-likelihood per labelled token in nats, and `perplexity`.

    `shifted`: the model predicts each token from the tokens before it, so the label of the first
    position does not count. `record` gets the loss of each example, unless examples share a row.
    """
    each = record is not None and len(data.owners) > 0
    head = _head_in_chunks(model, data, batch_size)
    alone = shifted and not isinstance(data.rows, Windows)
    prefix = shared_prefix(model, data.rows) if alone else None

    def read_states(passed: Passed) -> _BatchLoss:
        assert head is not None
        targets = targets_of(passed.batch, shifted)
        learned = targets != IGNORED
        losses = token_losses(passed.output[learned], head, targets[learned])
        summed = losses.new_zeros(learned.shape).masked_scatter(learned, losses).sum(1)
        own = [*zip(summed.tolist(), learned.sum(1).tolist(), strict=True)]
        return float(losses.sum()), len(losses), [*zip(passed.indices, own, strict=True)]

    def read(passed: Passed) -> _BatchLoss:
        labels = passed.batch["labels"][:, 1:] if shifted else passed.batch["labels"]
        rows: _RowLosses = []
        if each:
            own = _row_losses(passed.output.logits, passed.batch, shifted)
            rows = [*zip(passed.indices, own, strict=True)]
        tokens = int((labels != IGNORED).sum())
        if not tokens:
            return 0.0, 0, rows
        mean = next_token_loss(passed.output, passed.batch) if shifted else passed.output.loss
        return float(mean) * tokens, tokens, rows

    if head is not None:
        below = partial(states_below, model, head)
        batches = each_batch(model, data, batch_size, read_states, run=below, prefix=prefix)
    else:
        batches = each_batch(model, data, batch_size, read, labels=not shifted, prefix=prefix)
    if record is not None and each:
        sums = [[0.0, 0] for _ in data.examples]
        for index, row in (pair for _, _, rows in batches for pair in rows):
            for i, value in enumerate(row):
                sums[data.owners[index]][i] += value
        record += [TokenLoss(summed / max(n, 1), int(n)) for summed, n in sums]
    count = sum(tokens for _, tokens, _ in batches)
    total = sum(summed for summed, _, _ in batches)
    loss = total / max(count, 1)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def _head_in_chunks(model: PreTrainedModel, data: Encoded, batch_size: int) -> nn.Linear | None:
    """Return the head if it computes the model's logits, and these are too many for one batch."""
    if in_step() or not data.rows:
        return None
    longest = max(data.lengths)
    rows = rows_at_once(batch_size, longest) if model.device.type == "cpu" else batch_size
    return head_apart(model, rows * longest, lambda: data.batch([0]))


def head_apart(
    model: PreTrainedModel, tokens: int, row: Callable[[], Mapping[str, Tensor]]
) -> nn.Linear | None:
    """Return the head of a model if the logits of `tokens` tokens are too many at once.

    Return None as well if the logits of the model are not the output of its head, as tested on a
    part of one labelled `row`.
    """
    head = plain_head(model)
    if head is None or logits_at_once(head, tokens) == tokens:
        return None
    model.eval()
    batch = on_device(few_tokens(row()), model, model.device)
    with without_gradients():
        return None if whole_output(model, head, batch) is None else head


def _row_losses(
    logits: Tensor, batch: dict[str, Tensor], shifted: bool
) -> Iterator[tuple[float, int]]:
    """Yield the summed loss of the labelled tokens of each row, and their number."""
    from torch.nn.functional import cross_entropy

    for scores, labels in zip(logits, batch["labels"], strict=True):
        if shifted:
            scores, labels = scores[:-1], labels[1:]
        learned = labels != IGNORED
        losses = cross_entropy(scores[learned].float(), labels[learned], reduction="sum")
        yield float(losses), int(learned.sum())


_WORTHWHILE = 1 << 24  # logits of a batch: 64 MiB in fp32
_CHUNK = {"cpu": 1 << 23}  # logits of a chunk, 32 MiB in fp32: larger ones leave the caches
_CHUNK_ELSEWHERE = 1 << 27
_FEW = 64  # tokens
_OF_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"}


class _Reached(Exception):
    """The pass has reached the input of the head."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


def plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """Return the head of a language model if it is a plain linear layer, else None.

    A plain head has no hooks and is not quantized: no adapter or offloading intervenes.
    """
    from torch import nn

    from adapterhub.anatomy.backbone import whole_states  # imports torch

    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.weight.is_meta:
        return None
    before = [hook for hook in head._forward_pre_hooks.values() if hook is not whole_states]
    hooked = head._forward_hooks or before or "forward" in vars(head)
    return None if hooked or head._modules else head


def states_below(model: PreTrainedModel, head: nn.Linear, batch: Mapping[str, Tensor]) -> Any:
    """Return the head's input for a batch, (batch, tokens, d); the pass ends there.

    None if the head is not called.
    """
    handle = head.register_forward_pre_hook(_end)
    try:
        model(**model_inputs(batch))
    except _Reached as reached:
        return reached.states
    finally:
        handle.remove()
    return None


def _end(head: nn.Module, args: tuple[Any, ...]) -> None:
    raise _Reached(args[0])


def whole_output(model: PreTrainedModel, head: nn.Linear, batch: Mapping[str, Tensor]) -> Any:
    """Compute the output of a model; None if its logits differ from the head's output.

    Scaled or bounded logits differ, even if their loss is equal after rounding. Return None as well
    if the model does not accept these tokens: Reformer only accepts certain lengths.
    """
    import torch

    written: list[Tensor] = []
    handle = head.register_forward_hook(lambda _, args, output: written.append(output))
    try:
        output = model(**model_inputs(batch))
    except (RuntimeError, ValueError):
        return None
    finally:
        handle.remove()
    same = len(written) == 1 and torch.equal(written[0].float(), output.logits.float())
    return output if same else None


def few_tokens(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a short part of a row for comparing logits, with its last learned token.

    Rows with more inputs than ids, such as images, are returned whole: their tokens belong
    together.
    """
    labels = batch["labels"]
    if not batch.keys() <= _OF_TOKENS or any(tensor.dim() != 2 for tensor in batch.values()):
        return dict(batch)
    learned = (labels[0] != IGNORED).nonzero()
    end = int(learned[-1]) + 1 if len(learned) else labels.shape[1]
    window = slice(max(end - _FEW, 0), end)
    return {n: t[:, window] if t.shape == labels.shape else t for n, t in batch.items()}


def targets_of(batch: Mapping[str, Tensor], shifted: bool) -> Tensor:
    """Return the token to predict at each position, (batch, tokens), or IGNORED.

    `shifted`: each token is predicted from the tokens before it.
    """
    import torch.nn.functional as F

    labels = batch["labels"]
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:] if shifted else labels


def logits_at_once(head: nn.Linear | None, tokens: int) -> int:
    """Return the number of tokens whose logits are computed at a time: all, if they are few.

    `head` is None if the logits of all tokens are computed.
    """
    if head is None or tokens * head.weight.shape[0] < _WORTHWHILE:
        return tokens
    return min(tokens, _chunk(head))


def _chunk(head: nn.Linear) -> int:
    most = _CHUNK.get(head.weight.device.type, _CHUNK_ELSEWHERE)
    return max(most // head.weight.shape[0], 1)


def token_chunks(tokens: int, head: nn.Linear) -> list[slice]:
    """Split tokens into chunks whose logits are computed at a time."""
    size = _chunk(head)
    return [slice(begin, begin + size) for begin in range(0, tokens, size)]


def token_losses(states: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each token, (n,), in fp32, without gradients.

    states: (n, d), targets: (n,).
    """
    import torch
    import torch.nn.functional as F

    losses = torch.zeros(len(targets), device=targets.device)
    with torch.no_grad():
        for part in token_chunks(len(targets), head):
            scores = head(states[part]).float()
            losses[part] = F.cross_entropy(scores, targets[part], reduction="none")
    return losses
