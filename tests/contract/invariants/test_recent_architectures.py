"""Methods on the architectures that people use in 2026, rows or not: tiny, random, and run.

Each cell is attached, starts as its method says, learns, equals a generation step with a cache, is
saved and loaded, and leaves the backbone as it was (scripts/sweep_cells.py). What is refused is in
a table, and nothing else is. A core subset by default, all with ADAPTERHUB_MATRIX=full.
"""

from __future__ import annotations

from functools import lru_cache

import every_type
import sweep_cells

from tests.kit import matrix, tiny_models
from tests.kit.selection import long_table

TYPES = matrix.RECENT_TYPES if tiny_models.FULL_MATRIX else matrix.RECENT_CORE
CELLS = [(method, t) for t in TYPES for method in matrix.RECENT_METHODS]


@lru_cache(maxsize=2)
def built(model_type):
    auto = every_type.autos(model_type, every_type.ADAPTED)[0]
    model = every_type.build(model_type, auto, tiny=True)
    assert model is not None
    inputs = sweep_cells.inputs_for(model)
    assert inputs is not None, "nothing is known that it runs on"
    return model, inputs


def test_the_table_is_complete():
    assert len(matrix.RECENT_TYPES) == len(set(matrix.RECENT_TYPES)) >= 52
    assert set(matrix.RECENT_CORE) < set(matrix.RECENT_TYPES) <= set(every_type.TYPES)
    assert {t for _, t in matrix.RECENT_REFUSED} <= set(matrix.RECENT_TYPES)
    assert {m for m, _ in matrix.RECENT_REFUSED} <= set(matrix.RECENT_METHODS)
    assert len(matrix.RECENT_TYPES) * len(matrix.RECENT_METHODS) - len(matrix.RECENT_REFUSED) >= 393


@long_table(("method", "model_type"), CELLS, parts=2)
def test_a_method_works_or_is_refused_as_the_table_says(method, model_type):
    found = sweep_cells.cell(built(model_type)[0], method, built(model_type)[1])
    if reason := matrix.RECENT_REFUSED.get((method, model_type)):
        assert found.startswith("refused: ")
        assert reason in found
    else:
        not_reached = (method, model_type) in matrix.NOT_REACHED
        assert found == ("ok, not run" if not_reached else "ok")
