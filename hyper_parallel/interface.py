"""What an adapter supplies: the Platform protocol. Adapters are registered as entry points, ours like any other.

``Tensor`` below is the framework's tensor, ``Scalar`` a 0-d tensor of the platform's widest float (float64 where
the device has it) and ``Buffer`` a 1-d tensor of the same dtype. Scalars support ``+ - * / // ** < >`` with Python
numbers and each other, and no operation on them waits for the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.norm import NormKind
from hyper_parallel.core.placement import Placement

Tensor: TypeAlias = Any
Scalar: TypeAlias = Any
Buffer: TypeAlias = Any
DeviceMesh: TypeAlias = Any

LAYOUT_ATTRIBUTE = "hyper_parallel_layout"
"""Where ``attach_layout`` keeps the ``Layout`` of a plain tensor that holds a local shard."""

SHARED_ATTRIBUTE = "hyper_parallel_shared_key"
"""Where ``mark_shared`` keeps the key of a parameter that several pipeline stages hold."""


@dataclass(frozen=True, slots=True)
class Description:
    """One parameter, or its gradient where that lies differently.

    ``local_shape`` is the shape of the local tensor, ``global_shape`` that of the whole.
    """

    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    layout: Layout | None
    requires_grad: bool


class Parameters(Protocol):
    """Finding parameters and what they hold."""

    def parameters(self, source: Any) -> tuple[list[Tensor], list[str]]:
        """The tensors of a module, a tensor or an iterable (read once), and their names; none for an iterable.

        Raises:
            TypeError: something else than the framework's tensors is among them.
        """
        ...

    def gradients(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None] | None
    ) -> tuple[list[Tensor | None], Sequence[Hashable]]:
        """The local gradient of each parameter, and a signature that changes whenever ``describe`` would.

        A gradient is the one given, else ``main_grad``, else ``grad``; None if there is none or if the
        parameter is frozen. This runs on every call: keep it to reading attributes.
        """
        ...

    def describe(self, parameter: Tensor, gradient: Tensor | None) -> Description:
        """What the plan needs to know of one parameter."""
        ...

    def carries_gradient(self, parameter: Tensor) -> bool:
        """Whether the tensor may have a gradient of its own, or rather looks like a gradient itself."""
        ...


class Collectives(Protocol):
    """Communication. Every rank of ``ranks`` calls with the same arguments, in the same order."""

    def rank(self) -> int:
        """This process's global rank; 0 without a process group."""
        ...

    def groups(self) -> frozenset[tuple[int, ...]]:
        """The sorted rank tuples that a process group is known for on this rank."""
        ...

    def all_reduce(self, buffer: Buffer, reduce_op: str, ranks: tuple[int, ...]) -> Buffer:
        """One all-reduce, ``sum`` or ``max``, that gives the same bits on every rank. ``buffer`` is used up."""
        ...

    def reduce_scatter(self, buffer: Buffer, reduce_op: str, ranks: tuple[int, ...]) -> Buffer:
        """Reduce a flat buffer by ``sum``, ``max`` or ``min``; of as many equal slices as ranks, return this rank's.

        Slices go to the ranks in the order of ``ranks``. ``buffer`` is used up.
        """
        ...

    def all_gather_object(self, value: Any, ranks: tuple[int, ...]) -> list[Any]:
        """The values of all ranks, in the order of ``ranks``; when planning and on the way to an error."""
        ...


class TensorMath(Protocol):
    """Arithmetic on local tensors."""

    def check_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Look whether ``scale_`` can write to the tensors, by their metadata alone.

        Raises:
            ValueError: it cannot (an expanded tensor, say).
        """
        ...

    def statistic(self, tensors: Sequence[Tensor], kind: NormKind, foreach: bool | None) -> Scalar:
        """The statistic of all elements of at least one tensor, accumulated in float32 or wider; NaN survives.

        Raises:
            RuntimeError: ``foreach=True`` where there are no foreach kernels.
            ValueError: a tensor cannot be scaled in place (an expanded one, say).
        """
        ...

    def pack(self, values: Sequence[Scalar | float], like: Tensor | None) -> Buffer:
        """A new buffer on the device of ``like``, or where the process group works."""
        ...

    def read(self, buffer: Buffer, wait: bool) -> list[float] | None:
        """The values on the host; None if that would wait for the device and ``wait`` is False."""
        ...

    def where(self, condition: Any, true: Any, false: Any) -> Scalar:
        """``true`` where ``condition`` holds, else ``false``; either may be a Python number."""
        ...

    def cast(self, scalar: Scalar | float, dtype: Any, like: Tensor | None) -> Tensor:
        """A 0-d tensor of ``dtype``, on the device of ``like``; dtype None means float32."""
        ...

    def promoted_dtype(self, tensors: Sequence[Tensor]) -> Any:
        """The dtype that arithmetic between all ``tensors`` gives."""
        ...

    def scale_(self, tensors: Sequence[Tensor], coefficient: Tensor, foreach: bool | None) -> None:
        """Multiply in place by a 0-d float32 tensor, rounding once; tensors that share memory are scaled once."""
        ...

    def scaled(self, gradients: Sequence[Tensor], coefficient: Tensor) -> list[Tensor]:
        """The same products as new tensors of the same kind and dtype as ``gradients``."""
        ...

    def flatten(
        self, pieces: Sequence[tuple[Tensor | None, int, int]], numel: int, fill: float, like: Tensor | None
    ) -> Buffer:
        """A new float32 buffer of ``numel`` elements: of each tensor elements start to stop, one after another.

        ``fill`` stands for missing tensors and at the end.
        """
        ...

    def clamp_(self, tensors: Sequence[Tensor], bound: float, foreach: bool | None) -> None:
        """Clamp in place to between ``-bound`` and ``bound``."""
        ...

    def checksum(self, tensor: Tensor) -> Scalar:
        """A number that two tensors share only if, but for an unlikely chance, their elements are the same."""
        ...

    def nonfinite_count(self, tensor: Tensor) -> int:
        """How many elements are NaN or infinite; waits for the device."""
        ...


class Construction(Protocol):
    """The portable way to build sharded tensors. On torch these are torch's own objects."""

    def init_device_mesh(
        self, device_type: str, mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...] | None
    ) -> DeviceMesh: ...

    def distribute_tensor(
        self, tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> Tensor: ...

    def dtensor_from_local(
        self, local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...] | None
    ) -> Tensor: ...

    def is_dtensor(self, value: Any) -> bool: ...

    def layout(
        self, mesh: DeviceMesh, placements: Sequence[Placement], global_shape: tuple[int, ...]
    ) -> Layout: ...

    def mesh(self, mesh: DeviceMesh) -> Mesh:
        """The core's mesh of a device mesh or of a process group."""
        ...


class Conversion(Protocol):
    """To and from NumPy, for the parity suite."""

    def from_numpy(self, array: Any, dtype: str, device_type: str) -> Tensor:
        """A tensor of ``dtype`` ("float32", "bfloat16", ...) with the values of a NumPy array."""
        ...

    def to_numpy(self, tensor: Tensor) -> Any:
        """The values of a local tensor, or of a DTensor's, as a float64 NumPy array."""
        ...

    def parameter(self, tensor: Tensor) -> Tensor:
        """A trainable parameter that holds ``tensor``."""
        ...


class Platform(Parameters, Collectives, TensorMath, Construction, Conversion, Protocol):
    """One framework, on every device it drives."""

    name: str
