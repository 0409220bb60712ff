"""The normal form of each method with its defaults: the bytes of files, and digests, depend on it.

A change here changes the manifest of every adapter with that method, which older versions may then
refuse, and the key of every committed record. A new option is `omitted=True` at its default. The
digests are those of the methods that have been released.
"""

from __future__ import annotations

import hashlib
import json

from adapterhub.config.options import to_dict
from adapterhub.methods.common.base import dump_methods, parse_methods

DIGESTS = {
    "adapterfusion": "f98b92284886",
    "bitfit": "db37c1cc4c25",
    "chosen": "8d86af3c6d5f",
    "compacter": "3a3b6de71bf1",
    "dora": "62fc0131f5ee",
    "freeze": "2ebe9283f078",
    "full": "0ef744206674",
    "head": "ad015635c054",
    "houlsby": "397323311d6c",
    "ia3": "db8bc1431958",
    "lora": "0a065119c960",
    "lora-plus": "98ca4c004c2b",
    "mam": "0eb550d6a20b",
    "norms": "f0346ca59f8a",
    "p-tuning": "37f342866700",
    "parallel": "b1207bf1b9f6",
    "pfeiffer": "fa2c41484006",
    "pissa": "273fb7f9f07b",
    "prefix": "8ca2189ad433",
    "prompt": "94f0622a025e",
    "rslora": "eefca884a11d",
    "scalar-mix": "5e22615286ce",
    "scaled-parallel": "211d8e364a42",
    "staged": "3351932fafe9",
    "unfreeze": "f79e39742c81",
    "unipelt": "b0acd90b15a6",
}


def test_the_defaults_of_each_method_are_written_as_before() -> None:
    found = {}
    for name in DIGESTS:
        text = json.dumps(dump_methods(parse_methods(name)), sort_keys=True)
        found[name] = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert found == DIGESTS


def test_an_omitted_option_is_written_when_it_is_set() -> None:
    (shared,) = parse_methods("lora(experts=shared)")
    assert to_dict(shared)["experts"] == "shared"
    assert parse_methods([{"lora": to_dict(shared)}]) == (shared,)
    (usual,) = parse_methods("lora")
    assert "experts" not in to_dict(usual)
