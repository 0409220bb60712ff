"""Write a merged diffusers pipeline, verified by images before and after loading it again."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapterhub.adapters.adapter import Adapter
from adapterhub.backbones.diffusion import load_pipeline, side_of, sized
from adapterhub.errors import MergeError
from adapterhub.files.atomic import check_place, explained, put_in_place
from adapterhub.merging.merge import merge
from adapterhub.status import quiet_loading

_TOLERANCE = 1e-3  # for an image with values from 0 to 1
_STEPS = 2


def write_pipeline(
    adapter: Adapter, pipeline: Any, folder: str | Path, tolerance: float | None = None
) -> dict[str, float]:
    """Merge an adapter into its pipeline, write the result, and return the largest differences.

    An image generated with the adapter is compared with images of the merged pipeline and of the
    reloaded files. The folder is created only if they are the same. `tolerance` is the largest
    difference of a value between 0 and 1.

    Raises:
        OutputError: the folder exists, or cannot be written.
        MergeError: the adapter is not a change of weights, or an image differs.
    """
    folder, expected = Path(folder), _picture(pipeline)
    merge(adapter.model)
    differences = {"merged": _far(_picture(pipeline), expected, tolerance)}
    with explained(folder), quiet_loading():
        check_place(folder, overwrite=False, replaceable=())
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.parent / f".adapterhub-{secrets.token_hex(8)}"
        try:
            pipeline.save_pretrained(temporary)
            differences["reloaded"] = _far(
                _picture(load_pipeline(str(temporary))), expected, tolerance
            )
            put_in_place(temporary, folder, overwrite=False)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return differences


def _picture(pipeline: Any) -> Tensor:
    """Return an image for one prompt, with the same noise each time: values from 0 to 1."""
    size = sized(pipeline, side_of(pipeline))
    with torch.no_grad():
        made = pipeline(
            ["a picture"], num_inference_steps=_STEPS, output_type="np",
            generator=[torch.Generator().manual_seed(0)], **size,
        )  # fmt: skip
    return torch.tensor(made.images)


def _far(actual: Tensor, expected: Tensor, tolerance: float | None) -> float:
    far = (actual - expected).abs().max().item()
    limit = _TOLERANCE if tolerance is None else tolerance
    if not far <= limit:
        raise MergeError(
            f"an image of the merged pipeline differs by {far:.2e}",
            expected=f"at most {limit:.2e} of values between 0 and 1",
            hint="--tolerance, or --base-dtype fp32",
        )
    return far
