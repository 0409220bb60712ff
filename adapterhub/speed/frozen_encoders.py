"""Cache of frozen encoders: the encoded prompts and images of a pipeline.

The VAE is always frozen, and text encoders are frozen unless they contain an adapter. The same
prompts and images are used again in each epoch and each sample of an evaluation.
`adapterhub.backbones.diffusion.Kept` describes how their values stay the same in a resumed run.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from adapterhub.anatomy.backbone import PipelineParts
from adapterhub.backbones.diffusion import Kept
from adapterhub.hooks.slot import Slot
from adapterhub.loop.engine import Engine
from adapterhub.loop.speedups import Speedup, Undo

_ENCODER = "text_encoder"  # prefixes of the names of the parts that read prompts


class FrozenEncoders(Speedup):
    """The frozen encoders of a pipeline in one run.

    Args:
        parts: the parts of the pipeline, with adapters attached.
        limit: the limit of the cache, in bytes.
        off: the option that turns the cache off.
    """

    def __init__(self, parts: PipelineParts, limit: int, off: str) -> None:
        self.parts, self.limit, self.off = parts, limit, off
        self.kept = Kept(limit)

    def patch(self, engine: Engine) -> Undo | None:
        """Keep encoded values from now on; drop those kept before."""
        encoders = [part for name, part in self.parts.items() if name.startswith(_ENCODER)]
        compute = self.parts.compute
        if compute is None:
            return None
        self.kept = Kept(self.limit, prompts=not any(map(_is_changed, encoders)))
        self.parts.compute = partial(compute, kept=self.kept)
        return partial(setattr, self.parts, "compute", compute)

    def said(self) -> str:
        """Report which encodings are computed once."""
        subject = "each prompt and each image" if self.kept.prompts else "each image"
        return f"{subject}: encoded once, and kept in memory; {self.off} encodes them at each step"


def _is_changed(encoder: nn.Module) -> bool:
    """Return whether an encoder is trained or contains an adapter."""
    trains = any(parameter.requires_grad for parameter in encoder.parameters())
    return trains or any(isinstance(module, Slot) for module in encoder.modules())
