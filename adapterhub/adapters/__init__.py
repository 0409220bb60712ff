"""The lifecycle of an adapter: build, attach, activate, route, load, save, export, detach.

Equations belong in methods/, hooks in hooks/, stores in registry/.

`adapterhub.adapters(model)` calls `adapters` of route.py: this package has the same name, so it is
callable.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableRoom(ModuleType):
    def __call__(self, model: Any) -> Any:
        from adapterhub.adapters.route import adapters

        return adapters(model)


sys.modules[__name__].__class__ = _CallableRoom
