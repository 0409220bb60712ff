"""The paged continuous batching of transformers, one step at a time: all that is private there.

transformers runs its scheduler, its cache and the model in a thread of its own, which samples for
all requests alike. Here its scheduler chooses the tokens of a step and its cache keeps their keys
and values, but the caller runs the model, and chooses the next tokens. Nothing of transformers is
replaced. Names that are private there are read in this file alone; `missing_names` lists those that
an installed version lacks.

The cache shares pages of equal beginnings, by a hash of the token ids. The keys and values of one
text are others with each adapter, so ids must differ too: the upper bits of the first ids, which no
vocabulary needs, are bits of the adapter's name. Generated ids of a short prompt's first page have
them as well. `PagedSteps.inputs` returns the ids without them.
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

PAGE = 8  # tokens: of a prefix, those of its last page are computed for each text
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
_ATTENTION = ("sdpa",)  # besides flash attention, which a model must ask for


class PagedRow(NamedTuple):
    """A text in one step: `tokens` of it from the place `first` on are computed.

    `gives`: whether the token behind them is to be chosen; else the prompt goes on.
    """

    name: str
    tokens: int
    first: int
    gives: bool


def missing_names() -> list[str]:
    """List what the installed transformers lacks of the names that this file reads."""
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
            found: Any = module
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is None:
                yield f"{_MODULE}.{file}.{name}"


def _config(tokens: int, batch_tokens: int, rows: int) -> dict[str, Any]:
    """Return the options of continuous batching: no graphs, which are of one mix of adapters."""
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
    """Return why the texts of a model cannot be written by its paged attention; "" if they can."""
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
    """Return what `generate` does with the logits of a model besides sampling; empty: nothing.

    A generation config may have a penalty for repetitions, or tokens that are never written.
    """
    config = deepcopy(model.generation_config)
    config.update(do_sample=False, num_beams=1, max_length=prompt + limit, max_new_tokens=limit)
    generator: Any = model
    generator._prepare_special_tokens(config, True, device=model.device)
    return generator._get_logits_processor(
        generation_config=config, input_ids_seq_length=prompt, device=model.device
    )


class PagedSteps:
    """The texts of one model.

    Args:
        model: the model, which is not changed.
        tokens: the most tokens that the cache has keys and values of.
        batch_tokens: the most tokens of a step.
        rows: the most texts of a step.

    Raises:
        Exception: transformers cannot batch this model so.
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

    # What is written

    def add(self, name: str, ids: Sequence[int], salt: str, group: int = 0) -> None:
        """Add a text under a new name.

        Args:
            name: its name.
            ids: the tokens of its prompt, with virtual ones.
            salt: texts with different ones share no pages; "" is a salt too.
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
        """Remove a text; its pages are free, or stay for others if `share`."""
        if not share:
            self._steps.cache.free_blocks(name, no_cache=True)
        self._steps.scheduler.set_request_cancellation(name)
        self._steps.scheduler.clear_cancelled_requests()
        self._steps.scheduler.block_new_requests = False  # as after a text that has ended itself
        self._salts.pop(name, None)
        self._groups.pop(name, None)

    @property
    def busy(self) -> bool:
        """Whether there are texts."""
        return bool(self._groups)

    @property
    def used_pages(self) -> int:
        """The pages of all texts; those that are kept for others do not count."""
        tables = [each.block_table for each in self._steps.cache.cache_allocators.values()]
        return len({page for table in tables for pages in table.values() for page in pages})

    # A step

    def schedule(self) -> list[PagedRow]:
        """Choose the tokens of a step; none: there is nothing to compute."""
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
        """Return the inputs for one row of the step alone, which writes to the cache as in it."""
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
        """Return inputs with plain ids; `logits_indices` are the places whose logits are read."""
        ids = inputs["input_ids"] & ((1 << self._id_bits) - 1)
        inputs |= {"input_ids": ids.long(), "position_ids": inputs["position_ids"].long()}
        inputs |= {"logits_indices": last.long()}
        inputs.pop("logits_processor_args", None)
        return inputs

    def advance(self, rows: Sequence[PagedRow], chosen: Sequence[int]) -> None:
        """End a step with the tokens that were chosen for the rows that give one."""
        giving = [row for row in rows if row.gives]
        salted = []
        for row, token in zip(giving, chosen, strict=True):
            high = self._high(row.name, row.first + row.tokens)
            salted.append(token | (high[0] if high else 0))
        outputs = self._steps.inputs_and_outputs.output_ids
        outputs[0, : len(salted)] = torch.tensor(salted, dtype=outputs.dtype)
        self._steps.update_batch()
