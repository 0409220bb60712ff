"""`adapterhub push`; tests/registry/test_hub.py tests the upload."""

from __future__ import annotations

import pytest

from adapterhub.errors import AdapterhubError


def test_a_name_without_a_hub(typed):
    with pytest.raises(AdapterhubError) as error:
        typed("push nothing polite")
    assert "hf:owner/name" in str(error.value)
