"""Group relative policy optimization: a language model learns from rewards of its own texts.

    example      a prompt, its answer if a reward reads one, and further columns
    row          the tokens of the prompt; in training, `group` sampled texts after it
    prediction   a response to the prompt
    metrics      the mean reward of the responses

Each step samples texts for the prompts of a batch from the model that trains, with the adapter
on. A text is rewarded by a rule, a function or unit tests (`tasks/common/rewards.py`), compared
with the other texts for its prompt, and made more or less probable
(`tasks/common/policy_losses.py`). The reference of the divergence is the model with the adapter
off, and those below it on: neither sampling nor the reference needs a second copy of the weights.
Shao et al. 2024, "DeepSeekMath", https://arxiv.org/abs/2402.03300.

The texts depend on the weights, the seed, the epoch and the rows alone: a resumed run samples the
same ones. Texts are not kept from step to step; with `iterations`, several optimizer steps use the
texts of one batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from adapterhub.config.options import option
from adapterhub.data.chat_formats import Message, messages_of, opening
from adapterhub.data.columns import WANTS, ColumnChoice, Wants, choose_columns
from adapterhub.data.examples import Example, Grouped, read_rows, refuse, text_problem
from adapterhub.data.options import DataOptions
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks.causal_lm import (
    AUTO,
    TEMPLATE_HELP,
    CausalLM,
    Chat,
    chosen_template,
    prompt_template,
    template_note,
    unused_note,
)
from adapterhub.tasks.common.base import Encoded, Generated, Prediction, Task, register_task
from adapterhub.tasks.common.batches import (
    IGNORED,
    OF_LOSS,
    Items,
    Loss,
    Setting,
    batch_rows,
    learned,
    measure,
    model_inputs,
    on_device,
    pad,
    without_gradients,
)
from adapterhub.tasks.common.language_models import Generation, text_outcome, written_text
from adapterhub.tasks.common.on_policy import Completion, sample_completions
from adapterhub.tasks.common.policy_losses import (
    PolicyOptions,
    Sampled,
    advantages_of,
    deviations_of,
    policy_loss,
)
from adapterhub.tasks.common.rewards import (
    RULES,
    RewardedTexts,
    RewardRule,
    check_rewards,
    reward_of,
    total_rewards,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

LABELS, ADVANTAGES = f"{OF_LOSS}labels", f"{OF_LOSS}advantages"
OLD, REFERENCE = f"{OF_LOSS}old", f"{OF_LOSS}reference"
KEPT = "logits_to_keep"  # an input of most language models: the positions whose logits they return


@dataclass(frozen=True)
class RewardedPrompt(Grouped):
    """A prompt (text or messages), with the answer and the other columns that rewards read.

    `label` is the answer, or Python code that tests one. `columns` are names and values, as JSON.
    """

    prompt: str | tuple[Message, ...]
    label: str | None = None
    columns: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """The prompt as one text."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message[0]}: {message[1]}" for message in self.prompt)


@dataclass(frozen=True)
class Rewarded(Generated):
    """A generated text and its reward; NaN if it was not scored."""

    reward: float = field(default=0.0)


@register_task
@dataclass(frozen=True)
class GRPO(PolicyOptions, Generation, Task):
    """Texts with higher rewards, learned by a language model from its own samples.

    Rows of `train.jsonl`:

        {"prompt": "What is 2 + 2?", "answer": "4"}
        {"prompt": "What is 3 * 5?", "answer": "15"}

    `reward=exact` compares the last number of a text, or the whole text, with the answer;
    `regex:PATTERN` searches the text; `FILE.py:FUNCTION` calls a function with all columns of the
    data; `tests` runs the code in a text with the tests of the row, and requires `run_code`. A
    prompt may be a list of messages, each with a role and a content.

    A batch of `train.batch_size` prompts has `group` texts for each.

    `predict` prints a generated response:

        4
        {"generated": "4"}
    """

    reward: tuple[str, ...] | str = option(
        "exact", "what scores texts: exact, regex:PATTERN, tests, FILE.py:FUNCTION, or several"
    )
    weights: tuple[float, ...] | None = option(None, "the weight of each reward (null: 1)")
    group: int = option(8, "texts that are sampled for each prompt")
    temperature: float = option(1.0, "divides the logits when texts are sampled and learned")
    top_p: float = option(1.0, "sample from the most probable tokens up to this probability")
    run_code: bool = option(False, "run code that the model writes (reward=tests)")
    data: Literal["pairs", "chat"] = option(
        "pairs", "prompts that are texts, or chats (lists of messages)"
    )
    template: str | None = option(AUTO, TEMPLATE_HELP)

    name = "grpo"
    head = "causal-lm"
    summary = "rewards of the model's own texts: answers, formats, functions, unit tests"
    main_metric = "reward"
    measures = ("reward",)
    most_tokens = 1024
    cut_note = CausalLM.cut_note
    groups = "prompts"
    columns = WANTS["answered prompts"]
    outcomes = "texts"
    on_policy = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_loss()
        rewards = self.rewards
        if self.weights is not None and (
            len(self.weights) != len(rewards) or not all(map(math.isfinite, self.weights))
        ):
            raise ConfigError(
                f"weights are {list(self.weights)} for {len(rewards)} rewards",
                expected="a finite number for each reward",
            )
        if not 2 <= self.group <= 10_000:
            raise ConfigError(
                f"group is {self.group}", expected="2 or more texts to compare with each other"
            )
        if not (0 < self.temperature < math.inf and 0 < self.top_p <= 1):
            raise ConfigError(
                f"temperature is {self.temperature}, top_p is {self.top_p}",
                expected="a temperature above 0, and a top_p above 0 up to 1",
            )
        if {"exact", "tests"} <= {reward.spec for reward in rewards}:
            raise ConfigError(
                "exact and tests both read the label column of the data",
                expected="one of both, or a function that reads two columns",
            )

    @property
    def specs(self) -> tuple[str, ...]:
        """The option `reward` as a list."""
        return (self.reward,) if isinstance(self.reward, str) else self.reward

    @property
    def rewards(self) -> tuple[RewardRule, ...]:
        """The rewards."""
        return tuple(map(reward_of, self.specs))

    @property
    def passes(self) -> int:
        """The option `iterations`."""
        return self.iterations

    @property
    def language(self) -> CausalLM:
        """The task that encodes and continues prompts."""
        return CausalLM(
            data=self.data, template=self.template, new_tokens=self.new_tokens, beams=self.beams
        )

    def recorded(self) -> GRPO:
        """Return the task without rewards that are code: an adapter may come from anybody."""
        weights = self.weights or (1.0,) * len(self.rewards)
        kept = [(r.spec, w) for r, w in zip(self.rewards, weights, strict=True) if not r.is_code]
        specs, weights = (tuple(each) for each in zip(*kept, strict=True)) if kept else ((), ())
        return replace(self, reward=specs, weights=weights, run_code=False)

    def for_model(self, model: PreTrainedModel) -> GRPO:
        """Return the task with the template that the tokenizer of the backbone chooses."""
        return replace(self, template=chosen_template(self.template, model))

    @property
    def model_note(self) -> str:
        """Return whether the tokenizer's chat template formats the prompts."""
        return template_note(self.name) if self.data == "pairs" and self.template is None else ""

    # Examples

    def _wants(self) -> Wants:
        """Return the columns that are read: the prompt, and the answer or the tests."""
        read = {reward.spec for reward in self.rewards if reward.reads_answer}
        label = {"label": "tests" if "tests" in read else "solution"} if read else {}
        return {"text": "prompts", **label}

    def fitted(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> tuple[Task, ColumnChoice]:
        """Infer the columns; prompts that are lists of messages are chats."""
        choice = choose_columns(source, options, split, self._wants(), labelled=labelled)
        table, column = choice.table, choice.options.text_column
        assert table is not None
        chats = column in table.columns and any(
            isinstance(value, list) for value in table.spread(column, 5)
        )
        return replace(self, data="chat") if chats and labelled else self, choice

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read prompts, and for rewards the answers and all other columns."""
        choice = choose_columns(source, options, split, self._wants(), labelled=labelled)
        table, options = choice.table, choice.options
        assert table is not None
        answered = labelled and "label" in self._wants()
        columns = [options.text_column, *[options.label_column] * answered]
        functions = any(reward.is_code and not reward.reads_answer for reward in self.rewards)
        others = [c for c in table.columns if c not in columns] if labelled and functions else []

        def build(prompt: Any, *values: Any) -> RewardedPrompt:
            messages = messages_of(prompt)
            text = messages or (prompt if isinstance(prompt, str) else None)
            label = _answer_text(values[0]) if answered else None
            example = RewardedPrompt(text, label)  # type: ignore[arg-type]
            problems = [text_problem(text and example.text, columns[0], allow_empty=not labelled)]
            problems += [text_problem(label, columns[1], allow_empty=False)] if answered else []
            refuse(*problems)
            named = zip([*columns[1:], *others], values, strict=True) if functions else ()
            return replace(example, columns=tuple((n, _as_json(n, v)) for n, v in named))

        return read_rows(source, options, split, [*columns, *others], build)

    def check(self, labels: Sequence[str], examples: Sequence[Any]) -> None:
        """Check that the rewards can be computed: functions are imported.

        Raises:
            ConfigError: a function cannot be imported, there is no reward, or code may not be run.
        """
        self._check_rewards()
        check_rewards(self.rewards)

    def _check_rewards(self) -> None:
        if not self.rewards:
            raise ConfigError(
                "the adapter's rewards are code, which is not run from its record",
                expected=f"one of {', '.join(RULES)}",
                hint="train with --eval: the run scores these rows",
            )
        if "tests" in self.specs and not self.run_code:
            raise ConfigError(
                "reward tests runs code that the model writes, on this machine",
                expected="your consent, in a container or as a user without access to your files",
                hint='--task "grpo(reward=tests, run_code=true)"',
            )

    def example(self, fields: Sequence[str], options: DataOptions) -> RewardedPrompt:
        """Build a prompt, or a chat with one user message."""
        return RewardedPrompt((("user", fields[0]),) if self.data == "chat" else fields[0])

    def chat_example(self, messages: tuple[Message, ...]) -> RewardedPrompt | None:
        """Build a chat, if the tokenizer's chat template formats prompts."""
        return RewardedPrompt(messages) if self.language.chat_example(messages) else None

    def shown(self, example: RewardedPrompt) -> list[str]:
        """Return the prompt."""
        return [example.text]

    def group_of(self, example: RewardedPrompt) -> Hashable:
        """Return the prompt; for a chat, its first messages."""
        return opening(example.prompt)

    # Rows

    def encode(
        self, examples: Sequence[RewardedPrompt], setting: Setting, *, labelled: bool
    ) -> Encoded:
        """Encode prompts, cut from the left so that `new_tokens` more positions are free."""
        prompts = [self._asked(example, setting) for example in examples]
        encoded = self.language.encode(prompts, setting, labelled=False)
        return replace(encoded, task=self, examples=tuple(examples))

    def _asked(self, example: RewardedPrompt, setting: Setting) -> Example | Chat:
        """Return a prompt as an example of causal-lm."""
        if isinstance(example.prompt, str):
            return Example(example.prompt)
        template = prompt_template(self.template, setting.tokenizer)
        as_text = self.data == "pairs" and template is not None
        return Example(example.text) if as_text else Chat(example.prompt)

    def rollout(
        self,
        model: PreTrainedModel,
        data: Encoded,
        indices: Sequence[int],
        epoch: int,
        bare: Callable[[], AbstractContextManager[None]],
    ) -> dict[str, Tensor]:
        """Sample `group` texts for each prompt, and return them with their advantages.

        The log probabilities of tokens are (texts, tokens), as in `policy_losses.Sampled`.
        """
        import torch

        owners = [data.owners[index] for index in indices]
        examples = [data.examples[owner] for owner in owners]
        rows, places = [data.rows[index] for index in indices], tuple(range(len(indices)))
        prompts = replace(data, examples=tuple(examples), rows=rows, owners=places)
        seed = (data.setting.seed, epoch, *indices)
        sampled = sample_completions(
            model, prompts, seed, copies=self.group, temperature=self.temperature, top_p=self.top_p
        )
        rewards = torch.tensor(self._scores(sampled, examples, data.setting))
        rewards = rewards.view(-1, self.group)
        advantages = advantages_of(rewards, self.scale_rewards).flatten()
        _measure(rewards, sampled)
        batch = self._batch(model, sampled, data.setting) | {ADVANTAGES: advantages}
        if self.iterations > 1:
            batch[OLD] = self._log_probabilities(model, batch)
        if self.beta:
            with bare():
                batch[REFERENCE] = self._log_probabilities(model, batch)
        return batch

    def _scores(
        self, sampled: Sequence[Completion], examples: Sequence[RewardedPrompt], setting: Setting
    ) -> list[float]:
        """Return the reward of each sampled text, NaN if it is not scored."""
        texts = [written_text(setting.tokenizer, each.tokens).strip() for each in sampled]
        totals, each = self._rewarded(texts, [e for e in examples for _ in range(self.group)])
        for name, values in each.items() if len(each) > 1 else ():
            known = [value for value in values if not math.isnan(value)]
            measure(**{f"reward_{name}": math.fsum(known) / max(len(known), 1)})
        return totals

    def _rewarded(
        self, texts: list[str], examples: Sequence[RewardedPrompt]
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Return the weighted rewards of texts, and each reward by name."""
        self._check_rewards()
        rows = [dict(example.columns) for example in examples]
        columns = {
            name: [json.loads(row[name]) if name in row else None for row in rows]
            for name in dict.fromkeys(name for row in rows for name in row)
        }
        prompts = [
            e.prompt
            if isinstance(e.prompt, str)
            else [{"role": message[0], "content": message[1]} for message in e.prompt]
            for e in examples
        ]
        weights = self.weights or (1.0,) * len(self.rewards)
        scored = RewardedTexts(texts, prompts, [e.label for e in examples], columns)
        return total_rewards(self.rewards, weights, scored)

    def _batch(
        self, model: PreTrainedModel, sampled: Sequence[Completion], setting: Setting
    ) -> dict[str, Tensor]:
        """Pad prompts with texts; the model computes the logits from the shortest prompt on."""
        import inspect

        import torch

        batch = pad([each.row for each in sampled], setting.tokenizer, "right")
        labels = batch.pop("labels")
        if self.mask_truncated:
            labels[[not each.ended for each in sampled]] = IGNORED
        if KEPT in inspect.signature(model.forward).parameters:
            first = min(len(each.prompt) for each in sampled) - 1
            # Counted from the end, since virtual tokens may precede the texts.
            batch[KEPT] = torch.arange(first - labels.shape[1], 0)
        return batch | {LABELS: labels}

    def _log_probabilities(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log probabilities of tokens under a model, without gradients."""
        from adapterhub.backbones.probe import evaluation_mode

        moved = on_device(batch, model, model.device)
        with evaluation_mode(model), without_gradients(), learned(moved):
            output = model(**model_inputs(moved))
            values, _ = _token_log_probabilities(output.logits, moved[LABELS], self.temperature)
        return values.clone()

    def loss(self, train: Encoded) -> Loss | None:
        """Return the loss of a batch of texts."""

        def compute(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
            policy, mask = _token_log_probabilities(output.logits, batch[LABELS], self.temperature)
            sampled = Sampled(policy, batch[ADVANTAGES], mask, batch.get(OLD), batch.get(REFERENCE))
            result = policy_loss(sampled, self, self.new_tokens)
            if result.divergence is not None:
                measure(kl=result.divergence)
            if self.iterations > 1:
                measure(clipped=result.clipped)
            return result.loss

        return compute

    def loss_items(self, train: Encoded) -> Items:
        """Return a function that counts texts, or tokens if the loss is a mean over all of them."""
        return _tokens if self.loss_type == "dapo" else batch_rows

    def stops(self, setting: Setting) -> list[int]:
        """Return the token after a response."""
        return self.language.stops(setting)

    def remarks(self, data: Encoded) -> tuple[str, ...]:
        """List unused keys of messages; warn if no response ends."""
        prompts = [self._asked(example, data.setting) for example in data.examples]
        chats = [prompt for prompt in prompts if isinstance(prompt, Chat)]
        unused = unused_note(chats, data.setting.tokenizer)
        return (*unused, *self.language.endless_note(data.setting))

    def padding_side(self, setting: Setting) -> str:
        """Return the right side: no token attends to padding there."""
        return "right"

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Generate a response to each prompt."""
        prompts = [self._asked(example, data.setting) for example in data.examples]
        encoded = self.language.encode(prompts, data.setting, labelled=False)
        return self.language.predict(model, encoded, batch_size)

    def compared(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the responses to the prompts with their rewards."""
        texts = [str(getattr(p, "text", "")) for p in self.predict(model, data, batch_size)]
        totals, _ = self._rewarded(texts, data.examples)
        return [Rewarded(text, reward) for text, reward in zip(texts, totals, strict=True)]

    # Metrics

    def metrics(
        self, examples: Sequence[Any], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute the mean reward; a text that is not scored counts as 0.

        Raises:
            DataError: there are no predictions.
        """
        rewards = list(_known(predictions))
        if not rewards:
            raise DataError("no texts to reward", expected="at least one prompt")
        return {"reward": math.fsum(rewards) / len(rewards)}

    def outcome(self, example: RewardedPrompt, prediction: Prediction) -> dict[str, Any]:
        """Return the prompt, its answer, the generated text and its reward."""
        outcome = text_outcome([example.text], example.label or "", prediction)
        return outcome | {"score": next(iter(_known([prediction])))}


def _known(predictions: Iterable[Prediction]) -> Iterable[float]:
    """Yield the rewards of predictions, 0 for texts that are not scored."""
    for each in predictions:
        assert isinstance(each, Rewarded)
        yield 0.0 if math.isnan(each.reward) else each.reward


def _measure(rewards: Tensor, sampled: Sequence[Completion]) -> None:
    """Record the rewards, (prompts, texts), and the lengths of texts for the report."""
    unscored = rewards.isnan().float().mean()
    deviations = deviations_of(rewards)
    measure(
        reward=rewards.nanmean().nan_to_num(nan=0.0),
        deviation=deviations.nan_to_num(nan=0.0).mean(),
        equal_groups=(deviations.nan_to_num(nan=0.0) == 0).float().mean(),
        tokens=math.fsum(len(each.tokens) for each in sampled) / len(sampled),
        truncated=math.fsum(not each.ended for each in sampled) / len(sampled),
    )
    if unscored:
        measure(unscored=unscored)


def _tokens(batch: Mapping[str, Tensor]) -> float:
    """Count the learned tokens of a batch; the first of a row is not predicted."""
    return int((batch[LABELS][:, 1:] != IGNORED).sum())


def _token_log_probabilities(
    logits: Tensor, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the log probability of each token, 0 where there is no label, and the mask.

    logits: (texts, kept, vocabulary), of the last positions; labels: (texts, tokens), each
    predicted at the token before it. Both results: (texts, kept).
    """
    import torch.nn.functional as F

    logits = logits[:, -labels.shape[1] :]
    targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:][:, -logits.shape[1] :]
    scores = logits.float().flatten(0, 1)
    scores = scores if temperature == 1 else scores / temperature
    losses = F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view(targets.shape), (targets != IGNORED).float()


def _answer_text(value: Any) -> str | None:
    """Return an answer as text; the lines of a list, such as several tests."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return "\n".join(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value)


def _as_json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {name!r} has a {type(value).__name__}") from error
