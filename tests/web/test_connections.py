"""Limits of connections: who leaves for a new one, and who is refused."""

from __future__ import annotations

import resource

import pytest

from adapterhub.web import connections
from adapterhub.web.connections import ConnectionLimits, most_connections, raise_file_limit


class Opened:
    """A connection, of which its state alone counts."""

    def __init__(self, *, waits=True, answered=False):
        self.waits_for_client, self.was_answered = waits, answered
        self.transport, self.is_dropped = self, False

    def abort(self):
        self.is_dropped = True


def opened(limits, number, address="10.0.0.1", **state):
    found = [Opened(**state) for _ in range(number)]
    assert all(limits.admit(each, address) for each in found)
    return found


def test_the_quietest_of_an_address_leaves_for_a_new_one():
    limits = ConnectionLimits(most=8)
    (client,) = opened(limits, 1, answered=True)
    first, second, third = opened(limits, 3)
    limits.note(first)
    opened(limits, 1)
    dropped = [each.is_dropped for each in (client, first, second, third)]
    assert dropped == [False, False, True, False]
    (other,) = opened(limits, 1, "10.0.0.2")
    opened(limits, 20)
    assert (client.is_dropped, other.is_dropped, len(limits.open)) == (False, False, 5)
    assert limits.counts == {"10.0.0.1": 4, "10.0.0.2": 1}


def test_what_is_being_answered_is_not_dropped():
    limits = ConnectionLimits(most=8)
    busy = opened(limits, 4, waits=False)
    assert not limits.admit(Opened(), "10.0.0.1")
    busy += opened(limits, 4, "10.0.0.2", waits=False)
    assert not limits.admit(Opened(), "10.0.0.3")
    limits.forget(busy.pop())
    limits.forget(Opened())  # it was refused
    assert limits.admit(Opened(), "10.0.0.3")
    assert not any(each.is_dropped for each in busy)


def test_a_proxy_has_the_connections_of_many():
    limits = ConnectionLimits(most=8, is_proxy=lambda address: address == "10.0.0.9")
    opened(limits, 8, "10.0.0.9")
    opened(limits, 1, "10.0.0.1")
    assert (len(limits.open), limits.counts["10.0.0.9"]) == (8, 7)


@pytest.mark.parametrize(
    ("files", "most"), [(256, 64), (1024, 512), (20_000, 8192), (resource.RLIM_INFINITY, 8192)]
)
def test_connections_leave_files_for_everything_else(monkeypatch, files, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert most_connections() == most


def test_the_limit_of_files_is_raised_and_said(monkeypatch):
    limits, given = (1024, 65_536), []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: given.append(new))
    assert raise_file_limit() == "open files: at most 65,536, raised from 1,024"
    assert given == [(65_536, 65_536)]
    limits = (1024, 1024)
    assert raise_file_limit() == ""

    def fail(*_):
        raise ValueError

    limits = (1024, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "setrlimit", fail)
    assert raise_file_limit() == ""
    assert connections.BACKLOG < connections._OTHER_FILES
