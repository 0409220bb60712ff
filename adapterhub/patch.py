"""Changes to a model that can be undone exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, Protocol

P = ParamSpec("P")


class Removable(Protocol):
    """The handle that torch returns for a hook, and anything else with a `remove` method."""

    def remove(self) -> None:
        """Undo the change."""


class Patch:
    """Changes that are undone together, in reverse order.

    A change is recorded before it is made, so that `undo` also reverts one that failed halfway. A
    patch may be part of another: `push(inner.undo)`. It is copied and pickled with the model that
    it changes. Used as a context manager, it is undone at exit.
    """

    def __init__(self) -> None:
        self.undoing: list[Callable[[], Any]] = []

    def push(self, undo: Callable[[], Any]) -> None:
        """Record how to undo a change; lambdas are not allowed, since they cannot be copied."""
        self.undoing.append(undo)

    def hook(self, register: Callable[P, Removable], *args: P.args, **kwargs: P.kwargs) -> None:
        """Register a hook, or anything else that is undone by `remove`.

        Args:
            register: returns a handle with `remove`, as `module.register_forward_hook` does.
            *args: its arguments.
            **kwargs: its keyword arguments.
        """
        handles: list[Removable] = []
        self.push(partial(_remove_all, handles))
        handles.append(register(*args, **kwargs))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, even if the owner stores it elsewhere or under another name.

        Args:
            owner: the object.
            name: the attribute.
            value: its new value.
        """
        before = getattr(owner, name, None)
        self.push(partial(_set_back, owner, name, before, name in vars(owner)))
        setattr(owner, name, value)

    def put(self, entries: dict[str, Any], name: str, value: Any) -> None:
        """Put an entry into a dict of a module that already has the key, such as its parameters.

        The order of the entries does not change.

        Args:
            entries: the dict.
            name: the key of the entry.
            value: its new value.
        """
        self.push(partial(_put_back, entries, name, entries[name]))
        entries[name] = value

    def override(self, owner: Any, name: str, value: Any) -> None:
        """Override an attribute on the instance, whether the class or the instance defines it.

        If another library replaces the attribute later, `undo` keeps its replacement.

        Args:
            owner: the object.
            name: the attribute.
            value: the replacement.
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
