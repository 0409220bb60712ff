"""Classification of images.

    example      an image file, with the name of its class
    row          the file, which is decoded and scaled for each batch; `labels`: the class index
    prediction   the most probable class and all probabilities
    metrics      accuracy, macro F1, Matthews

The image processor of the backbone scales and normalizes pixels; an adapter records its settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterhub.data.columns import WANTS
from adapterhub.data.media_formats import open_picture
from adapterhub.tasks.common.base import register_task
from adapterhub.tasks.common.batches import Setting
from adapterhub.tasks.common.media import MediaClassification

if TYPE_CHECKING:
    from torch import Tensor


@register_task
@dataclass(frozen=True)
class ImageClassification(MediaClassification):
    """One class per image.

    Rows of `train.csv`, with files relative to the folder of the table:

        image,label
        1.png,cat
        2.png,dog

    Or a folder with one folder for each class, `--train photos`: photos/cat/1.png, photos/dog/2.png
    and so on; the names of the folders are the classes.

    Images are turned upright by their EXIF orientation and converted to RGB; transparency becomes
    white, and only the first frame of an animation is used. Broken files are rejected before
    training.

    `predict` prints the class and its probability:

        cat 0.981
        {"label": "cat", "scores": {"cat": 0.981, "dog": 0.019}}
    """

    name = "image-classification"
    summary = "one class per image"
    columns = WANTS["images"]
    input_name = "image"

    def decode(self, data: bytes) -> Any:
        """Decode an image: RGB, upright."""
        return open_picture(data)

    def process(self, decoded: list[Any], setting: Setting) -> dict[str, Tensor]:
        """Scale and normalize images: (batch, channels, height, width)."""
        return dict(setting.processor(images=decoded, return_tensors="pt"))
