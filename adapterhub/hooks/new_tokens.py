"""New tokens: rows of the embedding that belong to an adapter; the backbone keeps its size.

    embedding(id)   = row[id] if id is new, else the backbone's
    logits[..., id] = x . row[id] if id is new, else the backbone's

    row: (d,), trained    x: (batch, tokens, d), the input of the output layer

Hooks on the embedding and the output layer insert the rows, so the backbone's tensors are neither
changed nor resized. The rows are tied if the output layer is tied to the embedding; otherwise it
has separate rows. New rows start as the mean of the old ones, which hardly changes the
probabilities of old tokens (Hewitt 2021, https://nlp.stanford.edu/~johnhew/vocab-expansion); if the
model was resized already, they start as its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.anatomy.backbone import CHILD
from adapterhub.anatomy.sites import Site
from adapterhub.backbones.compare import same
from adapterhub.backbones.processor import TokenizerSnapshot
from adapterhub.errors import AttachError
from adapterhub.files.manifest import NewToken
from adapterhub.hooks.slot import OutputSlot, Slot, drop_slot, put_slot
from adapterhub.hooks.weight_host import TokenRows, active_rows, embedding_slot
from adapterhub.methods.common.site_module import OutputModule

TOKENS = "tokens"
VOCABULARY = "config.vocab_size"  # not the name of a buffer, which never has a dot
MAX_NEW = 10_000
_FLAGS = ("special", "normalized", "single_word", "lstrip", "rstrip")


class RowSlot(OutputSlot):
    """The rows of all adapters' new tokens at an output layer.

    It also has the modules that change the input or the output of that layer.
    """

    def placed(self, key: str) -> Any:
        """Return the module with a key."""
        return Slot.placed(self, key)


def score_rows(host: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
    """Change the output of an output layer, and add the logits of new tokens: its forward hook."""
    slot = host._modules[CHILD]
    assert isinstance(slot, RowSlot)
    if any(isinstance(slot.placed(key), OutputModule) for key in slot.keys):
        y = slot(host, args[0], y)
    for module in active_rows(slot):
        y = module.score(args[0], y)
    return y


def row_slot(host: nn.Module) -> RowSlot:
    """Return the slot at an output layer; create it if missing."""
    slot = host._modules.get(CHILD)
    if not isinstance(slot, RowSlot):
        slot = RowSlot()
        put_slot(host, slot)
        slot.hook(host.register_forward_hook, score_rows)
    return slot


@dataclass(eq=False)
class NewTokenRows:
    """The new tokens of one adapter.

    `output` is None if the output layer is tied to the embedding, or missing.
    """

    model: PreTrainedModel
    tokens: tuple[NewToken, ...]
    key: str
    input: TokenRows
    output: TokenRows | None
    originals: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, nn.Parameter]:
        """Return the rows by their names in adapter files."""
        rows = {"input": self.input, "output": self.output}
        return {f"{TOKENS}.{name}": module.rows for name, module in rows.items() if module}

    def hosts(self) -> Iterator[tuple[str, TokenRows, bool]]:
        """Yield (path, rows, whether it computes logits) of each module that gets rows."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        weight = embedding.get_parameter("weight")
        for path, module in self.model.named_modules():
            if module is head:
                yield path, self.output or self.input, True
            elif isinstance(module, nn.Embedding) and module.weight is weight:
                yield path, self.input, False

    def inject(self) -> None:
        """Add the rows to their hosts as inactive."""
        for path, rows, scores in self.hosts():
            host = self.model.get_submodule(path)
            slot = row_slot(host) if scores else embedding_slot(host)
            size = rows.rows.shape[1]
            slot.add(self.key, Site(path, TOKENS, None, TOKENS, "embed", path, size, size), rows)

    def eject(self) -> None:
        """Remove the rows from their hosts."""
        for path, _, _ in list(self.hosts()):
            slot = self.model.get_submodule(path)._modules[CHILD]
            assert isinstance(slot, Slot)
            slot.remove(self.key)
            if not slot.sites:
                drop_slot(self.model, path)

    def table(self, rows: TokenRows, table: Tensor) -> Tensor:
        """Return a table, (old tokens, d), with the rows of the new tokens inserted or appended."""
        missing = max(int(rows.ids[-1]) + 1 - len(table), 0)
        wide = F.pad(table, (0, 0) * (table.dim() - 1) + (0, missing))
        new = rows.rows.detach() if table.dim() > 1 else torch.zeros(len(rows.ids))
        return wide.index_copy(0, rows.ids.to(wide.device), new.to(wide.device, wide.dtype))

    def slots(self) -> Iterator[Slot]:
        """Yield the slots that have the rows."""
        for path, _, _ in self.hosts():
            slot = self.model.get_submodule(path)._modules[CHILD]
            assert isinstance(slot, Slot)
            yield slot

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert the buffers of the model that are currently replaced by wider ones."""
        for name, value in self.originals.items():
            self.originals[name] = fn(value) if isinstance(value, Tensor) else value

    def widen(self) -> None:
        """Extend the vocabulary size used by losses, and the bias of some models."""
        size = self.model.get_input_embeddings().get_parameter("weight").shape[0]
        missing = self.tokens[-1].id + 1 - size
        if missing <= 0 or self.originals:
            return
        config = self.model.config.get_text_config()
        named = self.model.named_buffers(recurse=False)
        buffers = {name: b for name, b in named if b.shape[-1:] == (size,)}
        wide = {name: F.pad(buffer, (0, missing)) for name, buffer in buffers.items()}
        self.originals = {VOCABULARY: config.vocab_size, **buffers}
        config.vocab_size = size + missing
        self.model._buffers.update(wide)

    def narrow(self) -> None:
        """Undo `widen`."""
        if self.originals:
            self.model.config.get_text_config().vocab_size = self.originals[VOCABULARY]
            buffers = {name: b for name, b in self.originals.items() if name != VOCABULARY}
            self.model._buffers.update(buffers)
            self.originals = {}


def new_token_rows(
    model: PreTrainedModel, tokens: tuple[NewToken, ...], known: int, key: str
) -> NewTokenRows:
    """Create rows for new tokens.

    `known` is the number of rows in the backbone's checkpoint.

    Raises:
        AttachError: an embedding or output layer that is not a plain table.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    _check_table(embedding)
    table = embedding.get_parameter("weight")
    if wrong := [f"{t.content!r}: {t.id}" for t in tokens if t.id >= len(table) + MAX_NEW]:
        raise AttachError(
            f"new tokens have ids far above the {len(table)} rows of the embedding",
            offenders=wrong[:20],
            expected=f"ids below {len(table) + MAX_NEW}",
        )
    ids = torch.tensor([token.id for token in tokens], device=table.device)
    rows = TokenRows(ids, _first_rows(table, ids, known))
    output = None
    if head is not None and (scores := head.get_parameter("weight")) is not table:
        if not isinstance(head, nn.Linear):
            raise AttachError(
                f"new tokens do not support an output layer of class {type(head).__name__}"
            )
        output = TokenRows(ids.to(scores.device), _first_rows(scores, ids, known))
    return NewTokenRows(model, tokens, key, rows, output)


def _check_table(embedding: nn.Module) -> None:
    if isinstance(embedding, nn.Embedding):
        with torch.no_grad():
            row = embedding(torch.zeros(1, dtype=torch.long, device=embedding.weight.device))
            scale = getattr(embedding, "embed_scale", 1.0)
            expected = {"row": embedding.weight[0] * scale}
            if same(expected, {"row": row[0]}, embedding.weight.dtype):
                return
    raise AttachError(
        f"new tokens do not support an embedding of class {type(embedding).__name__}",
        expected="nn.Embedding, or a scaled one",
    )


def _first_rows(table: Tensor, ids: Tensor, known: int) -> Tensor:
    with torch.no_grad():
        mean = table[:known].mean(0, dtype=torch.float32)
        rows = mean.repeat(len(ids), 1)
        there = (ids < table.shape[0]) & (ids >= known)
        rows[there] = table[ids[there].to(table.device)].float()
        return rows


def tokens_of(snapshot: TokenizerSnapshot | None) -> tuple[NewToken, ...]:
    """Return the new tokens of a tokenizer in the form of the manifest."""
    tokens = snapshot.new_tokens() if snapshot else []
    return tuple(
        NewToken(token.content, i, **{flag: getattr(token, flag) for flag in _FLAGS})
        for i, token in tokens
    )


def add_new_tokens(snapshot: TokenizerSnapshot, tokens: tuple[NewToken, ...]) -> None:
    """Add the new tokens of an adapter to a tokenizer.

    Raises:
        MismatchError: the tokenizer has other tokens under their ids.
    """
    snapshot.add(
        [
            (t.id, AddedToken(t.content, **{flag: getattr(t, flag) for flag in _FLAGS}))
            for t in sorted(tokens, key=lambda t: t.id)
        ]
    )
