"""Classification of audio.

    example      an audio file, with the name of its class
    row          the file, which is decoded and resampled for each batch; `labels`: the class index
    prediction   the most probable class and all probabilities
    metrics      accuracy, macro F1, Matthews

The feature extractor of the backbone normalizes the samples (Wav2Vec2, HuBERT) or computes a
spectrogram (Whisper, AST); an adapter records its settings.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapterhub.config.options import option
from adapterhub.data.columns import WANTS
from adapterhub.errors import ConfigError
from adapterhub.tasks.common.base import Encoded, register_task
from adapterhub.tasks.common.batches import Setting
from adapterhub.tasks.common.media import MediaClassification, SoundTask


@register_task
@dataclass(frozen=True)
class AudioClassification(SoundTask, MediaClassification):
    """One class per audio file.

    Rows of `train.csv`, with files relative to the folder of the table:

        audio,label
        1.wav,dog
        2.wav,rain

    Or a folder with one folder for each class, `--train sounds`: sounds/dog/1.wav,
    sounds/rain/2.flac and so on; the names of the folders are the classes. The extra
    `adapterhub[audio]` installs the library that decodes WAV, FLAC, OGG and MP3.

    Channels are averaged, and audio is resampled to the rate of the backbone. Only the beginning is
    used of audio longer than `seconds` or the backbone's limit (Whisper 30 seconds, AST about 10).
    Broken files are rejected before training.

    `predict` prints the class and its probability:

        dog 0.981
        {"label": "dog", "scores": {"dog": 0.981, "rain": 0.019}}
    """

    seconds: float = option(30.0, "longest recording; of longer ones, only the beginning is read")

    name = "audio-classification"
    summary = "one class per recording"
    columns = WANTS["audio"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"seconds is {self.seconds}", expected="a number above 0")

    def most_seconds(self, setting: Setting) -> float:
        """Return the option `seconds`, or the backbone's limit if that is less."""
        return min(self.seconds, super().most_seconds(setting))

    def remarks(self, data: Encoded) -> tuple[str, ...]:
        """Report the number of audio files that are read only in part."""
        long = self.too_long(data.examples, data.setting)
        if not long:
            return ()
        most, longest = self.most_seconds(data.setting), max(each.seconds for each in long)
        limit = "seconds of the task" if most == self.seconds else "the backbone hears no more"
        return (
            f"of {len(long):,} of {len(data.examples):,} recordings only the first {most:g} "
            f"seconds are read ({limit}); the longest has {longest:,.1f}",
        )
