"""Speech recognition.

    example      an audio file and its transcript
    row          the file, which is decoded for each batch; `labels`: the tokens of the text
    prediction   the recognized text
    metrics      word and character error rate

An encoder with an output for each letter is trained with CTC, which sums over all alignments of the
text with the frames (Graves et al. 2006, https://dl.acm.org/doi/10.1145/1143844.1143891); the most
probable letter of each frame is the prediction. An encoder-decoder such as Whisper generates the
text token by token (Radford et al. 2022, https://arxiv.org/abs/2212.04356).
"""

from __future__ import annotations

import copy
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterhub.backbones.end_tokens import ended
from adapterhub.config.options import option
from adapterhub.data.columns import WANTS
from adapterhub.data.examples import EmptyCell, text_problem
from adapterhub.data.media import MediaFile, read_media
from adapterhub.data.options import DataOptions
from adapterhub.data.table import first_few
from adapterhub.errors import ConfigError, DataError
from adapterhub.tasks.common.base import Encoded, Generated, Prediction, one_row_each, register_task
from adapterhub.tasks.common.batches import (
    UNLIMITED,
    Items,
    Passed,
    Row,
    Setting,
    batch_rows,
    each_row,
    pad,
)
from adapterhub.tasks.common.language_models import Generation, generate, text_outcome
from adapterhub.tasks.common.media import SoundTask
from adapterhub.tasks.common.metrics import transcription_metrics, word_errors
from adapterhub.tasks.common.preview import tokens_line

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_PREFIX = 4  # first tokens of Whisper: start, language, task, no timestamps


@register_task
@dataclass(frozen=True)
class SpeechRecognition(Generation, SoundTask):
    """Speech to text.

    Rows of `train.csv`, with files relative to the folder of the table:

        audio,text
        1.wav,the glacier moves slowly
        2.wav,it is raining

    Or a folder with such a table, `metadata.csv`, `.tsv`, `.jsonl` or `.parquet`.

    The extra `adapterhub[audio]` installs the libraries that decode WAV, FLAC, OGG and MP3, and
    count errors. Channels are averaged, and audio is resampled to the rate of the backbone. Audio
    longer than `seconds` or the backbone's limit (Whisper 30 seconds) is rejected: the end of its
    transcript would have no audio.

    A CTC backbone predicts letters: texts are converted to upper or lower case if its vocabulary
    has only one case, and punctuation missing from it is removed. Error rates ignore case and
    punctuation, unless `exact=true`.

    `predict` prints the text:

        the glacier moves slowly
        {"generated": "the glacier moves slowly"}
    """

    new_tokens: int = option(128, "longest written text of an encoder-decoder, in tokens")
    seconds: float = option(30.0, "longest recording; longer ones are refused")
    language: str | None = option(
        None, "language of the texts, such as en, for backbones with several"
    )
    exact: bool = option(False, "compare case and punctuation as well")

    name = "speech-recognition"
    summary = "speech to text"
    main_metric = "wer"
    measures = ("wer", "cer")
    lower_is_better = frozenset({"wer", "cer"})
    outcomes = "texts"
    columns = WANTS["speech"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.seconds < math.inf:
            raise ConfigError(f"seconds is {self.seconds}", expected="a number above 0")

    def for_model(self, model: PreTrainedModel) -> SpeechRecognition:
        """Return the task if the language of the texts is known.

        Raises:
            ConfigError: the backbone is multilingual, and no language is named: generated texts
                would begin with other tokens than learned ones.
        """
        config = getattr(model, "generation_config", None)
        if self.language is None and getattr(config, "is_multilingual", False):
            raise ConfigError(
                f"{model.name_or_path} writes several languages",
                expected="the language of the texts",
                hint="--task 'speech-recognition(language=en)'",
            )
        return self

    # Examples

    def read(
        self, source: str, options: DataOptions, split: str, *, labelled: bool = True
    ) -> list[Any]:
        """Read the files named in a table, and their transcripts."""
        return read_media(
            source, options, split, self.columns, self.decode, labelled=labelled, parse=_transcript
        )

    def stops(self, setting: Setting) -> list[int]:
        """Return the token after a text; CTC has none, since it does not generate."""
        return [] if writes_letters(setting.tokenizer) else super().stops(setting)

    # Rows

    def encode(self, examples: Sequence[MediaFile], setting: Setting, *, labelled: bool) -> Encoded:
        """Return rows of files, which `collate` decodes, and the tokens of the texts.

        Raises:
            DataError: audio is too long, or texts cannot be encoded by the tokenizer.
            ConfigError: the backbone has no tokenizer.
        """
        self._check(examples, setting)
        rows = [self.file_row(example, setting) for example in examples]
        if labelled:
            texts, tokenizer = [str(e.label) for e in examples], setting.tokenizer
            if writes_letters(tokenizer):
                targets = letter_ids(texts, tokenizer)
            else:
                targets = target_ids(texts, tokenizer, self.language)
                _refuse_long(examples, targets, setting.positions)
            for row, ids in zip(rows, targets, strict=True):
                row["labels"] = ids
        return one_row_each(self, examples, setting, rows)

    def _check(self, examples: Sequence[MediaFile], setting: Setting) -> None:
        """Reject a backbone without a tokenizer, and audio that would be read in part."""
        if not hasattr(setting.tokenizer, "get_vocab"):
            raise ConfigError(
                "the backbone has no tokenizer: it has not learned to generate text",
                expected="a backbone for speech recognition, such as facebook/wav2vec2-base-960h "
                "or openai/whisper-small",
            )
        limit = super().most_seconds(setting)
        most = min(self.seconds, limit)
        long = [example for example in examples if example.seconds > most]
        if not long:
            return
        needed = math.ceil(max(example.seconds for example in long))
        larger = f", or --task 'speech-recognition(seconds={needed})'" if limit >= needed else ""
        reason = "the backbone hears no more" if limit <= self.seconds else "seconds of the task"
        raise DataError(
            f"{len(long):,} of {len(examples):,} recordings are longer than {most:g} seconds "
            f"({reason})",
            offenders=first_few([f"{e.name}: {e.seconds:,.1f} seconds" for e in long]),
            hint=f"split these files, with the text of each part{larger}",
        )

    def collate(self, rows: Sequence[Row], setting: Setting) -> dict[str, Tensor]:
        """Decode the files of a batch, and pad their labels."""
        batch = self.inputs(rows, setting)
        if rows and "labels" in rows[0]:
            targets = [{"labels": row["labels"]} for row in rows]
            batch |= pad(targets, setting.tokenizer, "right")
        return batch

    def show_row(self, row: Row, setting: Setting) -> dict[str, str]:
        """Return the shapes of the model inputs, and the learned tokens."""
        facts = self.show_inputs(row, setting)
        if "labels" not in row:
            return facts
        return facts | {"target": tokens_line(row["labels"], setting.tokenizer)}

    def loss_items(self, train: Encoded) -> Items:
        """Return a function that counts the texts (CTC) or tokens (encoder-decoder) of a batch."""
        letters = writes_letters(train.setting.tokenizer)
        return batch_rows if letters else super().loss_items(train)

    # Predictions

    def predict(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Prediction]:
        """Return the most probable letters, or the generated text."""
        from adapterhub.status import quiet_loading

        if not model.config.is_encoder_decoder:
            return list(self._spelled(model, data, batch_size))
        with quiet_loading():  # Whisper warns about its own options
            return list(generate(model, data, batch_size, self))

    def prompt_batch(self, rows: Sequence[Row], setting: Setting, side: str) -> dict[str, Tensor]:
        """Decode the files of rows; the decoder needs no prompt."""
        return self.inputs(rows, setting)

    def generation_options(self, model: PreTrainedModel, prompts: Encoded) -> dict[str, Any]:
        """Return the language, and the longest text that fits the decoder's positions."""
        chosen = {} if self.language is None else {"language": self.language, "task": "transcribe"}
        positions = getattr(model.config, "max_target_positions", None) or UNLIMITED
        return {"max_new_tokens": min(self.new_tokens, positions - _PREFIX), **chosen}

    def _spelled(self, model: PreTrainedModel, data: Encoded, batch_size: int) -> list[Generated]:
        """Return the CTC letters of each row's frames, without padding frames."""
        from adapterhub.backbones.processor import frame_counts

        tokenizer = data.setting.tokenizer

        def read(passed: Passed) -> Iterator[Generated]:
            best = passed.output.logits.argmax(-1).tolist()
            sizes = [data.rows[i]["frames"] for i in passed.indices]
            shares = [math.ceil(len(best[0]) * size / max(sizes)) for size in sizes]
            counts = frame_counts(model, passed.batch) or shares
            for count, letters in zip(counts, best, strict=True):
                # Blanks, which are special tokens, are kept: they separate equal letters.
                yield Generated(str(tokenizer.decode(letters[:count])).strip())

        return each_row(model, data, batch_size, read)

    # Metrics

    def metrics(
        self, examples: Sequence[MediaFile], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """Compute the error rates of words and of characters."""
        texts = [p.text for p in predictions if isinstance(p, Generated)]
        return transcription_metrics([str(e.label) for e in examples], texts, exact=self.exact)

    def outcome(self, example: MediaFile, prediction: Prediction) -> dict[str, Any]:
        """Return the reference, the recognized text, word F1, and counts of words."""
        outcome = text_outcome(self.shown(example), str(example.label), prediction)
        wrong, words = word_errors(outcome["label"], outcome["prediction"], exact=self.exact)
        return outcome | {"wrong_words": wrong, "words": words}


def _refuse_long(
    examples: Sequence[MediaFile], targets: Sequence[Sequence[int]], positions: int
) -> None:
    """Reject texts longer than the decoder's output: their end would not be learned.

    Raises:
        DataError: some texts are too long.
    """
    long = [(e, ids) for e, ids in zip(examples, targets, strict=True) if len(ids) > positions]
    if long:
        raise DataError(
            f"{len(long):,} of {len(examples):,} texts are longer than the backbone writes",
            offenders=first_few([f"{e.name}: a text of {len(ids):,} tokens" for e, ids in long]),
            expected=f"at most {positions:,} tokens, with those that begin and end a text",
            hint="split these files, with the text of each part",
        )


def _transcript(cell: object) -> tuple[str | float | None, str]:
    """Return the text of a cell, or None and a description of the problem."""
    if cell is None or cell != cell:  # NaN marks a missing text
        return None, EmptyCell("the text is missing")
    if problem := text_problem(cell, "text", allow_empty=False):
        return None, problem
    return str(cell), ""


def writes_letters(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer has a token for each letter, as CTC tokenizers do."""
    return hasattr(tokenizer, "word_delimiter_token")


def letter_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the ids of the letters of each text.

    Texts are converted to the case of the vocabulary if it has only one, and punctuation missing
    from it is removed.

    Raises:
        DataError: texts have other characters missing from the vocabulary.
    """
    vocabulary = tokenizer.get_vocab()
    letters = {token for token in vocabulary if len(token) == 1 and token.isalpha()}
    cased: Callable[[str], str] = str
    if letters and all(letter == letter.upper() for letter in letters):
        cased = str.upper
    elif letters and all(letter == letter.lower() for letter in letters):
        cased = str.lower
    missing: Counter[str] = Counter()
    spelled = []
    for text in texts:
        kept, lacking = [], set()
        for character in " ".join(cased(text).split()):
            if character in vocabulary or character == " ":
                kept.append(character)
            elif unicodedata.category(character)[0] not in "PS":
                lacking.add(character)
        missing.update(lacking)
        spelled.append(" ".join("".join(kept).split()))
    if missing:
        raise DataError(
            "texts have characters that the tokenizer of the backbone lacks",
            offenders=first_few([f"{c!r}: in {n:,} texts" for c, n in missing.most_common()]),
            expected=f"its letters: {' '.join(sorted(letters))}",
            hint="spell the texts with these letters, such as numbers as words, or another "
            "backbone",
        )
    return [list(ids) for ids in tokenizer(spelled)["input_ids"]]


def target_ids(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, language: str | None
) -> list[list[int]]:
    """Return the decoder's target tokens for each text, up to the end-of-sequence token.

    The start token, such as the first of Whisper's prefix, is removed: the decoder starts with it.

    With multilingual tokenizers, texts begin with a language.

    Raises:
        ConfigError: the tokenizer does not have the language.
    """
    if language is not None:
        tokenizer = _in_language(tokenizer, language)
    rows = []
    for ids in tokenizer(list(texts))["input_ids"]:
        row = list(ids)
        if row and row[0] != tokenizer.eos_token_id and _is_special(tokenizer, row[0]):
            del row[0]
        rows.append(ended(row, tokenizer))
    return rows


def _in_language(tokenizer: PreTrainedTokenizerBase, language: str) -> PreTrainedTokenizerBase:
    """Return a copy of a tokenizer whose texts begin with a language."""
    own = copy.deepcopy(tokenizer)
    try:
        own.set_prefix_tokens(language=language, task="transcribe")
    except AttributeError:
        raise ConfigError(
            f"language={language}: the tokenizer of the backbone has no languages to choose from",
            hint="leave out language",
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"language={language} is none of the backbone's: {str(error).splitlines()[0]}",
            expected="the code of a language, such as en",
        ) from None
    return own


def _is_special(tokenizer: PreTrainedTokenizerBase, index: int) -> bool:
    added = tokenizer.added_tokens_decoder.get(index)
    return index in tokenizer.all_special_ids or bool(added is not None and added.special)
