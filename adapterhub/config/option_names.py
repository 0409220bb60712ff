"""Other names of options: those that are accepted, and those that only have a suggestion.

One rule for recipes and methods: an option is written under its own name, at its own place. Also:

- a name may differ in case, and have hyphens in place of underscores: `Learning-Rate`;
- an alias (`lr`) is accepted at the place of its option and above it: `train.lr`, `lr`;
- above its group, an option that only one group has is accepted: `epochs` is `train.epochs`;
- a text in place of a group is an option of another group: `train=FILE` is `data.train=FILE`, and
  so is `data=FILE`.

What is read is the normal form: each option under its own name, at its own place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from adapterhub.config.options import hints_of, options_of
from adapterhub.errors import ConfigError, did_you_mean, nearest, spelled_like


@dataclass(frozen=True)
class OptionNames:
    """The names of a dataclass's options.

    Attributes:
        cls: the dataclass; options that are dataclasses are its groups.
        aliases: other names that are accepted, with the path of the option: `train.epochs`.
        meanings: other names that are not, with what to type instead.
        texts: the option that a text in place of a group is, if no other group has one of its name.
    """

    cls: Any
    aliases: Mapping[str, str]
    meanings: Mapping[str, str]
    texts: Mapping[str, str] = field(default_factory=dict)

    def normal_form(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return data with each option that is known under its own name, at its own place.

        Raises:
            ConfigError: an option is given twice, under different names, or a group is given as
                a value beside one of its options.
        """
        groups = self._groups()
        normal: dict[str, Any] = {}
        written: dict[str, list[str]] = {}
        both: list[str] = []
        for path, value in _leaves(data, groups):
            own = self._own_path(path, value, groups)
            written.setdefault(".".join(map(str, own)), []).append(".".join(map(str, path)))
            *above, name = own
            group = normal.setdefault(above[0], {}) if above else normal
            if isinstance(group, dict) and not isinstance(group.get(name), dict):
                group[name] = value
            elif value != {}:
                both.append(f"{own[0]}: as a value, and with options of its own")
        twice = [f"{own}: as {' and '.join(ways)}" for own, ways in written.items() if ways[1:]]
        if twice := [*twice, *both]:
            raise ConfigError("options are given twice", offenders=twice, expected="one of them")
        return normal

    def suggest(self, path: str) -> str:
        """Return what to type instead of an unknown option: "; try ...", or "" if nothing is near.

        Names with a known meaning come first, then those of other groups that are spelled alike.
        """
        name = path.rpartition(".")[2]
        meaning = self.meanings.get(name.lower().replace("-", "_")) or self.aliases.get(name)
        if meaning:
            return f"; try {meaning}"
        options = [f"{group}.{option}" for group, all in self._groups().items() for option in all]
        if same := [option for option in options if option.endswith(f".{name}")]:
            return f"; try {' or '.join(same)}"
        level = self._groups().get(path.rpartition(".")[0], _names(self.cls))
        places = {option.rpartition(".")[2]: option for option in options}
        elsewhere = [repr(places[near]) for near in nearest(name, places)]
        here = did_you_mean(name, level)
        return here or (f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else "")

    def own_name(self, word: str) -> str | None:
        """Return the path of the option that a word names, alone or with its place; or None."""
        path = tuple(word.split("."))
        groups = self._groups()
        *above, name = self._own_path(path, 0, groups)
        known = groups.get(".".join(above), ()) if above else _names(self.cls)
        return ".".join((*above, name)) if name in known else None

    def _groups(self) -> dict[str, list[str]]:
        return {
            name: _names(hint)
            for name, hint in hints_of(self.cls).items()
            if dataclasses.is_dataclass(hint)
        }

    def _own_path(
        self, path: tuple[str, ...], value: object, groups: Mapping[str, list[str]]
    ) -> tuple[str, ...]:
        """Return the path of the option that is written at a path."""
        *above, name = path = self._respelled(path, groups)
        is_option = name in (groups.get(above[0], ()) if above else _names(self.cls))
        if is_option and not (name in groups and not above and isinstance(value, str)):
            return path
        if is_option and name in self.texts:
            return tuple(self.texts[name].split("."))
        target = tuple(self.aliases[name].split(".")) if name in self.aliases else ()
        if target and target[: len(above)] == tuple(above):
            return target
        having = [] if above else [group for group, options in groups.items() if name in options]
        return (having[0], name) if len(having) == 1 else path

    def _respelled(self, path: tuple[str, ...], groups: Mapping[str, list[str]]) -> tuple[str, ...]:
        """Return a path with the group and the option as they are written, but for case."""
        *above, name = path
        places = [_respelled(group, groups) for group in above]
        options = [o for group in (places[:1] or groups) for o in groups.get(group, ())]
        own = [] if places else _names(self.cls)
        known = dict.fromkeys([*own, *options, *self.aliases])
        return (*places, _respelled(name, own if name in own else known))


def _respelled(name: object, known: Iterable[str]) -> Any:
    """Return the known name that is spelled like `name`; a key of YAML need not be a text."""
    return spelled_like(name, known) if isinstance(name, str) else name


def _leaves(
    data: Mapping[str, Any], groups: Mapping[str, list[str]]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and value of each option; a group that is empty or no mapping is one."""
    for key, value in data.items():
        if _respelled(key, groups) in groups and isinstance(value, Mapping) and value:
            for name, inner in value.items():
                yield (key, name), inner
        else:
            yield (key,), value


def _names(cls: Any) -> list[str]:
    return [option.name for option in options_of(cls)]
