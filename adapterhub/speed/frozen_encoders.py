"""What is frozen is computed once: the prompts and pictures of a pipeline, encoded.

The VAE is always frozen, and text encoders are unless an adapter is in them. The same prompts and
pictures come again in each epoch and in each draw of an evaluation. How their values stay the same
in a resumed run: `adapterhub.backbones.denoising.Kept`.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from adapterhub.anatomy.backbone import PipelineParts
from adapterhub.backbones.denoising import Kept
from adapterhub.hooks.slot import Slot
from adapterhub.loop.engine import Engine
from adapterhub.loop.speedups import Speedup, Undo

_ENCODER = "text_encoder"  # begins the names of the parts that read prompts


class FrozenEncoders(Speedup):
    """The encoders of a pipeline that are frozen, of one run.

    Args:
        parts: of the pipeline, with adapters attached.
        limit: the most that is kept, in bytes.
        off: the option that keeps nothing.
    """

    def __init__(self, parts: PipelineParts, limit: int, off: str) -> None:
        self.parts, self.limit, self.off = parts, limit, off
        self.kept = Kept(limit)

    def patch(self, engine: Engine) -> Undo | None:
        """Keep what is encoded from now on; nothing is left of what was kept before."""
        encoders = [part for name, part in self.parts.items() if name.startswith(_ENCODER)]
        compute = self.parts.compute
        if compute is None:
            return None
        self.kept = Kept(self.limit, prompts=not any(map(_is_changed, encoders)))
        self.parts.compute = partial(compute, kept=self.kept)
        return partial(setattr, self.parts, "compute", compute)

    def said(self) -> str:
        """Return what is encoded once."""
        what = "each prompt and each picture" if self.kept.prompts else "each picture"
        return f"{what}: encoded once, and kept in memory; {self.off} encodes them at each step"


def _is_changed(encoder: nn.Module) -> bool:
    """Return whether an encoder trains, or an adapter is in it."""
    trains = any(parameter.requires_grad for parameter in encoder.parameters())
    return trains or any(isinstance(module, Slot) for module in encoder.modules())
