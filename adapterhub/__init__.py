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
    from adapterhub.adapters.adapter import Adapter as Adapter
    from adapterhub.adapters.attach import attach as attach
    from adapterhub.adapters.attach import detach as detach
    from adapterhub.adapters.inspection import inspect as inspect
    from adapterhub.adapters.route import activate as activate
    from adapterhub.adapters.route import adapters as adapters
    from adapterhub.adapters.route import disabled as disabled
    from adapterhub.adapters.route import route as route
    from adapterhub.anatomy.build import anatomy_of as anatomy_of
    from adapterhub.anatomy.family import Family as Family
    from adapterhub.anatomy.family import Stack as Stack
    from adapterhub.anatomy.family_file import register_family as register_family
    from adapterhub.backbones.fingerprint import fingerprint as fingerprint
    from adapterhub.backbones.load import load_backbone as load_backbone
    from adapterhub.hooks.composition import Average as Average
    from adapterhub.inference.embed import embed as embed
    from adapterhub.inference.open import open_adapter
    from adapterhub.inference.train import train_adapter
    from adapterhub.merging.combine import combine as combine
    from adapterhub.merging.combine import to_lora as to_lora
    from adapterhub.merging.merge import merge as merge
    from adapterhub.merging.merge import unmerge as unmerge
    from adapterhub.methods import METHODS as METHODS
    from adapterhub.methods.adalora import AdaLoRA as AdaLoRA
    from adapterhub.methods.adamss import AdaMSS as AdaMSS
    from adapterhub.methods.adapterfusion import AdapterFusion as AdapterFusion
    from adapterhub.methods.adapterplus import AdapterPlus as AdapterPlus
    from adapterhub.methods.alora import ALoRA as ALoRA
    from adapterhub.methods.bdlora import BDLoRA as BDLoRA
    from adapterhub.methods.beft import BEFT as BEFT
    from adapterhub.methods.bitfit import BitFit as BitFit
    from adapterhub.methods.boft import BOFT as BOFT
    from adapterhub.methods.bottleneck import Houlsby as Houlsby
    from adapterhub.methods.bottleneck import Parallel as Parallel
    from adapterhub.methods.bottleneck import Pfeiffer as Pfeiffer
    from adapterhub.methods.bottleneck import ScaledParallel as ScaledParallel
    from adapterhub.methods.c3a import C3A as C3A
    from adapterhub.methods.cartridge import Cartridge as Cartridge
    from adapterhub.methods.compacter import Compacter as Compacter
    from adapterhub.methods.cpt import CPT as CPT
    from adapterhub.methods.deft import DEFT as DEFT
    from adapterhub.methods.delora import DeLoRA as DeLoRA
    from adapterhub.methods.dora import DoRA as DoRA
    from adapterhub.methods.fourierft import FourierFT as FourierFT
    from adapterhub.methods.freeze import Freeze as Freeze
    from adapterhub.methods.full import Full as Full
    from adapterhub.methods.glora import GLoRA as GLoRA
    from adapterhub.methods.gralora import GraLoRA as GraLoRA
    from adapterhub.methods.head import Head as Head
    from adapterhub.methods.hira import HiRA as HiRA
    from adapterhub.methods.hra import HRA as HRA
    from adapterhub.methods.hydralora import HydraLoRA as HydraLoRA
    from adapterhub.methods.ia3 import IA3 as IA3
    from adapterhub.methods.invertible import Invertible as Invertible
    from adapterhub.methods.kasa import KaSA as KaSA
    from adapterhub.methods.lily import Lily as Lily
    from adapterhub.methods.llama_adapter import LLaMAAdapter as LLaMAAdapter
    from adapterhub.methods.loha import LoHa as LoHa
    from adapterhub.methods.lokr import LoKr as LoKr
    from adapterhub.methods.lora import LoRA as LoRA
    from adapterhub.methods.lora_fa import LoRAFA as LoRAFA
    from adapterhub.methods.lora_ga import LoRAGA as LoRAGA
    from adapterhub.methods.lora_plus import LoRAPlus as LoRAPlus
    from adapterhub.methods.lora_xs import LoRAXS as LoRAXS
    from adapterhub.methods.lora_xs import TinyLoRA as TinyLoRA
    from adapterhub.methods.madx import MadX as MadX
    from adapterhub.methods.mam import Mam as Mam
    from adapterhub.methods.mica import MiCA as MiCA
    from adapterhub.methods.miss import MiSS as MiSS
    from adapterhub.methods.norms import Norms as Norms
    from adapterhub.methods.oft import OFT as OFT
    from adapterhub.methods.olora import OLoRA as OLoRA
    from adapterhub.methods.osf import OSF as OSF
    from adapterhub.methods.p_tuning import PTuning as PTuning
    from adapterhub.methods.peanut import PEANuT as PEANuT
    from adapterhub.methods.pissa import PiSSA as PiSSA
    from adapterhub.methods.prefix import Prefix as Prefix
    from adapterhub.methods.prompt import Prompt as Prompt
    from adapterhub.methods.psoft import PSOFT as PSOFT
    from adapterhub.methods.randlora import RandLoRA as RandLoRA
    from adapterhub.methods.reft import DiReFT as DiReFT
    from adapterhub.methods.reft import LoReFT as LoReFT
    from adapterhub.methods.reft import NoReFT as NoReFT
    from adapterhub.methods.road import RoAd as RoAd
    from adapterhub.methods.rslora import RsLoRA as RsLoRA
    from adapterhub.methods.scalar_mix import ScalarMix as ScalarMix
    from adapterhub.methods.selected_parameters import SelectedParameters as SelectedParameters
    from adapterhub.methods.shira import SHiRA as SHiRA
    from adapterhub.methods.ssf import SSF as SSF
    from adapterhub.methods.staged import Staged as Staged
    from adapterhub.methods.svft import SVFT as SVFT
    from adapterhub.methods.unfreeze import Unfreeze as Unfreeze
    from adapterhub.methods.unilora import UniLoRA as UniLoRA
    from adapterhub.methods.unipelt import UniPELT as UniPELT
    from adapterhub.methods.vblora import VBLoRA as VBLoRA
    from adapterhub.methods.vera import VeRA as VeRA
    from adapterhub.methods.waveft import WaveFT as WaveFT
    from adapterhub.registry.publish import PublicationInfo
    from adapterhub.registry.publish import publish as publish
    from adapterhub.registry.publish import push as push
    from adapterhub.registry.publish import sign as sign
    from adapterhub.registry.pull import load as load
    from adapterhub.registry.pull import pull as pull
    from adapterhub.registry.pull import verify as verify
    from adapterhub.registry.search import search as search
    from adapterhub.registry.tag_yank_delete import delete as delete
    from adapterhub.registry.tag_yank_delete import tag as tag
    from adapterhub.registry.tag_yank_delete import yank as yank
    from adapterhub.training.calibration import calibrate as calibrate
    from adapterhub.training.trainer_callback import TrainerCallback as TrainerCallback

    Listing = PublicationInfo
    open = open_adapter
    train = train_adapter

# Name -> module, or module:attribute if the attribute has another name. These modules need torch.
# They are imported on first access, which keeps `import adapterhub` fast.
_LAZY = {
    "METHODS": "methods",
    "Family": "anatomy",
    "Stack": "anatomy",
    "Average": "hooks.composition",
    "Listing": "registry.publish:PublicationInfo",
    "Adapter": "adapters.adapter",
    "TrainerCallback": "training.trainer_callback",
    "activate": "adapters.route",
    "adapters": "adapters.route",
    "anatomy_of": "anatomy",
    "attach": "adapters.attach",
    "calibrate": "training.calibration",
    "combine": "merging.combine",
    "delete": "registry.tag_yank_delete",
    "detach": "adapters.attach",
    "disabled": "adapters.route",
    "embed": "inference.embed",
    "fingerprint": "backbones.fingerprint",
    "inspect": "adapters.inspection",
    "load": "registry.pull",
    "load_backbone": "backbones.load",
    "publish": "registry.publish",
    "pull": "registry.pull",
    "push": "registry.publish",
    "register_family": "anatomy",
    "search": "registry.search",
    "sign": "registry.publish",
    "tag": "registry.tag_yank_delete",
    "verify": "registry.pull",
    "yank": "registry.tag_yank_delete",
    "open": "inference.open:open_adapter",
    "merge": "merging.merge",
    "to_lora": "merging.combine",
    "train": "inference.train:train_adapter",
    "unmerge": "merging.merge",
    "route": "adapters.route",
}

# The classes of the methods, as objects with options: LoRA(rank=16).
_LAZY |= {
    "ALoRA": "methods.alora",
    "AdaLoRA": "methods.adalora",
    "AdaMSS": "methods.adamss",
    "AdapterFusion": "methods.adapterfusion",
    "AdapterPlus": "methods.adapterplus",
    "BDLoRA": "methods.bdlora",
    "BEFT": "methods.beft",
    "BOFT": "methods.boft",
    "BitFit": "methods.bitfit",
    "C3A": "methods.c3a",
    "CPT": "methods.cpt",
    "Cartridge": "methods.cartridge",
    "Compacter": "methods.compacter",
    "DEFT": "methods.deft",
    "DeLoRA": "methods.delora",
    "DiReFT": "methods.reft",
    "DoRA": "methods.dora",
    "FourierFT": "methods.fourierft",
    "Freeze": "methods.freeze",
    "Full": "methods.full",
    "GLoRA": "methods.glora",
    "GraLoRA": "methods.gralora",
    "HRA": "methods.hra",
    "Head": "methods.head",
    "HiRA": "methods.hira",
    "Houlsby": "methods.bottleneck",
    "HydraLoRA": "methods.hydralora",
    "IA3": "methods.ia3",
    "Invertible": "methods.invertible",
    "KaSA": "methods.kasa",
    "LLaMAAdapter": "methods.llama_adapter",
    "Lily": "methods.lily",
    "LoHa": "methods.loha",
    "LoKr": "methods.lokr",
    "LoRA": "methods.lora",
    "LoRAFA": "methods.lora_fa",
    "LoRAGA": "methods.lora_ga",
    "LoRAPlus": "methods.lora_plus",
    "LoRAXS": "methods.lora_xs",
    "LoReFT": "methods.reft",
    "MadX": "methods.madx",
    "Mam": "methods.mam",
    "MiCA": "methods.mica",
    "MiSS": "methods.miss",
    "NoReFT": "methods.reft",
    "Norms": "methods.norms",
    "OFT": "methods.oft",
    "OLoRA": "methods.olora",
    "OSF": "methods.osf",
    "PEANuT": "methods.peanut",
    "PSOFT": "methods.psoft",
    "PTuning": "methods.p_tuning",
    "Parallel": "methods.bottleneck",
    "Pfeiffer": "methods.bottleneck",
    "PiSSA": "methods.pissa",
    "Prefix": "methods.prefix",
    "Prompt": "methods.prompt",
    "RandLoRA": "methods.randlora",
    "RoAd": "methods.road",
    "RsLoRA": "methods.rslora",
    "SHiRA": "methods.shira",
    "SSF": "methods.ssf",
    "SVFT": "methods.svft",
    "ScalarMix": "methods.scalar_mix",
    "ScaledParallel": "methods.bottleneck",
    "SelectedParameters": "methods.selected_parameters",
    "Staged": "methods.staged",
    "TinyLoRA": "methods.lora_xs",
    "Unfreeze": "methods.unfreeze",
    "UniLoRA": "methods.unilora",
    "UniPELT": "methods.unipelt",
    "VBLoRA": "methods.vblora",
    "VeRA": "methods.vera",
    "WaveFT": "methods.waveft",
}

__all__ = ["AdapterhubError", "__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LAZY[name].partition(":")
    imported = importlib.import_module(f"{__name__}.{module}")
    # Importing the folder `adapters` binds it here: it is called like the function.
    return globals().get(name) or getattr(imported, attribute or name)


def __dir__() -> list[str]:
    return __all__
