"""Names for the labels of a file: `0=negative,1=positive`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from adapterhub.errors import ConfigError, DataError

_FORMS = "0=negative,1=positive, a mapping {0: negative, 1: positive}, or a list [no, yes]"


def parse_labels(spec: object) -> dict[str, str]:
    """Read the option `labels`: {value in the file: name}, in the order of the logits.

    It is text such as `0=negative,1=positive`, a mapping, or a list of labels, which keep their
    names and get this order; None or an empty one is {}.

    Raises:
        ConfigError: it has another form, a value or name is empty, or one occurs twice.
    """
    pairs = _pairs(spec)
    values, names = [value for value, _ in pairs], [name for _, name in pairs]
    problems = [f"{value or name!r}: empty" for value, name in pairs if not (value and name)]
    problems += [f"the value {v!r}: {n} times" for v, n in Counter(values).items() if n > 1]
    problems += [f"the name {v!r}: {n} times" for v, n in Counter(names).items() if n > 1]
    problems += [
        f"{value}={name}: {name!r} is another value of the file"
        for value, name in pairs
        if name != value and name in values
    ]
    if problems:
        raise ConfigError("invalid names of labels", offenders=problems, expected=_FORMS)
    return dict(pairs)


def _pairs(spec: object) -> list[tuple[str, str]]:
    if isinstance(spec, str):
        words = [word.strip() for word in spec.split(",")] if spec.strip() else []
        if words and all("=" in word for word in words):
            pairs = (word.partition("=") for word in words)
            return [(value.strip(), name.strip()) for value, _, name in pairs]
        spec = words
    if isinstance(spec, Mapping) and all(map(_is_label, (*spec.keys(), *spec.values()))):
        return [(str(value).strip(), str(name).strip()) for value, name in spec.items()]
    if isinstance(spec, (list, tuple)) and all(map(_is_label, spec)):
        words = [str(word).strip() for word in spec]
        if not any("=" in word for word in words):
            return list(zip(words, words, strict=True))
    if spec is None:
        return []
    raise ConfigError(f"invalid names of labels: {str(spec)[:200]!r}", expected=_FORMS)


def _is_label(value: object) -> bool:
    return isinstance(value, (str, int, float))


def name_labels(labels: Iterable[str], names: Mapping[str, str], source: str) -> list[str]:
    """Return the name of each label; one that is a name already stays, and all without names.

    Raises:
        DataError: labels have no name; all of them are counted.
    """
    if not names:
        return list(labels)
    table = {name: name for name in names.values()} | dict(names)
    labels = list(labels)
    unnamed = Counter(label for label in labels if label not in table)
    if unnamed:
        given = ",".join(f"{value}={name}" for value, name in names.items())
        raise DataError(
            f"{source} has labels without a name",
            offenders=[f"{label!r}: {n:,} time(s)" for label, n in unnamed.most_common()],
            expected=f"the labels of --labels {given}, or their names",
            hint=f"--labels {given},{next(iter(unnamed))}=NAME",
        )
    return [table[label] for label in labels]


def unnamed_note(labels: Sequence[str]) -> list[str]:
    """Suggest names if all labels are bare numbers."""
    if not labels or not all(label.removeprefix("-").isdecimal() for label in labels):
        return []
    few = labels[:3]
    more = ",..." * (len(labels) > len(few))
    names = ",".join(f"{label}=NAME" for label in few)
    return [f"the labels are numbers ({', '.join(few)}{more}); --labels {names}{more} names them"]
