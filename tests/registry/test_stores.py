"""A reference selects its store."""

from __future__ import annotations

import pytest

from adapterhub.errors import ConfigError
from adapterhub.registry.hub import HubStore
from adapterhub.registry.local import LocalRegistry
from adapterhub.registry.reference import parse_reference
from adapterhub.registry.stores import store_of


def test_each_kind_of_reference_has_its_store(tmp_path):
    local = store_of(parse_reference("polite"), tmp_path)
    assert isinstance(local, LocalRegistry)
    assert local.root == tmp_path
    hub = store_of(parse_reference("hf:some/polite"), allow_pickle=True)
    assert isinstance(hub, HubStore)
    assert (hub.prefix, hub.allow_pickle) == ("hf:", True)
    server = store_of(parse_reference("https://h.org/some/polite@v1"))
    assert isinstance(server, HubStore)
    assert server.prefix == "https://h.org/"
    with pytest.raises(ConfigError, match="is a folder"):
        store_of(parse_reference("./polite"))
