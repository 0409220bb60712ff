"""Methods at the size of another one."""

from __future__ import annotations

import dataclasses

import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterhub.anatomy.build import anatomy_of
from adapterhub.bench.equal_size import LARGEST, NEAR, count_of, equal_sized, is_near
from adapterhub.methods import METHODS
from adapterhub.methods._base import Method

ANATOMY = anatomy_of(tiny_models.model("bert", "classification"))
SIZED = sorted(name for name, method in METHODS.items() if method.sized_by)


def test_the_sized_methods_are_known() -> None:
    assert len(SIZED) == 15
    unsized = sorted(set(METHODS) - set(SIZED))
    assert unsized == [
        "adapterfusion", "bitfit", "chosen", "freeze", "full", "head", "ia3", "norms",
        "scalar-mix", "staged", "unfreeze",
    ]  # fmt: skip


@pytest.mark.parametrize("name", SIZED)
def test_the_number_of_parameters_grows_with_the_size(name: str) -> None:
    method = METHODS[name].example()
    option = method.sized_by
    assert option in {field.name for field in dataclasses.fields(method)}  # type: ignore[arg-type]
    counts = [_sized(method, size).count(ANATOMY) for size in (1, 2, 8)]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize("name", SIZED)
@settings(max_examples=15, deadline=None)
@given(st.integers(10, 2_000_000))
def test_a_size_is_near_the_target_or_there_is_none(name: str, target: int) -> None:
    method = METHODS[name].example()
    found = equal_sized(method, target, ANATOMY)
    if found is not None:
        assert is_near(found.count(ANATOMY), target)
        rest = {f.name for f in dataclasses.fields(found)} - {found.sized_by}  # type: ignore[arg-type]
        assert all(getattr(found, n) == getattr(method, n) for n in rest)
    elif not is_near(method.count(ANATOMY), target):
        one, two, most = (_sized(method, size).count(ANATOMY) for size in (1, 2, LARGEST))
        coarse = (target + two - one) / target > NEAR
        assert coarse or not one <= target <= most


def _sized(method: Method, size: int) -> Method:
    sized: Method = dataclasses.replace(method, **{str(method.sized_by): size})  # type: ignore[type-var]
    return sized


def test_methods_without_a_size_stay_as_they_are() -> None:
    assert equal_sized(METHODS["full"].example(), 100, ANATOMY) is None
    assert count_of([METHODS["lora"].example()], ANATOMY) == METHODS["lora"].example().count(
        ANATOMY
    )
