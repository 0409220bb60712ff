"""Assertions on a run of the command line."""

from __future__ import annotations


def refused(result, *expected):
    """Assert that a run failed with exit code 2 and one message that contains every text."""
    code, out, err = result
    assert code == 2, err or out
    assert "Traceback" not in err
    for text in expected:
        assert text in err, err
    assert err.count("error: ") <= 1 or "Error: " in err
