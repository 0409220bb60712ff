"""Compare the outputs of an adapter with those of its export in peft, where peft is installed.

The batch has rows without padding, with padding on the right and on the left. The outputs are those
of a stand-in with random weights, so that no weights of the backbone are read.
"""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterhub.adapters.adapter import Adapter
from adapterhub.adapters.attach import attach
from adapterhub.backbones.load import quiet_loading
from adapterhub.backbones.probe import probe_batch
from adapterhub.backbones.same import same
from adapterhub.backbones.stand_in import stand_in
from adapterhub.errors import AdapterhubError
from adapterhub.interchange.peft.exporter import to_peft
from adapterhub.interchange.peft.files import PeftFiles, write_peft
from adapterhub.methods._spec import Spec

_TOKENS, _PADDING = 11, 4
_PER_TOKEN = ("start_logits", "end_logits")


def peft_is_installed() -> bool:
    """Return whether outputs can be compared."""
    return importlib.util.find_spec("peft") is not None


def compare_method(model: PreTrainedModel, method: Spec) -> list[str]:
    """Compare the outputs of a method with random parameters on a stand-in for a model.

    The model may be without weights, and is left as it was.

    Returns:
        A line for each difference.
    """

    def build() -> Adapter:
        torch.manual_seed(0)
        adapter = attach(stand_in(model), method, name="comparison with peft")
        with torch.no_grad():
            for tensor in adapter.tensors().values():
                if tensor.requires_grad:
                    tensor.add_(torch.randn_like(tensor), alpha=0.1)
        return adapter

    return compare(build)


def compare(build: Callable[[], Adapter]) -> list[str]:
    """Compare the outputs of an adapter with those of its export.

    `build` returns the adapter, the only one on its model; the model then gets peft's modules.

    Returns:
        A line for each difference.
    """
    library = "adapterhub"
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), quiet_loading():
        warnings.simplefilter("ignore")  # what matters of them is a difference
        try:
            adapter = build()
            model, files = adapter.model, to_peft(adapter.export_source())
            expected = _outputs(model)
            adapter.detach()
            library = "peft"
            found = _outputs(model, _in_peft(model, files))
        except AdapterhubError as error:
            return ["; ".join([error.problem, *error.offenders])]
        except Exception as error:  # of any kind: the code of peft and of the model is not ours
            what = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
            return [f"outputs cannot be compared with peft's, {library} fails: {what}"]
    problems = same(expected, found, torch.float32).problems
    return [f"peft computes another {problem}" for problem in problems]


def _in_peft(model: PreTrainedModel, files: PeftFiles) -> nn.Module:
    """Load a checkpoint into a model with peft."""
    import peft

    with tempfile.TemporaryDirectory() as temporary:
        write_peft(Path(temporary) / "peft", files)
        wrapper: nn.Module = peft.PeftModel.from_pretrained(model, Path(temporary) / "peft")
        return wrapper.eval()


def _outputs(model: PreTrainedModel, wrapper: nn.Module | None = None) -> dict[str, Tensor]:
    """Return the outputs of a model, or of its wrapper, at tokens that are not padding."""
    batch = _padded_batch(model)
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        outputs = (wrapper or model)(**batch, return_dict=True)
    names = [name for name in outputs if name.endswith("logits")] or ["last_hidden_state"]
    values = {name: outputs[name] for name in names}
    return {
        # peft returns the outputs of virtual tokens too.
        name: value[:, -_TOKENS:][mask] if value.ndim == 3 or name in _PER_TOKEN else value
        for name, value in values.items()
    }


def _padded_batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return three rows: without padding, and with padding on the right and on the left."""
    batch = probe_batch(model, rows=3, tokens=_TOKENS)
    ids = batch["input_ids"].view(3, _TOKENS)
    mask = batch["attention_mask"].view(3, _TOKENS)
    ids[1, -_PADDING - 1] = ids[1, -1].clone()
    for row, padding in ((1, slice(-_PADDING, None)), (2, slice(0, _PADDING))):
        ids[row, padding] = model.config.get_text_config().pad_token_id or 0
        mask[row, padding] = 0
    if "decoder_input_ids" in batch:
        batch["decoder_attention_mask"] = batch["attention_mask"]
    return batch
