"""What tasks on sounds share: files that are decoded, resampled, and cut to what is heard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapterhub.data.media import MediaFile
from adapterhub.data.sounds import Sound, open_sound
from adapterhub.tasks._media import MediaTask
from adapterhub.tasks._rows import Row, Setting

if TYPE_CHECKING:
    from torch import Tensor

FRAMES = 50  # a second: the outputs of most encoders of sound, and the size of rows in batches


@dataclass(frozen=True)
class SoundTask(MediaTask):
    """A task on sounds."""

    input_name = "audio"

    def decode(self, data: bytes) -> Sound:
        """Decode a sound: one channel, at its own rate."""
        return open_sound(data)

    def most_seconds(self, setting: Setting) -> float:
        """Return the longest sound of which the model hears all: what its processor reads."""
        from adapterhub.backbones.processor import heard_seconds  # imports transformers

        return heard_seconds(setting.processor) or float("inf")

    def process(self, decoded: list[Sound], setting: Setting) -> dict[str, Tensor]:
        """Resample sounds to the rate of the backbone, and extract its features.

        Raw samples, (batch, samples), or a spectrogram, (batch, bands, frames) or the reverse.
        """
        from adapterhub.backbones.processor import sampling_rate, sound_inputs

        rate, most = sampling_rate(setting.processor), self.most_seconds(setting)
        return sound_inputs(setting.processor, [_beginning(s, most).at(rate) for s in decoded])

    def file_row(self, example: MediaFile, setting: Setting) -> Row:
        """Return the row of a sound, without what is learned of it."""
        heard = min(example.seconds, self.most_seconds(setting))
        return {"file": example, "frames": max(round(heard * FRAMES), 1)}

    def size(self, row: Row) -> int:
        """Return about how many states the encoder computes."""
        return int(row["frames"])

    def too_long(self, examples: Sequence[MediaFile], setting: Setting) -> list[MediaFile]:
        """List the sounds of which the model does not hear the end."""
        most = self.most_seconds(setting)
        return [example for example in examples if example.seconds > most]


def _beginning(sound: Sound, seconds: float) -> Sound:
    """Return the first seconds of a sound."""
    if sound.seconds <= seconds:
        return sound
    return Sound(sound.samples[: round(seconds * sound.rate)], sound.rate)
