"""Code shared by tasks on image and audio files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterhub.data.media import MediaFile, open_media, read_media
from adapterhub.data.media_formats import Sound, open_sound
from adapterhub.data.options import DataOptions, name_labels
from adapterhub.tasks.classification import HasClasses
from adapterhub.tasks.common.base import Encoded, Task, one_row_each
from adapterhub.tasks.common.batches import Row, Setting

if TYPE_CHECKING:
    from torch import Tensor

FRAMES = 50  # per second: the output rate of most audio encoders, and the size of rows in batches


@dataclass(frozen=True)
class MediaTask(Task):
    """A task on files: each row names one, which is decoded for each batch."""

    decodes = True

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """Decode the bytes of a file.

        Raises:
            ValueError: the file is broken or of another kind.
        """

    @abstractmethod
    def process(self, decoded: list[Any], setting: Setting) -> dict[str, Tensor]:
        """Return the model inputs for some decoded files."""

    def example(self, fields: Sequence[str], options: DataOptions) -> MediaFile:
        """Open the file of a path."""
        return open_media(fields[0], self.decode)

    def shown(self, example: MediaFile) -> list[str]:
        """Return the name of the file."""
        return [example.name]

    def file_row(self, example: MediaFile, setting: Setting) -> Row:
        """Return the row of a file, without its targets."""
        return {"file": example}

    def size(self, row: Row) -> int:
        """Return 1: all files have the same size."""
        return 1

    def limits(self, setting: Setting) -> list[tuple[str, str, int]]:
        """Return no limits: files are not truncated to a number of tokens."""
        return []

    def inputs(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Decode the files of some rows, and make model inputs of them."""
        return self.process([row["file"].decoded(self.decode) for row in rows], setting)

    def show_inputs(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the shapes of the model inputs of a row."""
        inputs = self.inputs([row], setting)
        return {name: " x ".join(map(str, t.shape[1:])) for name, t in inputs.items()}


@dataclass(frozen=True)
class MediaClassification(HasClasses, MediaTask):
    """One class per file; subclasses decode the files and build batches."""

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read the files of a folder of classes, or the files named in a table."""
        files = read_media(source, options, split, self.columns, self.decode, labelled=labelled)
        if not labelled:
            return files
        names = name_labels((str(f.label) for f in files), options, source)
        return [f.with_label(name) for f, name in zip(files, names, strict=True)]

    # Rows

    def encode(self, examples: Sequence[MediaFile], setting: Setting, *, labelled: bool) -> Encoded:
        """Return rows of files, which `collate` decodes, and the index of each one's class."""
        rows = [self.file_row(example, setting) for example in examples]
        if labelled:
            for row, example in zip(rows, examples, strict=True):
                row["labels"] = setting.labels.index(str(example.label))
        return one_row_each(self, examples, setting, rows)

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Decode the files of a batch, and make model inputs of them."""
        import torch  # slow to import

        batch = self.inputs(rows, setting)
        if rows and "labels" in rows[0]:
            batch["labels"] = torch.tensor([row["labels"] for row in rows])
        return batch


@dataclass(frozen=True)
class SoundTask(MediaTask):
    """A task on audio."""

    input_name = "audio"

    def decode(self, data: bytes) -> Sound:
        """Decode audio: one channel, at its original sampling rate."""
        return open_sound(data)

    def most_seconds(self, setting: Setting) -> float:
        """Return the longest audio that the model reads whole, as limited by its processor."""
        from adapterhub.backbones.processor import heard_seconds  # imports transformers

        return heard_seconds(setting.processor) or float("inf")

    def process(self, decoded: list[Sound], setting: Setting) -> dict[str, Tensor]:
        """Resample audio to the rate of the backbone, and extract its features.

        Raw samples, (batch, samples), or a spectrogram, (batch, bands, frames) or the reverse.
        """
        from adapterhub.backbones.processor import sampling_rate, sound_inputs

        rate, most = sampling_rate(setting.processor), self.most_seconds(setting)
        return sound_inputs(setting.processor, [_beginning(s, most).at(rate) for s in decoded])

    def file_row(self, example: MediaFile, setting: Setting) -> Row:
        """Return the row of an audio file, without its targets."""
        seconds = min(example.seconds, self.most_seconds(setting))
        return {"file": example, "frames": max(round(seconds * FRAMES), 1)}

    def size(self, row: Row) -> int:
        """Return the approximate number of states that the encoder computes."""
        return int(row["frames"])

    def too_long(self, examples: Sequence[MediaFile], setting: Setting) -> list[MediaFile]:
        """List the audio files whose end the model does not read."""
        most = self.most_seconds(setting)
        return [example for example in examples if example.seconds > most]


def _beginning(sound: Sound, seconds: float) -> Sound:
    """Return the first seconds of audio."""
    if sound.seconds <= seconds:
        return sound
    return Sound(sound.samples[: round(seconds * sound.rate)], sound.rate)
