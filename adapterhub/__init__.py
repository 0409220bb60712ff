"""Every parameter-efficient fine-tuning method on every transformer, and a hub for the adapters.

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
    from adapterhub.adapters.activate import activate as activate
    from adapterhub.adapters.adapter import Adapter as Adapter
    from adapterhub.adapters.attach import attach as attach
    from adapterhub.adapters.attach import detach as detach
    from adapterhub.adapters.route import route as route
    from adapterhub.anatomy.build import anatomy_of as anatomy_of
    from adapterhub.backbones.fingerprint import fingerprint as fingerprint
    from adapterhub.backbones.load import load_backbone as load_backbone
    from adapterhub.hooks.composition import Average as Average
    from adapterhub.merging.combine import combine as combine
    from adapterhub.merging.merge import merge as merge
    from adapterhub.merging.merge import unmerge as unmerge
    from adapterhub.methods._base import METHODS as METHODS
    from adapterhub.registry.delete import delete as delete
    from adapterhub.registry.load import load as load
    from adapterhub.registry.publication import PublicationInfo
    from adapterhub.registry.publish import publish as publish
    from adapterhub.registry.pull import pull as pull
    from adapterhub.registry.push import push as push
    from adapterhub.registry.search import search as search
    from adapterhub.registry.sign import sign as sign
    from adapterhub.registry.tag import tag as tag
    from adapterhub.registry.verify import verify as verify
    from adapterhub.registry.yank import yank as yank

    Listing = PublicationInfo

# Name -> module, or module:attribute if the attribute has another name. These modules need torch.
# They are imported on first access, which keeps `import adapterhub` fast.
_LAZY = {
    "METHODS": "methods",
    "Average": "hooks.composition",
    "Listing": "registry.publication:PublicationInfo",
    "Adapter": "adapters.adapter",
    "activate": "adapters.activate",
    "anatomy_of": "anatomy",
    "attach": "adapters.attach",
    "combine": "merging.combine",
    "delete": "registry.delete",
    "detach": "adapters.attach",
    "fingerprint": "backbones.fingerprint",
    "load": "registry.load",
    "load_backbone": "backbones.load",
    "publish": "registry.publish",
    "pull": "registry.pull",
    "push": "registry.push",
    "search": "registry.search",
    "sign": "registry.sign",
    "tag": "registry.tag",
    "verify": "registry.verify",
    "yank": "registry.yank",
    "merge": "merging.merge",
    "unmerge": "merging.merge",
    "route": "adapters.route",
}

__all__ = ["AdapterhubError", "__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LAZY[name].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute or name)


def __dir__() -> list[str]:
    return __all__
