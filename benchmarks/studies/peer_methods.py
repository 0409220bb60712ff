"""The methods of peft and adapters beside ours, at the sizes of ours.

The learning rates that are tried for a peer's method are those around the default of our method.
What an option cannot make equal is said in `differs`: other initial values and, in adapters, other
activations are the libraries' own. peft has no BitFit, and adapters has no tuning of norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from adapterhub.anatomy.sites import Anatomy
from adapterhub.errors import SiteError
from adapterhub.methods.common.base import Method, parse_methods
from adapterhub.methods.norms import norm_parameters

Config = dict[str, Any]
"""A class of a library and its options, of which some may be configurations themselves."""


@dataclass(frozen=True)
class PeerMethod:
    """A method of another library.

    Attributes:
        library: the library, by which a worker is started.
        name: the method's name there.
        ours: our method that it is compared with.
        config: returns its configuration, of our method and the anatomy of the backbone.
        differs: what is not equal.
    """

    library: str
    name: str
    ours: str
    config: Callable[[Any, Anatomy], Config]
    differs: str = ""

    @property
    def label(self) -> str:
        """The name in tables: peft lora."""
        return f"{'trainer' if self.library == 'transformers' else self.library} {self.name}"

    @property
    def method(self) -> Method:
        """Our method."""
        (method,) = parse_methods(self.ours)
        return method

    def configuration(self, anatomy: Anatomy) -> Config:
        """Return the configuration for a backbone."""
        return self.config(self.method, anatomy)


def call(name: str, **options: Any) -> Config:
    """Describe a configuration."""
    return {"class": name, "options": options}


def hosts(anatomy: Anatomy, names: Iterable[str]) -> list[str]:
    """Return the modules of some sites of the backbone.

    Raises:
        SiteError: several sites share a module, which other libraries adapt as one.
    """
    sites = anatomy.select(names, strict=False)
    if shared := sorted({site.role for site in sites if site.part}):
        raise SiteError("sites share a module, and a peer would adapt all of it", offenders=shared)
    return [site.host for site in sites]


def low_rank(method: Any, anatomy: Anatomy, **others: Any) -> Config:
    """Configure peft's LoRA as one of ours."""
    return call(
        "LoraConfig",
        r=method.rank,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        target_modules=hosts(anatomy, method.sites),
        **others,
    )


def scales(method: Any, anatomy: Anatomy) -> Config:
    """Configure peft's IA3."""
    return call(
        "IA3Config",
        target_modules=hosts(anatomy, method.sites),
        feedforward_modules=hosts(anatomy, method.inputs),
    )


def norms(method: Any, anatomy: Anatomy) -> Config:
    """Configure peft's tuning of the normalization layers."""
    paths = dict.fromkeys(path.rpartition(".")[0] for path in norm_parameters(anatomy))
    return call("LNTuningConfig", target_modules=list(paths))


def bottleneck(name: str, method: Any, anatomy: Anatomy, **others: Any) -> Config:
    """Configure a bottleneck of adapters, which has a reduction instead of a width."""
    width = next(iter(anatomy.select(["ffn"]))).d_out
    return call(name, reduction_factor=width / method.size, **others)


def prefix(length: int, **others: Any) -> Config:
    """Configure a prefix of adapters, without the network that ours lacks by default."""
    return call("PrefixTuningConfig", prefix_length=length, flat=True, **others)


def rotations(method: Any, anatomy: Anatomy) -> Config:
    """Configure peft's OFT, of which `r` must be 0 where blocks have a size."""
    return call(
        "OFTConfig",
        r=0,
        oft_block_size=method.block,
        num_cayley_neumann_terms=method.terms,
        target_modules=hosts(anatomy, method.sites),
    )


def vectors(method: Any, anatomy: Anatomy) -> Config:
    """Configure peft's VeRA."""
    return call("VeraConfig", r=method.rank, target_modules=hosts(anatomy, method.sites))


PEERS = (
    PeerMethod("peft", "lora", "lora", low_rank),
    PeerMethod("peft", "dora", "dora", lambda m, a: low_rank(m, a, use_dora=True)),
    PeerMethod("peft", "rslora", "rslora", lambda m, a: low_rank(m, a, use_rslora=True)),
    PeerMethod("peft", "pissa", "pissa",
               lambda m, a: low_rank(m, a, init_lora_weights=f"pissa_niter_{m.iterations}")),
    PeerMethod("peft", "ia3", "ia3", scales),
    PeerMethod("peft", "oft", "oft", rotations),
    PeerMethod("peft", "vera", "vera", vectors,
               "random matrices of the largest size, cut for each projection"),
    PeerMethod("adapters", "loreft", "loreft",
               lambda m, a: call("LoReftConfig", r=m.rank, prefix_positions=1, suffix_positions=1,
                                 tied_weights=True, dropout=0.0),
               "positions of padding count; starts at random, ours at identity"),
    PeerMethod("peft", "prefix", "prefix",
               lambda m, a: call("PrefixTuningConfig", num_virtual_tokens=m.length),
               "tokens count their positions from after the prefix"),
    PeerMethod("peft", "prompt", "prompt",
               lambda m, a: call("PromptTuningConfig", num_virtual_tokens=m.length),
               "initialized at random, ours with rows of the embedding table"),
    PeerMethod("peft", "p-tuning", "p-tuning",
               lambda m, a: call("PromptEncoderConfig", num_virtual_tokens=m.length)),
    PeerMethod("peft", "norms", "norms", norms),
    PeerMethod("adapters", "seq_bn", "pfeiffer", lambda m, a: bottleneck("SeqBnConfig", m, a),
               "reads norm(r + y), ours y"),
    PeerMethod("adapters", "double_seq_bn", "houlsby",
               lambda m, a: bottleneck("DoubleSeqBnConfig", m, a), "swish, ours gelu"),
    PeerMethod("adapters", "par_bn", "scaled-parallel",
               lambda m, a: bottleneck("ParBnConfig", m, a, scaling=m.scale)),
    PeerMethod("adapters", "lora", "lora",
               lambda m, a: call("LoRAConfig", r=m.rank, alpha=m.alpha, dropout=m.dropout)),
    PeerMethod("adapters", "ia3", "ia3", lambda m, a: call("IA3Config")),
    PeerMethod("adapters", "prefix_tuning", "prefix", lambda m, a: prefix(m.length)),
    PeerMethod("adapters", "mam", "mam",
               lambda m, a: call("MAMConfig", prefix_tuning=prefix(m.length),
                                 adapter=bottleneck("ParBnConfig", m, a, scaling=m.scale))),
    PeerMethod("adapters", "unipelt", "unipelt",
               lambda m, a: call("UniPELTConfig", prefix_tuning=prefix(m.length),
                                 adapter=bottleneck("SeqBnConfig", m, a),
                                 lora=call("LoRAConfig", r=m.rank, alpha=m.rank)),
               "a gate for each sequence, ours for each token; the adapter reads norm(r + y)"),
    PeerMethod("adapters", "compacter", "compacter",
               lambda m, a: bottleneck("CompacterConfig", m, a, phm_dim=m.n, phm_rank=m.rank,
                                       factorized_phm_W=True)),
    PeerMethod("transformers", "full", "full", lambda m, a: {},
               "one learning rate for backbone and head, as in all peers"),
)  # fmt: skip


def named(library: str, names: Iterable[str] | None) -> list[PeerMethod]:
    """Return methods of a library by their names there; None: all of them.

    Raises:
        SystemExit: there is none of a name.
    """
    known = {peer.name: peer for peer in PEERS if peer.library == library}
    chosen = list(known) if names is None else list(names)
    if missing := [name for name in chosen if name not in known]:
        raise SystemExit(f"{library} {', '.join(missing)}: one of {', '.join(known)}")
    return [known[name] for name in chosen]
