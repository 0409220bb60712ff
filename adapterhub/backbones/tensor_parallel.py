"""Tensor parallel models of transformers: each process computes a share of the features.

`from_pretrained(..., tp_plan="auto")` divides projections over N processes by the plan of the
architecture: some by output features, some by input features. So a sublayer takes and returns whole
activations, and process p computes share p of the activations in between.

    y_p = W_p x                by output features, W = [W_1; ...; W_N]
    y = sum_p W_p x_p          by input features,  W = [W_1, ..., W_N]

Every process has whole adapters, which compute on whole activations. `Share.whole` gathers the
shares of an activation x; its gradient is this process's share of the gradient of x. `Share.own`
takes this process's share of x; its gradient is gathered. So every process computes bit-identical
gradients of an adapter, and gradients need not be summed.

Shoeybi et al. 2019, "Megatron-LM", section 3, https://arxiv.org/abs/1909.08053.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from adapterhub.anatomy.backbone import Backbone, is_transformers
from adapterhub.errors import BackboneError, ConfigError, SiteError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_INSIDE = ("moe_tp_experts", "moe_identity_expert", "local_params", "packed_rowwise")


@dataclass(frozen=True)
class Share:
    """A division of the features of an activation over processes.

    Attributes:
        mesh: the processes.
        placement: the features of each process, as a placement of torch's DTensor.
        width: the total number of features.
    """

    mesh: DeviceMesh
    placement: Any
    width: int

    def whole(self, x: Tensor) -> Tensor:
        """Gather the shares of all processes, (..., own features) -> (..., width)."""
        from torch.distributed.tensor import DTensor, Replicate  # torch without distributed

        shape = torch.Size((*x.shape[:-1], self.width))
        stride = torch.empty(shape, device="meta").stride()
        split = DTensor.from_local(
            x, self.mesh, [self.placement], run_check=False, shape=shape, stride=stride
        )
        gathered: Tensor = split.redistribute(placements=[Replicate()]).to_local()
        return gathered

    def own(self, x: Tensor) -> Tensor:
        """Return the share of this process, (..., width) -> (..., own features)."""
        from torch.distributed.tensor import DTensor, Replicate  # torch without distributed

        same = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        share: Tensor = same.redistribute(placements=[self.placement]).to_local()
        return share


class Boundary(NamedTuple):
    """The shares that a projection takes and returns; None means whole activations."""

    input: Share | None = None
    output: Share | None = None


WHOLE = Boundary()


@dataclass(frozen=True)
class TensorParallel:
    """The division of a model over processes."""

    model: PreTrainedModel
    mesh: DeviceMesh

    @cached_property
    def styles(self) -> Mapping[str, Any]:
        """The division of each module, by path; `*` stands for the number of a layer."""
        from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

        plan = self.model.tp_plan
        return {path: (name, ALL_PARALLEL_STYLES[name]) for path, name in plan.items()}

    def boundary(self, path: str, width: int) -> Boundary:
        """Return the shares that a module takes and returns; `width` counts all features.

        Raises:
            SiteError: adapters do not support the division of the module.
        """
        planned = self.styles.get(_pattern(path))
        if planned is None:
            return self._between(path, width)
        name, style = planned
        if name in _INSIDE:
            raise SiteError(
                f"{path} is divided by the tensor parallel style {name!r}, which adapters do not "
                "know",
                expected="sites at projections that are divided by columns or rows",
                hint="sites=[...] without it, or train.shard=true (FSDP2) in place of tensor "
                "parallelism",
            )
        module: Any = self.model.get_submodule(path)
        takes = getattr(style, "input_layouts", None)
        gives = getattr(style, "output_layouts", None)
        if factor := getattr(style, "split_factor", None):
            from torch.distributed.tensor.placement_types import _StridedShard

            gives = _StridedShard(dim=-1, split_factor=factor)
        return Boundary(
            self._share(takes, getattr(module, "in_features", 0)),
            self._share(gives, getattr(module, "out_features", 0)),
        )

    def _between(self, path: str, width: int) -> Boundary:
        """Return the boundary of a module without a plan: it returns shares if the next takes them.

        An example is the activation function between the two projections of an FFN.
        """
        if any(True for _ in self.model.get_submodule(path).parameters()):
            return WHOLE
        parent = path.rpartition(".")[0]
        names = (n for n, _ in self.model.get_submodule(parent).named_children())
        beside = [f"{parent}.{name}" for name in names]
        planned = (self.boundary(p, width) for p in beside if _pattern(p) in self.styles)
        share = next((b.input for b in planned if b.input and b.input.width == width), None)
        return Boundary(share, share)

    def features(self, width: int) -> Share:
        """Return a division of `width` features into pieces of equal size, such as heads."""
        from torch.distributed.tensor import Shard

        return Share(self.mesh, Shard(-1), width)

    def read_by_own(self, x: Tensor) -> Tensor:
        """Return x for computing this process's features; its gradient is summed."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        same = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        read: Tensor = same.to_local(grad_placements=[Partial()])
        return read

    def _share(self, layout: Any, width: int) -> Share | None:
        from torch.distributed.tensor import Shard

        divided = isinstance(layout, Shard) or hasattr(layout, "split_factor")
        return Share(self.mesh, layout, width) if divided else None

    def draw_alike(self) -> None:
        """Set the random generators of all processes to the state of the first one."""
        import torch.distributed as dist

        group = self.mesh.get_group()
        states = [torch.get_rng_state().numpy().tobytes()]
        dist.broadcast_object_list(states, dist.get_process_group_ranks(group)[0], group)
        torch.set_rng_state(torch.frombuffer(bytearray(states[0]), dtype=torch.uint8))


def _pattern(path: str) -> str:
    """Replace the numbers in a path with `*`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def tensor_parallel(model: nn.Module) -> TensorParallel | None:
    """Return transformers' division of a model; None if not divided, or also divided by FSDP2."""
    if not Backbone.of(model).divided:
        return None
    assert is_transformers(model)
    mesh: Any = getattr(model, "_device_mesh", None)
    if find_spec("transformers.distributed.parallel_utils") is None:  # an older transformers
        return None
    return TensorParallel(model, mesh["tp"] if mesh.ndim > 1 else mesh)


def planned_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the part of a configuration that has a tensor parallel plan, if any."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    with_plan = (p for p in parts if p is not None and getattr(p, "base_model_tp_plan", None))
    return next(with_plan, None)


def loading_by_plan(folder: Path) -> dict[str, Any]:
    """Return the options of `from_pretrained` that divide a model over the processes of a run.

    Raises:
        BackboneError: the architecture lacks a tensor parallel plan, or its sizes do not divide.
        ConfigError: the installed transformers is too old, or there is only one process.
    """
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "the installed transformers has no tensor parallel plans that can train",
            hint='pip install --upgrade "transformers>=5.23"',
        ) from error
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        raise ConfigError(
            "a model is divided over the processes of torchrun, and there is only one",
            hint="torchrun --nproc-per-node N SCRIPT",
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if (planned := planned_config(config)) is None:
        raise BackboneError(
            f"transformers has no tensor parallel plan for {config.model_type}",
            hint="train.shard=true (FSDP2), which divides every architecture",
        )
    heads = getattr(planned, "num_key_value_heads", None) or planned.num_attention_heads
    if heads % count:
        raise BackboneError(
            f"the {heads} heads of keys and values of this {config.model_type} do not divide into "
            f"{count} processes",
            expected=f"a number of processes that divides {heads}",
            hint="torchrun --nproc-per-node N, or train.shard=true (FSDP2)",
        )
    return {"distributed_config": DistributedConfig(tp_size=count, tp_plan="auto")}
