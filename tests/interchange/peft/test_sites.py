"""At any site an adapter is exported with equal outputs, or refused."""

from __future__ import annotations

import pytest

import adapterhub as ah
from adapterhub.adapters.export import compare
from adapterhub.anatomy.build import anatomy_of
from adapterhub.errors import AdapterhubError
from adapterhub.interchange.peft.exporter import to_peft
from tests.kit import tiny_models
from tests.kit.peers import core

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize("method", ["lora", "dora", "ia3"])
@pytest.mark.parametrize("architecture", core(tiny_models.ARCHITECTURES, "gpt2"))
def test_every_role_is_equal_or_refused(architecture, method):
    exported = []
    roles = {site.role for site in anatomy_of(tiny_models.usual_model(architecture)).sites.values()}
    for role in sorted(roles):
        model = tiny_models.usual_model(architecture)
        try:
            adapter = ah.attach(model, {method: {"sites": [role]}})
            tiny_models.scramble(adapter)
            to_peft(adapter.export_source())
        except AdapterhubError:
            continue
        assert compare(lambda made=adapter: made) == [], role
        exported.append(role)
    assert len(exported) >= 2
