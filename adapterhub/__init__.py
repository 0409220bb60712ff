"""adapterhub: every parameter-efficient fine-tuning method on every backbone, and a hub for the
adapters.

    import adapterhub as ah

    model, tokenizer = ah.load_backbone(
        "sentence-transformers/all-MiniLM-L6-v2", task="classification", labels=["no", "yes"])
    adapter = ah.attach(model, "lora", name="polite")
    ...                                    # any training loop
    adapter.save("out/polite")
    adapter.detach()
    ah.load(model, "out/polite")
"""

import importlib
from typing import TYPE_CHECKING, Any

from adapterhub._version import __version__
from adapterhub.errors import AdapterhubError

if TYPE_CHECKING:
    from adapterhub.adapter import Adapter as Adapter
    from adapterhub.attachment import activate as activate
    from adapterhub.attachment import attach as attach
    from adapterhub.attachment import detach as detach
    from adapterhub.backbones.families import anatomy_of as anatomy_of
    from adapterhub.backbones.load import fingerprint as fingerprint
    from adapterhub.backbones.load import load_backbone as load_backbone
    from adapterhub.combining import combine as combine
    from adapterhub.composition import Average as Average
    from adapterhub.merging import merge as merge
    from adapterhub.merging import unmerge as unmerge
    from adapterhub.methods.base import METHODS as METHODS
    from adapterhub.registry.load import load as load
    from adapterhub.registry.prepare import Listing as Listing
    from adapterhub.registry.verbs import publish as publish
    from adapterhub.registry.verbs import pull as pull
    from adapterhub.registry.verbs import push as push
    from adapterhub.registry.verbs import search as search
    from adapterhub.registry.verbs import yank as yank
    from adapterhub.routing import route as route

# Each of these needs torch: it is imported when one is first asked for, so that `import adapterhub`
# is quick.
_LAZY = {
    "METHODS": "methods",
    "Average": "composition",
    "Listing": "registry.prepare",
    "Adapter": "adapter",
    "activate": "attachment",
    "anatomy_of": "backbones.families",
    "attach": "attachment",
    "combine": "combining",
    "detach": "attachment",
    "fingerprint": "backbones.load",
    "load": "registry.load",
    "load_backbone": "backbones.load",
    "publish": "registry.verbs",
    "pull": "registry.verbs",
    "push": "registry.verbs",
    "search": "registry.verbs",
    "yank": "registry.verbs",
    "merge": "merging",
    "unmerge": "merging",
    "route": "routing",
}

__all__ = ["AdapterhubError", "__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return __all__
