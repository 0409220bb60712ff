"""One step at a time of the paged continuous batching of transformers, with all its private names.

transformers runs its scheduler, its cache and the model in its own thread, which samples for all
requests alike. Here its scheduler chooses the tokens of a step and its cache keeps their keys and
values, but the caller runs the model and chooses the next tokens. Nothing in transformers is
replaced. Only this file reads private names; `missing_names` lists those that the installed version
lacks.

The cache shares pages of equal beginnings, by a hash of the token ids. The keys and values of a
text differ between adapters, so the ids must differ too. The upper bits of the first ids, which no
vocabulary needs, hold bits of the adapter's name. The generated ids in the first page of a short
prompt hold them as well. `PagedSteps.inputs` returns the ids without them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from copy import deepcopy
from hashlib import shake_256
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

PAGE = 8  # tokens: those in the last page of a prefix are computed for each text
_ID_BITS = 31  # of an id in the cache's hash
_MODULE = "transformers.generation.continuous_batching"
_NAMES = {
    "continuous_api": ("ContinuousBatchingManager._create_batch_processor",
                       "ContinuousBatchProcessor.prepare_next_batch",
                       "ContinuousBatchProcessor.update_batch"),
    "scheduler": ("Scheduler.add_waiting_request", "Scheduler.set_request_cancellation",
                  "Scheduler.clear_cancelled_requests"),
    "cache": ("PagedAttentionCache.free_blocks",),
    "input_outputs": ("ContinuousBatchingIOs.get_model_kwargs",),
    "requests": ("RequestState", "FutureRequestState"),
}  # fmt: skip
_ATTENTION = ("sdpa",)  # also flash attention, if the model requests it


class PagedRow(NamedTuple):
    """A text in one step, which computes `tokens` of its tokens, beginning at the place `first`.

    `gives`: whether the next token is chosen after them; otherwise the prompt continues.
    """

    name: str
    tokens: int
    first: int
    gives: bool


def missing_names() -> list[str]:
    """List the names that this file reads and the installed transformers lacks."""
    return list(_missing())


def _missing() -> Iterator[str]:
    try:
        from transformers import ContinuousBatchingConfig
    except ImportError:
        yield "ContinuousBatchingConfig"
        return
    options = inspect.signature(ContinuousBatchingConfig).parameters
    yield from (
        f"ContinuousBatchingConfig({each})" for each in _config(1, 1, 1) if each not in options
    )
    for file, names in _NAMES.items():
        try:
            module = import_module(f"{_MODULE}.{file}")
        except ImportError:
            yield f"{_MODULE}.{file}"
            continue
        for name in names:
            attribute: Any = module
            for part in name.split("."):
                attribute = getattr(attribute, part, None)
            if attribute is None:
                yield f"{_MODULE}.{file}.{name}"


def _config(tokens: int, batch_tokens: int, rows: int) -> dict[str, Any]:
    """Return the options of continuous batching, without graphs: each holds one mix of adapters."""
    return {
        "page_size": PAGE,
        "num_blocks": -(-tokens // PAGE),
        "max_batch_tokens": batch_tokens,
        "max_requests_per_batch": rows,
        "max_blocks_per_request": 0,
        "allow_block_sharing": True,
        "use_cuda_graph": False,
        "use_async_batching": False,
        "default_compile_level": 0,
        "auto_switch_to_flash": False,
        "cpu_offload_space": 0.0,
    }


def paged_problem(model: PreTrainedModel) -> str:
    """Return why paged attention cannot generate a model's texts; "" if it can."""
    config: Any = model.config
    if config.is_encoder_decoder:
        return "an encoder-decoder"
    if missing := missing_names():
        return f"this transformers has no {missing[0]}"
    attention = str(config._attn_implementation)
    if attention not in _ATTENTION and "flash" not in attention:
        return f"its attention is {attention}"
    return ""


def own_processors(model: PreTrainedModel, prompt: int, limit: int) -> Any:
    """Return the logits processors that `generate` applies before sampling; may be empty.

    A generation config may contain a repetition penalty, or tokens that are never generated.
    """
    config = deepcopy(model.generation_config)
    config.update(do_sample=False, num_beams=1, max_length=prompt + limit, max_new_tokens=limit)
    generator: Any = model
    generator._prepare_special_tokens(config, True, device=model.device)
    return generator._get_logits_processor(
        generation_config=config, input_ids_seq_length=prompt, device=model.device
    )


class PagedSteps:
    """The texts of one model in paged steps.

    Args:
        model: the model, which is not changed.
        tokens: the most tokens whose keys and values the cache holds.
        batch_tokens: the most tokens of a step.
        rows: the most texts of a step.

    Raises:
        Exception: transformers cannot batch this model this way.
    """

    def __init__(self, model: PreTrainedModel, tokens: int, batch_tokens: int, rows: int) -> None:
        from transformers import ContinuousBatchingConfig

        api = import_module(f"{_MODULE}.continuous_api")
        config = ContinuousBatchingConfig(**_config(tokens, batch_tokens, rows))
        with torch.random.fork_rng():  # transformers sets the seed
            manager = api.ContinuousBatchingManager(
                model=model,
                generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
                continuous_batching_config=config,
            )
            self._steps: Any = manager._create_batch_processor()
        bits = (model.config.get_text_config().vocab_size - 1).bit_length()
        self._id_bits = bits
        self._salts: dict[str, list[int]] = {}
        self._groups: dict[str, int] = {}
        self._batch: list[Any] = []
        self._kwargs: dict[str, Any] = {}
        self.capacity = int(self._steps.cache.num_blocks) * PAGE

    # Texts

    def add(self, name: str, ids: Sequence[int], salt: str, group: int = 0) -> None:
        """Add a text under a new name.

        Args:
            name: its name.
            ids: the tokens of its prompt, with virtual ones.
            salt: texts with different salts share no pages; "" is a salt too.
            group: texts with equal numbers are next to each other in a step.
        """
        from transformers.generation.continuous_batching.requests import RequestState

        self._salts[name], self._groups[name] = self._salt(salt), group
        salted = [token | high for token, high in zip(ids, self._high(name), strict=False)]
        state = RequestState(name, [*salted, *ids[len(salted) :]], max_new_tokens=None)
        self._steps.scheduler.add_waiting_request(state)

    def _salt(self, salt: str) -> list[int]:
        """Return the upper bits of the ids of a first page."""
        if not salt:
            return [0] * PAGE
        spare = _ID_BITS - self._id_bits
        digest = shake_256(salt.encode()).digest(4 * PAGE)
        words = (digest[4 * n : 4 * n + 4] for n in range(PAGE))
        return [int.from_bytes(w, "little") % (1 << spare) << self._id_bits for w in words]

    def _high(self, name: str, first: int = 0) -> list[int]:
        return self._salts[name][first:]

    def drop(self, name: str, *, share: bool = True) -> None:
        """Remove a text; its pages become free, or stay for other texts if `share`."""
        if not share:
            self._steps.cache.free_blocks(name, no_cache=True)
        self._steps.scheduler.set_request_cancellation(name)
        self._steps.scheduler.clear_cancelled_requests()
        self._steps.scheduler.block_new_requests = False  # as after a text that ended normally
        self._salts.pop(name, None)
        self._groups.pop(name, None)

    @property
    def busy(self) -> bool:
        """Whether there are texts."""
        return bool(self._groups)

    @property
    def used_pages(self) -> int:
        """The pages of all texts, without those that are only kept for other texts."""
        tables = [each.block_table for each in self._steps.cache.cache_allocators.values()]
        return len({page for table in tables for pages in table.values() for page in pages})

    # Steps

    def schedule(self) -> list[PagedRow]:
        """Choose the tokens of a step; empty if there is nothing to compute."""
        scheduler = self._steps.scheduler
        active = scheduler.active_requests
        scheduler.active_requests = {n: active[n] for n in sorted(active, key=self._group)}
        if not self._steps.prepare_next_batch():
            return []
        batch = self._steps.inputs_and_outputs.requests_in_batch
        self._kwargs = self._steps.inputs_and_outputs.get_model_kwargs()
        return [
            PagedRow(
                each.state.request_id,
                each.query_length,
                each.state.position_offset - each.query_length,
                each.has_new_token,
            )
            for each in batch
        ]

    def _group(self, name: str) -> int:
        return self._groups.get(name, 0)

    def inputs(self) -> dict[str, Any]:
        """Return the inputs of the model for the step; `logits_indices` ends each of its rows."""
        return self._cleaned(dict(self._kwargs), self._kwargs["cu_seq_lens_q"][1:] - 1)

    def inputs_of(self, rows: Sequence[PagedRow], number: int) -> dict[str, Any]:
        """Return the inputs for one row of the step, which writes to the cache as the step does."""
        whole = self._kwargs
        begin = sum(row.tokens for row in rows[:number])
        own = slice(begin, begin + rows[number].tokens)
        ends = {kind: each.tolist() for kind, each in whole["cu_seq_lens_k"].items()}
        keys = {kind: slice(*each[number : number + 2]) for kind, each in ends.items()}
        allocators = self._steps.cache.cache_allocators
        alone = dict(whole)
        for name in ("input_ids", "position_ids"):
            alone[name] = whole[name][:, own]
        alone["write_index"] = [each[own] for each in whole["write_index"]]
        alone["read_index"] = [
            each[keys[kind]] if each.numel() else each
            for each, kind in zip(whole["read_index"], allocators, strict=True)
        ]
        alone["cu_seq_lens_q"] = whole["cu_seq_lens_q"].new_tensor([0, rows[number].tokens])
        alone["cu_seq_lens_k"] = {
            kind: each.new_tensor([0, keys[kind].stop - keys[kind].start])
            for kind, each in whole["cu_seq_lens_k"].items()
        }
        mask = whole["attention_mask"]
        if isinstance(mask, dict):
            alone["attention_mask"] = {k: each[..., own, keys[k]] for k, each in mask.items()}
        elif mask is not None:
            (only,) = keys.values()
            alone["attention_mask"] = mask[..., own, only]
        last = whole["logits_indices"].new_tensor([rows[number].tokens - 1])
        return self._cleaned(alone, last)

    def _cleaned(self, inputs: dict[str, Any], last: Tensor) -> dict[str, Any]:
        """Return inputs with plain ids; `logits_indices` are the places to read logits at."""
        ids = inputs["input_ids"] & ((1 << self._id_bits) - 1)
        inputs |= {"input_ids": ids.long(), "position_ids": inputs["position_ids"].long()}
        inputs |= {"logits_indices": last.long()}
        inputs.pop("logits_processor_args", None)
        return inputs

    def advance(self, rows: Sequence[PagedRow], chosen: Sequence[int]) -> None:
        """End a step with the tokens chosen for the rows whose `gives` is true."""
        giving = [row for row in rows if row.gives]
        salted = []
        for row, token in zip(giving, chosen, strict=True):
            high = self._high(row.name, row.first + row.tokens)
            salted.append(token | (high[0] if high else 0))
        outputs = self._steps.inputs_and_outputs.output_ids
        outputs[0, : len(salted)] = torch.tensor(salted, dtype=outputs.dtype)
        self._steps.update_batch()
