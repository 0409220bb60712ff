"""Choose which attached adapters are active."""

from __future__ import annotations

from transformers import PreTrainedModel

from adapterhub.adapters.state import get_state, refuse_in_route
from adapterhub.hooks.composition import Average, parse_composition


def activate(model: PreTrainedModel, *parts: str | Average) -> None:
    """Make exactly these adapters active, in this order; without names, none.

    `activate(model, "a", "b")` is a stack: b gets the output of a. `Average(["a", "b"])` is their
    mean, and may be used like a name. What trains does not change. The head is that of the last
    adapter that has one; for an average, the mean of the heads' outputs.

    In other threads it takes effect with the next forward pass. A pass during which heads, labels
    or backbone parameters are exchanged raises an `AttachError`.

    Raises:
        AttachError: a name that is not attached, two adapters that train one parameter, or an
            average of adapters that cannot be averaged. What was active stays active.
    """
    state = get_state(model)
    refuse_in_route(state)
    state.activate(parse_composition(parts))
