"""Bottleneck adapters: options and tensors must agree."""

from __future__ import annotations

import pytest

from adapterhub.errors import FileError, MismatchError

# Imports warn about what they cannot carry over unchanged.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"residual_before_ln": False}, "residual_before_ln"),
        ({"non_linearity": "sine"}, "non_linearity"),
        ({"mh_adapter": True}, "encoder.0.attn"),
        ({"leave_out": [1]}, "encoder.layer.1.output"),
        ({"output_adapter": False}, "no sublayer"),
        ({"reduction_factor": 8}, "shape"),
        ({"architecture": "vision"}, "vision"),
        ({"use_gating": True}, "missing: encoder.0.ffn.pfeiffer.gate.bias"),
        ({"use_gating": True, "is_parallel": True}, "only sequential"),
        ({"use_gating": True, "reduction_factor": {"0": 8, "default": 4}}, "one size"),
    ],
)
def test_options_and_tensors_must_agree(altered, options, named):
    tree, _, load = altered
    tree["config"] |= options
    with pytest.raises((FileError, MismatchError)) as error:
        load()
    assert named in str(error.value)
