"""Which data-parallel rank this process is, and of how many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from mmengine.dist import get_rank, get_world_size


def data_parallel_info(
    dp_rank: int | None = None,
    dp_world_size: int | None = None,
    device_mesh: Any = None,
    mesh_dim: str | Sequence[str] | None = None,
) -> tuple[int, int]:
    """Rank and size of the data-parallel group; processes that share a rank see the same samples.

    By default every process is a data-parallel rank of its own (mmengine's global rank and size).
    Under sequence, tensor or pipeline parallelism give either the two numbers or a device mesh.
    Nothing is communicated.

    Args:
        dp_rank, dp_world_size: given together.
        device_mesh: a ``torch.distributed.device_mesh.DeviceMesh``; or, as a config can hold it,
            its dimensions as ``dict(dp=4, sp=2)``: names and sizes from the outermost (slowest)
            in, over the global ranks in order.
        mesh_dim: name of the data-parallel dimension, by default ``'dp'``; several names, outermost
            first, count as one, as in ``('dp_replicate', 'dp_shard')``.

    Returns:
        (rank, world_size) with 0 <= rank < world_size.

    Raises:
        ValueError: numbers out of range, only one of a pair, both numbers and a mesh, or an unknown
            dimension.
    """
    if device_mesh is not None:
        if dp_rank is not None or dp_world_size is not None:
            raise ValueError("give either dp_rank and dp_world_size or device_mesh, not both")
        return _from_mesh(device_mesh, mesh_dim or "dp")
    if mesh_dim is not None:
        raise ValueError(
            f"mesh_dim={mesh_dim!r} needs device_mesh: a DeviceMesh, or its dimensions as "
            "dict(dp=4, sp=2)"
        )
    given = f"dp_rank={dp_rank!r} and dp_world_size={dp_world_size!r}"
    if dp_rank is None and dp_world_size is None:
        return get_rank(), get_world_size()
    if dp_rank is None or dp_world_size is None:
        raise ValueError(f"dp_rank and dp_world_size belong together, got {given}")
    if not (_is_int(dp_rank) and _is_int(dp_world_size)):
        raise ValueError(f"dp_rank and dp_world_size must be whole numbers, got {given}")
    if not 0 <= dp_rank < dp_world_size:
        raise ValueError(f"dp_rank must be in [0, dp_world_size), got {given}")
    return dp_rank, dp_world_size


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _from_mesh(device_mesh: Any, mesh_dim: str | Sequence[str]) -> tuple[int, int]:
    if isinstance(device_mesh, Mapping):
        names, sizes, place = _from_dict(device_mesh)
    elif device_mesh.mesh_dim_names is None:
        raise ValueError(
            "device_mesh has no mesh_dim_names: its data-parallel dimension is unknown"
        )
    elif device_mesh.get_coordinate() is None:
        raise ValueError("this process is not part of device_mesh")
    else:
        names, sizes = list(device_mesh.mesh_dim_names), list(device_mesh.shape)
        place = list(device_mesh.get_coordinate())
    rank, world_size = 0, 1
    for name in [mesh_dim] if isinstance(mesh_dim, str) else mesh_dim:
        if name not in names:
            raise ValueError(f"mesh_dim {name!r} is no dimension of device_mesh, which has {names}")
        position = names.index(name)
        rank = rank * sizes[position] + place[position]
        world_size *= sizes[position]
    return rank, world_size


def _from_dict(device_mesh: Mapping[str, Any]) -> tuple[list[str], list[int], list[int]]:
    """Names, sizes, and this process's place in each dimension."""
    names, sizes = list(device_mesh), list(device_mesh.values())
    if not all(_is_int(size) and size >= 1 for size in sizes):
        raise ValueError(f"device_mesh sizes must be whole numbers of at least 1, got {sizes}")
    if prod(sizes) != get_world_size():
        raise ValueError(
            f"device_mesh {dict(device_mesh)} has {prod(sizes)} places for "
            f"{get_world_size()} processes"
        )
    place: list[int] = []
    rest = get_rank()
    for size in reversed(sizes):
        place.insert(0, rest % size)
        rest //= size
    return names, sizes, place
