"""Changes of a model that are undone exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, Protocol

P = ParamSpec("P")


class Removable(Protocol):
    """What torch returns for a hook, and what can be removed as one."""

    def remove(self) -> None:
        """Undo the change."""


class Patch:
    """Changes that are undone together, the last one first.

    A change is noted before it is made, so that `undo` finds one that failed halfway. A patch may
    be part of another: `push(inner.undo)`. It is copied and pickled with the model that it changes.
    As a context, it is undone at the end.
    """

    def __init__(self) -> None:
        self.undoing: list[Callable[[], Any]] = []

    def push(self, undo: Callable[[], Any]) -> None:
        """Note how a change is undone; no lambda, which could not be copied with the model."""
        self.undoing.append(undo)

    def hook(self, register: Callable[P, Removable], *args: P.args, **kwargs: P.kwargs) -> None:
        """Register a hook, or something else that is undone by `remove`.

        Args:
            register: returns what `remove` undoes, as `module.register_forward_hook` does.
            *args: its arguments.
            **kwargs: likewise.
        """
        handles: list[Removable] = []
        self.push(partial(_remove_all, handles))
        handles.append(register(*args, **kwargs))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, also one that the owner keeps elsewhere or under another name.

        Args:
            owner: the object.
            name: the attribute.
            value: its new value.
        """
        before = getattr(owner, name, None)
        self.push(partial(_set_back, owner, name, before, name in vars(owner)))
        setattr(owner, name, value)

    def put(self, entries: dict[str, Any], name: str, value: Any) -> None:
        """Put an entry into a dict of a module that has one of this name, such as its parameters.

        It stays at its place in the order of the entries.

        Args:
            entries: the dict.
            name: the key of the entry.
            value: its new value.
        """
        self.push(partial(_put_back, entries, name, entries[name]))
        entries[name] = value

    def override(self, owner: Any, name: str, value: Any) -> None:
        """Give an object an attribute of its own in place of that of its class, or of its own.

        One that another library has put in its place since then stays.

        Args:
            owner: the object.
            name: the attribute.
            value: what takes its place.
        """
        before = (vars(owner)[name],) if name in vars(owner) else ()
        self.push(partial(_uncover, owner, name, value, before))
        vars(owner)[name] = value

    def undo(self) -> None:
        """Undo all changes, and forget them."""
        while self.undoing:
            self.undoing[-1]()
            self.undoing.pop()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def _remove_all(handles: list[Removable]) -> None:
    for handle in handles:
        handle.remove()


def _put_back(entries: dict[str, Any], name: str, before: Any) -> None:
    entries[name] = before


def _set_back(owner: Any, name: str, before: Any, had: bool) -> None:
    if had or name not in vars(owner):
        setattr(owner, name, before)
    else:
        del vars(owner)[name]


def _uncover(owner: Any, name: str, value: Any, before: tuple[Any, ...]) -> None:
    if vars(owner).get(name) is value:
        if before:
            vars(owner)[name] = before[0]
        else:
            del vars(owner)[name]
