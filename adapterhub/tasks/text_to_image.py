"""Text to image: images generated from prompts by a diffusion pipeline.

    example      an image file with its caption; for prediction, a prompt
    row          the file, its caption, and the seed of its noise in this epoch
    prediction   an image, and the loss of its row
    metrics      loss, the mean over rows and several draws of noise

The loss is the same as in diffusers' training examples: the mean squared error of the noise, or of
the velocity in flow matching (`adapterhub.backbones.diffusion`).
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterhub.config.options import option
from adapterhub.config.user_folders import is_file, is_folder
from adapterhub.data.columns import WANTS, ColumnChoice, choose_columns
from adapterhub.data.delimited import decode_text, file_bytes
from adapterhub.data.examples import Example, read_rows
from adapterhub.data.media import MediaFile, read_media
from adapterhub.data.media_formats import open_picture
from adapterhub.data.options import DataOptions
from adapterhub.data.tables import metadata_file
from adapterhub.errors import ConfigError, DataError
from adapterhub.status import counting
from adapterhub.tasks.common.base import Encoded, Prediction, Task, one_row_each, register_task
from adapterhub.tasks.common.batches import (
    OF_LOSS,
    Items,
    Loss,
    Passed,
    Row,
    Setting,
    batch_rows,
    each_row,
)
from adapterhub.tasks.common.media import MediaTask

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

DRAWS = 4  # draws of noise for each evaluation row: their mean varies less
_WEIGHTS = f"{OF_LOSS}weights"


@dataclass(frozen=True)
class Picture(Prediction):
    """An image generated from a prompt.

    Attributes:
        image: the image; None if only the loss was requested.
        loss: the loss of the evaluated image with the same prompt; None without one.
    """

    image: Image | None
    loss: float | None = None

    @property
    def png(self) -> bytes:
        """The image as a PNG file; b"" without one."""
        written = io.BytesIO()
        if self.image is not None:
            self.image.save(written, "PNG")
        return written.getvalue()

    def as_dict(self) -> dict[str, Any]:
        """Return the PNG file in base64, and its size."""
        coded = base64.b64encode(self.png).decode()
        size = self.image.size if self.image else (0, 0)
        return {"png": coded, "width": size[0], "height": size[1]}

    def __str__(self) -> str:
        return f"{self.image.width} x {self.image.height}" if self.image else "no image"


@register_task
@dataclass(frozen=True)
class TextToImage(MediaTask):
    """Generate images from prompts with a pipeline of diffusers.

    Rows of `train.csv`, with files relative to the folder of the table:

        image,caption
        1.png,a red square on white
        2.png,a small blue circle

    Or a folder, `--train photos`: with such a table as photos/metadata.csv, with the caption of
    photos/1.png in photos/1.txt, or with one prompt for all images,
    `--task "text-to-image(prompt='a photo of sks dog')"`.

    Images are scaled so that the shorter side fits, and center-cropped. The backbone must be
    a diffusers pipeline, `--backbone FOLDER`, with a UNet, or with a transformer of Stable
    Diffusion 3, Flux or PixArt.

    Prior preservation (DreamBooth): with `prior='a photo of a dog'`, the backbone generates
    `prior_pictures` images of that prompt before training, and each row is trained together with
    one of them.

    `predict` writes images, `adapterhub predict RUN "a red square" --output red.png`, and prints
    their file names; in Python, and with `--json`, it returns the size and the file in base64:

        512 x 512
        {"png": "iVBORw0KGgo...", "width": 512, "height": 512}
    """

    name = "text-to-image"
    summary = "images of prompts, by a pipeline of diffusers"
    lower_is_better = frozenset({"loss"})
    measures = ("loss",)
    outcomes = "images"
    columns = WANTS["captioned images"]
    input_name = "prompt"
    printed_fields = ("png", "width", "height")

    prompt: str = option("", "the prompt of all images, instead of captions")
    resolution: int = option(0, "side of the images, in pixels; 0: the backbone's size", least=0)
    flip: bool = option(False, "mirror a random half of the images in each epoch")
    empty_prompts: float = option(
        0.0, "share of rows that train without their caption, for guidance (0.1 is usual)",
        least=0, most=1,
    )  # fmt: skip
    snr_gamma: float = option(
        0.0, "limit of the signal-to-noise ratio in the loss (5 is usual); 0: no weights", least=0
    )
    prior: str = option("", "prompt of the images that prior preservation keeps; none: without")
    prior_pictures: int = option(100, "images of the prior that are made before", least=1)
    prior_weight: float = option(1.0, "weight of the prior in the loss", least=0)
    samples: int = option(2, "images that an evaluation makes for the report", least=0)
    steps: int = option(25, "steps of removing noise for an image", least=1)
    guidance: float = option(0.0, "strength of the prompt; 0: as the pipeline does", least=0)

    @classmethod
    def typed_input(cls) -> str:
        """Return the arguments to type after `adapterhub predict ADAPTER`."""
        return '"a prompt" --output picture.png'

    @property
    def main_metric(self) -> str:
        """Return "loss"."""
        return "loss"

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read images with their captions; for prediction, prompts."""
        if not labelled:
            column = options.text_column
            return read_rows(source, options, split, [column], lambda text: Example(str(text)))
        named = self._has_own(source)
        files = read_media(
            source, options, split, self.columns, self.decode, labelled=not named, parse=_caption
        )
        if not named:
            return files
        captions = [self.prompt] * len(files) if self.prompt else _beside(files)
        return [each.with_label(text) for each, text in zip(files, captions, strict=True)]

    def fitted(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> tuple[Task, ColumnChoice]:
        """Return the task, and the columns of images and captions."""
        if not labelled:
            columns = WANTS["texts"]
            return self, choose_columns(source, options, split, columns, labelled=False)
        named = labelled and not self._has_own(source)
        return self, choose_columns(source, options, split, self.columns, labelled=named)

    def _has_own(self, source: str) -> bool:
        """Return whether captions come from one prompt or from text files, not from a column."""
        folder = is_folder(source) and metadata_file(source) is None
        return bool(self.prompt) or folder

    def decode(self, data: bytes) -> Any:
        """Decode an image: RGB, upright."""
        return open_picture(data)

    def process(self, decoded: list[Any], setting: Setting) -> dict[str, Tensor]:
        """Scale and crop images: (batch, 3, side, side), in [-1, 1]."""
        import torch  # slow to import
        from PIL import ImageOps

        side = (self.side(setting), self.side(setting))
        fitted = [ImageOps.fit(each, side) for each in decoded]
        bytes_ = [torch.frombuffer(bytearray(each.tobytes()), dtype=torch.uint8) for each in fitted]
        pixels = torch.stack(bytes_).view(len(fitted), *side, 3)
        return {"pixel_values": pixels.permute(0, 3, 1, 2).float() / 127.5 - 1}

    def side(self, setting: Setting) -> int:
        """Return the side length of the images, in pixels."""
        from adapterhub.backbones.diffusion import side_of

        return self.resolution or side_of(setting.processor)

    def example(self, fields: Sequence[str], options: DataOptions) -> Any:
        """Return a prompt."""
        return Example(fields[0])

    def shown(self, example: Any) -> list[str]:
        """Return the prompt."""
        return [_prompt_of(example)]

    def read_texts(self, example: Any) -> list[str]:
        """Return no texts: an image can be generated without a prompt."""
        return []

    # Rows

    def encode(self, examples: Sequence[Any], setting: Setting, *, labelled: bool) -> Encoded:
        """Return the files and prompts, or only prompts.

        Raises:
            ConfigError: training options do not fit the pipeline.
        """
        if labelled:
            self._check(setting.processor)
        rows: list[Row] = [{"prompt": _prompt_of(each)} for each in examples]
        for row, each in zip(rows, examples if labelled else (), strict=False):
            row["file"] = each
        return one_row_each(self, examples, setting, rows)

    def _check(self, pipeline: Any) -> None:
        from adapterhub.backbones.diffusion import is_flow, least_side

        if self.snr_gamma and is_flow(pipeline):
            raise ConfigError(
                f"snr_gamma={self.snr_gamma:g}, and this pipeline learns by flow matching",
                expected="a pipeline whose scheduler has a signal-to-noise ratio",
                hint="leave snr_gamma out",
            )
        least = least_side(pipeline)
        if self.resolution % least:
            near = max(round(self.resolution / least), 1) * least
            raise ConfigError(
                f"resolution={self.resolution}, and this pipeline makes images of whole squares "
                f"of {least} pixels",
                expected=f"a multiple of {least}",
                hint=f"resolution={near}",
            )

    def remarks(self, data: Encoded) -> tuple[str, ...]:
        """Report the number of captions that the text encoders truncate."""
        from adapterhub.backbones.diffusion import cut_prompts

        prompts = [row["prompt"] for row in data.rows]
        most, cut = cut_prompts(data.setting.processor, prompts)
        count = sum(prompt in cut for prompt in prompts)
        if not count:
            return ()
        return (
            f"of {count:,} of {len(prompts):,} captions only the first {most:,} tokens are read: "
            "the backbone reads no more",
        )

    def vary(self, row: Row, setting: Setting, key: tuple[int, int, int]) -> Row:
        """Return the row with its noise seed for this epoch; the caption may be dropped."""
        digest = hashlib.sha256(repr(key).encode()).digest()
        varied = row | {"seed": int.from_bytes(digest[:7], "big")}
        left_out = int.from_bytes(digest[7:14], "big") < self.empty_prompts * 2**56
        return varied | ({"prompt": ""} if left_out else {})

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Decode the images of a batch; prior images come last."""
        import torch

        from adapterhub.backbones.diffusion import prompt_bytes

        pictures = [self._picture(row) for row in rows]
        prompts, seeds = [row["prompt"] for row in rows], [row["seed"] for row in rows]
        weights = [1.0] * len(rows)
        if "prior" in rows[0]:
            pictures += [row["prior"] for row in rows]
            prompts += [self.prior] * len(rows)
            seeds += [row["seed"] + 1 for row in rows]
            # The total is the mean over the rows plus the weighted mean over the prior.
            weights = [2.0] * len(rows) + [2 * self.prior_weight] * len(rows)
        batch = self.process(pictures, setting)
        batch |= {"prompts": prompt_bytes(prompts), "seeds": torch.tensor(seeds)}
        if self.snr_gamma:
            batch["snr_gamma"] = torch.full((len(seeds),), self.snr_gamma)
        return batch | {_WEIGHTS: torch.tensor(weights)}

    def _picture(self, row: Row) -> Any:
        from PIL import ImageOps

        picture = row["file"].decoded(self.decode)
        return ImageOps.mirror(picture) if self.flip and row["seed"] % 2 else picture

    def show_inputs(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the shape of the image and its prompt."""
        side = self.side(setting)
        prompt = row["prompt"] or "empty, for guidance"
        return {"pixel_values": f"3 x {side} x {side}", "prompt": prompt}

    @property
    def compares_with_reference(self) -> bool:
        """Return whether the backbone generates images before training."""
        return bool(self.prior)

    @property
    def evaluates_with_reference(self) -> bool:
        """Return False: the prior is not part of the metric."""
        return False

    def with_reference(self, model: Any, data: Encoded, batch_size: int) -> Encoded:
        """Return the rows, each with a prior image generated by the backbone."""
        count = min(self.prior_pictures, len(data.rows))
        made = self.pictures(data.setting, [self.prior] * count, batch_size, "the prior")
        rows = [row | {"prior": made[i % count]} for i, row in enumerate(data.rows)]
        return replace(data, rows=rows)

    def loss(self, train: Encoded) -> Loss:
        """Return the mean squared error, plus the weighted error of the prior."""
        return _mean_loss

    def loss_items(self, train: Encoded) -> Items:
        """Return a function that counts rows."""
        return batch_rows

    # Predictions

    def predict(self, model: Any, data: Encoded, batch_size: int) -> list[Prediction]:
        """Generate an image for each prompt."""
        prompts = [row["prompt"] for row in data.rows]
        return [Picture(each) for each in self.pictures(data.setting, prompts, batch_size)]

    def pictures(
        self, setting: Setting, prompts: Sequence[str], batch_size: int, subject: str = "images"
    ) -> list[Image]:
        """Generate images with the pipeline; the noise of image i is seeded by the seed and i."""
        import torch

        from adapterhub.backbones.diffusion import sized

        pipeline = setting.processor
        options: dict[str, Any] = {"num_inference_steps": self.steps}
        options |= {"guidance_scale": self.guidance} if self.guidance else {}
        options |= sized(pipeline, self.side(setting))
        made = list[Any]()
        with counting(len(prompts), f"making {subject}") as done, torch.no_grad():
            for start in range(0, len(prompts), batch_size):
                some = list(prompts[start : start + batch_size])
                numbers = [
                    torch.Generator().manual_seed(setting.seed + start + i)
                    for i in range(len(some))
                ]
                made += pipeline(some, generator=numbers, **options).images
                done(len(some))
        return made

    # Metrics

    def metrics(
        self, examples: Sequence[Any], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Return the mean loss of the examples."""
        losses = [each.loss or 0.0 for each in predictions if isinstance(each, Picture)]
        return {"loss": sum(losses) / len(losses)}

    def compared(self, model: Any, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the loss of each row, and images of the first ones."""
        # Original rows, fixed noise: runs with other options and seeds stay comparable.
        plain = replace(self, flip=False, empty_prompts=0.0)
        rows = replace(data, task=plain, setting=replace(data.setting, seed=0))
        draws = [each_row(model, _Draw(rows, i), batch_size, _losses) for i in range(DRAWS)]
        losses = [sum(each) / DRAWS for each in zip(*draws, strict=True)]
        some = min(self.samples, len(data.rows))
        prompts = [row["prompt"] for row in data.rows[:some]]
        made = [*self.pictures(data.setting, prompts, batch_size)] if some else []
        shown = made + [None] * (len(data.rows) - some)
        return [Picture(*each) for each in zip(shown, losses, strict=True)]

    def outcome(self, example: Any, prediction: Prediction) -> dict[str, Any]:
        """Return the prompt, the loss and the image as a data URL."""
        assert isinstance(prediction, Picture)
        coded = base64.b64encode(prediction.png).decode()
        shown = f"data:image/png;base64,{coded}" if coded else ""
        return {"texts": self.shown(example), "loss": prediction.loss, "picture": shown}


@dataclass(frozen=True)
class _Draw:
    """Rows with one draw of noise."""

    data: Encoded
    number: int

    @property
    def lengths(self) -> list[int]:
        return self.data.lengths

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return self.data.batch(indices, self.number)


def _losses(passed: Passed) -> list[float]:
    losses: list[float] = passed.output.losses.tolist()
    return losses


def _mean_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = (output.losses * batch[_WEIGHTS]).mean()
    return loss


def _prompt_of(example: Any) -> str:
    return str(example.label if isinstance(example, MediaFile) else example.text)


def _caption(cell: object) -> tuple[str | float | None, str]:
    """Return the caption of a cell, or a description of the problem."""
    text = cell.strip() if isinstance(cell, str) else ""
    return (text, "") if text else (None, "the caption is missing")


def _beside(files: Sequence[MediaFile]) -> list[str]:
    """Return the captions in the text files next to images.

    Raises:
        DataError: images lack captions.
    """
    paths = [Path(file.path).with_suffix(".txt") for file in files]
    texts = [
        decode_text(file_bytes(str(path)), str(path)).strip() if is_file(path) else None
        for path in paths
    ]
    lacking = [
        f"{file.name}: {path.name} is {'missing' if text is None else 'empty'}"
        for file, path, text in zip(files, paths, texts, strict=True)
        if not text
    ]
    if lacking:
        raise DataError(
            f"{len(lacking):,} of {len(files):,} images have no caption",
            offenders=lacking,
            expected="a text file next to each image, or metadata.csv, or one prompt for all",
            hint="--task \"text-to-image(prompt='a photo of sks dog')\"",
        )
    return [text for text in texts if text]
