"""Names for writing a method, a task or a family in your own package.

Decorate a class with `register_method` or `register_task`, or pass a `Family` to `register_family`.
A process that has imported the file accepts the name in specs, recipes and saved adapters.
docs/tutorials/ has one page for each of the three.
"""

from adapterhub.anatomy import Family, Stack, register_family
from adapterhub.anatomy.sites import Anatomy, Site
from adapterhub.config.options import option
from adapterhub.data.examples import Example
from adapterhub.methods.common.base import Method, Placement, register_method
from adapterhub.methods.common.ops import (
    DeltaModule,
    FactorModule,
    stack_low_rank,
)
from adapterhub.methods.common.projections import ProjectionMethod, RankMethod
from adapterhub.methods.common.site_module import (
    EmbeddingModule,
    InputModule,
    KeyValueModule,
    OutputModule,
    SiteModule,
)
from adapterhub.tasks.common.base import Encoded, Prediction, Task, register_task

__all__ = [
    "Anatomy",
    "DeltaModule",
    "EmbeddingModule",
    "Encoded",
    "Example",
    "FactorModule",
    "Family",
    "InputModule",
    "KeyValueModule",
    "Method",
    "OutputModule",
    "Placement",
    "Prediction",
    "ProjectionMethod",
    "RankMethod",
    "Site",
    "SiteModule",
    "Stack",
    "Task",
    "option",
    "register_family",
    "register_method",
    "register_task",
    "stack_low_rank",
]
