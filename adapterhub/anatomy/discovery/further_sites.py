"""The projections of a layer that no known sublayer has: roles by what their module is called.

    mixer.NAME    linear attention, state spaces, recurrences and convolutions over tokens
    attn.NAME     attention whose projections are not a query, a key and a value
    ffn.NAME      a network of another form; `moe.NAME` beside its experts
    other.NAME    what none of these words fits

NAME is the last part of the path that tells it apart: `mixer.in_proj`, `mixer.conv_in_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from torch import nn

from adapterhub.anatomy.forward_source import returns_tuple

MIXER = re.compile(
    r"mamba|mixer|ssm|linear_?att|delta|(?<!pw)(?<!pointwise_)conv|recurrent|rwkv|time_mix|lightning|short_?conv"
    r"|temporal_block|fourier",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|_")
_WORDS = {
    "mixer": MIXER,
    "attn": re.compile(r"att(n|ention)|mha\b", re.IGNORECASE),
    "moe": re.compile(r"moe|expert|router", re.IGNORECASE),
    "ffn": re.compile(r"mlp|ffn|feed_?forward|dense|intermediate|channel_mix", re.IGNORECASE),
}


def further_sites(
    layer: nn.Module, projections: Iterable[str], taken: Mapping[str, str]
) -> dict[str, str]:
    """Give each projection that has no role one of its own.

    `taken` maps roles to the paths that have one.

    Returns:
        The further paths by role.
    """
    used = set(taken.values())
    left = [path for path in projections if path not in used and not _of_an_expert(path)]
    kinds = {path: kind_of(layer, path) for path in left}
    found: dict[str, str] = {}
    for path, kind in kinds.items():
        same = [p for p, other in kinds.items() if other == kind and p != path]
        found[f"{kind}.{_name(path, same, kind, taken)}"] = path
    return found


def mixer_of(layer: nn.Module, sites: Mapping[str, str]) -> str | None:
    """Return the path of the module that has all projections of a layer's mixer, if it is one."""
    paths = [path for role, path in sites.items() if role.startswith("mixer.")]
    parts = [path.split(".")[:-1] for path in paths]
    common = [a[0] for a in zip(*parts, strict=False) if len(set(a)) == 1] if parts else []
    module = layer.get_submodule(".".join(common)) if common else None
    if module is None or returns_tuple(module) or isinstance(module, nn.ModuleList):
        return None
    return ".".join(common)


def _of_an_expert(path: str) -> bool:
    return re.search(r"experts\.\d+\.", path) is not None


def kind_of(layer: nn.Module, path: str) -> str:
    """Return what a projection belongs to, by the words of the modules around it, innermost first.

    Returns:
        `mixer`, `attn`, `moe`, `ffn` or `other`.
    """
    parts = path.split(".")[:-1]
    for end in range(len(parts), 0, -1):
        around = ".".join(parts[:end])
        names = f"{parts[end - 1]} {own_name(layer.get_submodule(around), layer)}"
        for kind, words in _WORDS.items():
            if words.search(names):
                return kind
    own = next((kind for kind, words in _WORDS.items() if words.search(path)), None)
    return own or "other"


def own_name(module: nn.Module, layer: nn.Module) -> str:
    """Return the name of a module's class without what it shares with its layer's.

    `MLP` of a RecurrentGemmaMLP in a RecurrentGemmaDecoderLayer.
    """
    words, whole = (_WORD.findall(type(each).__name__) for each in (module, layer))
    equal = [a == b for a, b in zip(words, whole, strict=False)]
    shared = equal.index(False) if False in equal else len(equal)
    return "".join(words[shared:] or words)


def _name(path: str, others: Collection[str], kind: str, taken: Mapping[str, str]) -> str:
    """Return the shortest end of a path that no other one has, as one word."""
    parts = path.split(".")
    for count in range(1, len(parts) + 1):
        end = parts[-count:]
        role = f"{kind}.{'_'.join(end)}"
        if role not in taken and not any(other.split(".")[-count:] == end for other in others):
            break
    return "_".join(end)
