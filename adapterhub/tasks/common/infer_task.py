"""Infer the task from the form of a table if a recipe names none.

The rules are tried in order, the most specific columns first. A table that fits no rule is read as
classification, whose error message suggests what to type.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from adapterhub.data import column_names as names
from adapterhub.data.chat_formats import CHAT_COLUMNS, recognize_format
from adapterhub.data.columns import ColumnProfile, choice_families, profile_of, switches
from adapterhub.data.media_formats import PICTURE_SUFFIXES, SOUND_SUFFIXES
from adapterhub.data.options import DataOptions, separator_of
from adapterhub.data.table import Table, first_few, plain_name
from adapterhub.errors import DataError

DEFAULT = "classification"
USUAL_METHOD = "lora"
# All linear layers of attention and feed-forward, as in "LoRA Without Regret" (Schulman et al.
# 2025, https://thinkingmachines.ai/blog/lora); docs/results.md has both on SmolLM2, where LoRA's
# own learning rate is the best of those tried.
OF_LANGUAGE_MODELS = "lora(sites=[all-linear], rank=16, alpha=32)"


def usual_method(head: str) -> str:
    """Return the method of a recipe without one, for the kind of model that its task needs."""
    return OF_LANGUAGE_MODELS if head == "causal-lm" else USUAL_METHOD


Profiles = Mapping[str, ColumnProfile]
"""The content of each column, by its name in lower case without punctuation."""


def task_by_data(table: Table, options: DataOptions) -> tuple[str, str]:
    """Return the name of a task and the evidence in the data; "" for the default.

    If the user names columns, only these are inspected: another one may have a usual name.
    """
    named = {options.text, options.pair, options.label} - {None}
    columns = [c for c in dict.fromkeys(table.columns) if not named or c in named]
    profiles = {plain_name(column): profile_of(table, column) for column in columns}
    first = next(_tasks(table, profiles, options), (DEFAULT, ""))
    # Label names imply a task with labels.
    return first if options.labels is None or first[0] in _LABELLED else (DEFAULT, "")


_LABELLED = ("multi-label", "tagging", "image-classification", "audio-classification")


def _tasks(table: Table, profiles: Profiles, options: DataOptions) -> Iterator[tuple[str, str]]:
    """Yield each task whose rule fits, with its reason."""
    _refuse_known(table, profiles)
    better, worse = _named(profiles, names.PREFERRED), _named(profiles, names.REJECTED)
    if better and worse:
        yield "preference", f"{better.name!r} beside {worse.name!r}"
    pictures = [p for p in profiles.values() if p.is_files and _ends(p) <= {*PICTURE_SUFFIXES}]
    talked = [name for name in CHAT_COLUMNS if name in profiles and profiles[name].is_list]
    if pictures and talked:
        yield "image-text-to-text", f"images in {pictures[0].name!r} beside chats"
    chats = recognize_format(table) if options.text is None and options.label is None else None
    if chats is not None:
        yield "causal-lm", chats.name
    if "paragraphs" in profiles and all(
        "qas" in p for v in profiles["paragraphs"].values for p in v
    ):
        yield "question-answering", "paragraphs with questions and answers"
    answers = _named(profiles, names.ANSWERS)
    if answers and answers.is_answers and _named(profiles, names.CONTEXTS):
        yield "question-answering", f"answers with their places in {answers.name!r}"
    tokens, tags = _named(profiles, names.TOKENS), _named(profiles, names.TAGS)
    if tokens and tags and tokens is not tags and tokens.is_words and tags.is_list:
        yield "tagging", f"a list of words in {tokens.name!r} and of tags in {tags.name!r}"
    choices = _named(profiles, names.CHOICES)
    chosen = _named(profiles, names.CHOSEN)
    if choices and choices.is_choices and chosen:
        yield "multiple-choice", f"lists of choices in {choices.name!r}"
    beside = [f for f in choice_families(p.name for p in profiles.values()) if _are_choices(f)]
    if len(beside) == 1 and chosen and chosen.name not in beside[0][_right_first(beside[0]) :]:
        yield "multiple-choice", f"choices in {', '.join(beside[0])}"
    if _named(profiles, (("positive", "pos"),)) and _named(profiles, names.ANCHORS):
        yield "embedding", "texts next to related texts"
    yield from _files(profiles)
    _refuse_answers(table, profiles)
    usual = plain_name(options.label or "label")
    if options.text is None and options.label is None:
        _refuse_questions(table, profiles)
    several = [] if usual in profiles else switches(profiles.values())
    if len(several) > 1:  # `toxic` is one of them, not the label
        profiles = {name: p for name, p in profiles.items() if p.name not in several}
    label = _named(profiles, ((usual,), ("tags", "topics"), *names.CLASSES))
    if len(several) > 1 and (label is None or not (label.is_labels or label.could_be_class)):
        yield "multi-label", f"columns of 1 and 0: {', '.join(several)}"
    joined = [p for p in profiles.values() if p.is_joined]
    label = label or (joined[0] if len(joined) == 1 else None)
    if label and label.is_labels:
        yield "multi-label", f"lists of labels in {label.name!r}"
    if label and (mark := separator_of(label.texts)):
        yield "multi-label", f"labels joined by {mark!r} in {label.name!r}"


def _files(profiles: Profiles) -> Iterator[tuple[str, str]]:
    for profile in (p for p in profiles.values() if p.is_files):
        ends = _ends(profile)
        answers = _named(profiles, (("answer",),)) if "question" in profiles else None
        if ends <= {*PICTURE_SUFFIXES} and answers and answers.texts:
            yield "image-text-to-text", f"images in {profile.name!r} with questions and answers"
        if ends <= {*PICTURE_SUFFIXES}:
            yield "image-classification", f"images in {profile.name!r}"
        if ends <= {*SOUND_SUFFIXES}:
            spoken = _named(profiles, names.TRANSCRIPTS)
            words = spoken is not None and spoken.is_text
            task = "speech-recognition" if words else "audio-classification"
            yield task, f"audio files in {profile.name!r}"


def _ends(profile: ColumnProfile) -> set[str]:
    """Return the extensions of file names."""
    paths = (v["path"] if isinstance(v, dict) else v for v in profile.values)
    return {Path(str(path)).suffix.lower() for path in paths}


def _are_choices(columns: tuple[str, ...]) -> bool:
    """Return whether column names look like choices; A and B alone, or answer1, do not."""
    return len(columns) > 3 or all(len(plain_name(column)) > 1 for column in columns)


def _right_first(columns: tuple[str, ...]) -> bool:
    """Return whether the first choice column has the right choice, and is the label."""
    return plain_name(columns[-1])[:-1] in names.WRONG_COLUMNS


# Public data sets in forms that no task reads: their names, and a form to use instead.
_COMPARE = "--task preference, with the columns prompt, chosen and rejected"
_KNOWN: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("history", "humanrefa", "humanrefb", "labels"), "SHP: labels say which of two answers is "
     "better", f"{_COMPARE}: human_ref_A is the chosen one where labels is 1"),
    (("info", "summaries", "choice"), "comparisons of summaries: choice marks the better one",
     f"{_COMPARE}: summaries[choice] is the chosen one"),
    (("conversationa", "conversationb", "winner"), "battles of models: winner marks the better one",
     f"{_COMPARE}, of the rows that are not ties"),
    (("instruction", "completions"), "UltraFeedback: several completions with scores",
     f"{_COMPARE}: the completion of the highest score, and another one"),
    (("messageid", "parentid", "text", "role"), "the messages of trees of chats (OASST)",
     "join each path of a tree to a list: messages, each with role and content"),
    (("query", "passages", "answers"), "MS MARCO: passages, some of which are selected",
     "--task embedding with the columns query, positive and negative; or --task reranking"),
    (("queryid", "corpusid", "score"), "judgments of relevance (qrels) without texts",
     "join them with the queries and the corpus: query, positive"),
    (("translation",), "translations as objects of languages",
     "--task seq2seq --text translation.en --label translation.de, with your languages"),
    (("question", "entitypages", "searchresults"), "TriviaQA: evidence in other files",
     "--task causal-lm --text question --label answer.value"),
    (("story", "questions", "answers"), "CoQA: several questions about a story in a row",
     "one row for each question: question, context, answers"),
    (("passage", "question", "answersspans"), "DROP: answers without their places",
     "--task unified-qa with the columns question, context and answer"),
    (("passage", "query", "entities", "answers"), "ReCoRD: entities that fill a place",
     "--task multiple-choice with the columns text, choices and label"),
    (("question", "mc1targets"), "TruthfulQA: choices with several marks",
     "--task multiple-choice with the columns question, choices and label"),
    (("dialog", "act", "emotion"), "DailyDialog: a label for each turn",
     "one row for each turn: text, label"),
    (("inputspretokenized", "targetspretokenized"), "P3: texts next to their tokens",
     "--task seq2seq --text inputs_pretokenized --label targets_pretokenized"),
    (("document", "question", "answers"), "NarrativeQA: stories elsewhere, and several answers",
     "one row for each answer: question, context (document.summary.text) and answer, for --task "
     "unified-qa"),
    (("question", "possibleanswers"), "PopQA: answers as JSON",
     "--task causal-lm --text question --label obj"),
    (("qid", "title", "selftext", "answers"), "ELI5: several answers with scores",
     "one row for each answer: question, answer, for --task causal-lm"),
    (("ambiguousquestion", "qapairs"), "ASQA: several questions and answers in a row",
     "one row for each answer: question, answer, for --task causal-lm"),
    (("inputs", "targets", "multiplechoicetargets"), "BIG-bench: choices with scores",
     "--task multiple-choice with the columns text, choices and label"),
    (("text", "entities"), "texts with the places of entities",
     "split the texts into words with a tag each: tokens, tags"),
)  # fmt: skip


_OBJECTS = (
    "translation",
    "entities",
    "completions",
    "passages",
    "document",
)  # columns that are no texts


def _refuse_known(table: Table, profiles: Profiles) -> None:
    """Reject the data sets that would be misread.

    Raises:
        DataError: the data is such a data set.
    """
    for columns, problem, instead in _KNOWN:
        objects = [profiles[name] for name in columns if name in _OBJECTS and name in profiles]
        if {*columns} <= profiles.keys() and not any(profile.texts for profile in objects):
            raise DataError(
                f"{table.source} has {problem}",
                offenders=first_few(table.samples()),
                expected="data that one task reads; no task is guessed for these",
                hint=instead,
            )
    several = next((n for n in ("questions", "qas", "qapairs") if n in profiles), None)
    nested = several and profiles[several].values and not profiles[several].texts
    if several and nested and "isduplicate" not in profiles:
        raise DataError(
            f"{table.source} has several questions in a row, in {profiles[several].name!r}",
            offenders=first_few(table.samples()),
            expected="data that one task reads; no task is guessed for these",
            hint="one row for each question: question, context and answer, for --task "
            "unified-qa; or question, choices and label, for --task multiple-choice",
        )


def _refuse_answers(table: Table, profiles: Profiles) -> None:
    """Reject answers to questions: they are texts, not classes.

    Raises:
        DataError: answers lack positions in their contexts, or a question has a list of answers.
    """
    question, about = _named(profiles, names.QUESTIONS[:1]), _named(profiles, names.CONTEXTS)
    answers = _named(profiles, names.ANSWERS[:1]) or _named(profiles, (("answer",),))
    if question is None or answers is None:
        return
    listed = [*map(_listed, answers.values)]
    if about is not None and all(isinstance(context, str) for context in about.values):
        contexts = zip(*(table.spread(p.name, 200) for p in (about, answers)), strict=False)
        contained = [
            any(text.strip() and text.strip() in str(context) for text in _listed(cell))
            for context, cell in contexts
        ]
        if sum(contained) > 0.5 * len(contained):
            raise DataError(
                f"{table.source} has answers without their places in {about.name!r}",
                offenders=first_few(table.samples()),
                expected='answers as in SQuAD, {"text": ["Ada"], "answer_start": [0]}, for --task '
                "question-answering",
                hint=f"--task unified-qa --text {question.name} --pair {about.name} --label "
                f"{answers.name} writes answers; --task classification if they are classes",
            )
    if all(isinstance(value, list) for value in answers.values) and all(listed):
        raise DataError(
            f"{table.source} has lists of answers in {answers.name!r}, which are not labels",
            offenders=first_few(table.samples()),
            expected="one answer for each question, as a text",
            hint=f"--task seq2seq or causal-lm --text {question.name} --label COLUMN; --task "
            "multi-label if they are labels",
        )


_NO_PARTS = ("id", "url", "idx", "title")  # name endings of columns with metadata of a row


def _refuse_questions(table: Table, profiles: Profiles) -> None:
    """Reject questions with parts that text classification would ignore.

    Raises:
        DataError: there are answers, choices or contexts next to a question, in an unknown form.
    """
    question = _named(profiles, (("question",), ("problem", "qtext", "questiontext")))
    if question is None or not question.is_string:
        return
    label = _named(profiles, (("label",), *names.CLASSES))
    pairs = [profiles[two] for one, two in names.PAIRS if one == "question" and two in profiles]
    pairs = [profile for profile in pairs if profile.is_string]
    answer = profiles.get("answer")
    is_class = answer is not None and answer.could_be_class and not answer.is_text
    read = [question, label, *pairs[:1], *[answer] * (label is None and is_class)]
    usual = (*names.ANSWER_PARTS, *names.QUESTION_PARTS)
    free = {n: p for n, p in profiles.items() if p not in read and p.values and "." not in p.name}
    free = {name: profile for name, profile in free.items() if not name.endswith(_NO_PARTS)}
    parts = [profile for name, profile in free.items() if any(part in name for part in usual)]
    if not parts or (len(parts) == 1 and label is None and parts[0].is_string):
        return
    listed = ", ".join(repr(profile.name) for profile in parts)
    raise DataError(
        f"{table.source} has questions of a form that no task reads whole, beside {listed}",
        offenders=first_few(table.samples()),
        expected="one question a row, with a text for its context, and a text, or a list of "
        "choices and the right one, for its answer",
        hint=_typed_question(question, label, parts),
    )


def _typed_question(
    question: ColumnProfile, label: ColumnProfile | None, parts: Sequence[ColumnProfile]
) -> str:
    """Return the flags to type for the text parts of questions."""
    answers = [p for p in parts if any(part in plain_name(p.name) for part in names.ANSWER_PARTS)]
    texts = [p.name for p in answers if p.is_string and not p.is_choices]
    texts = [shlex.quote(n) for n in texts if "answer" in n.lower() or "solution" in n.lower()]
    about = [p.name for p in parts if p not in answers and p.is_text]
    text = f"--text {shlex.quote(question.name)}"
    if not texts:
        return (
            "write them as columns: question, context and answer, for --task unified-qa; or "
            "question, choices and label, for --task multiple-choice"
        )
    if label is not None and plain_name(label.name) == "label":
        if about:
            text = f"--text '{{{about[0]}}} {{{question.name}}}'"
        return f"--task classification {text} --pair {texts[0]} --label {shlex.quote(label.name)}"
    if about:
        return f"--task unified-qa {text} --pair {shlex.quote(about[0])} --label {texts[0]}"
    return f"--task causal-lm {text} --label {texts[0]}"


def _listed(answers: object) -> list[str]:
    """Return the texts of answers: one, a list of them, or {text: ...}."""
    if isinstance(answers, Mapping):
        answers = answers.get("text")
    several = answers if isinstance(answers, list) else [answers]
    return [text for text in several if isinstance(text, str)]


def _named(profiles: Profiles, tiers: Iterable[Iterable[str]]) -> ColumnProfile | None:
    """Return the column with the first of some usual names that has values."""
    usual = (profiles[name] for tier in tiers for name in tier if name in profiles)
    return next((profile for profile in usual if profile.values), None)
