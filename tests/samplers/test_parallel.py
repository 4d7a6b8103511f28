"""The data-parallel rank and size: from mmengine, from two numbers, from a device mesh."""

import subprocess
import sys

import pytest

from xlength.samplers.parallel import data_parallel_info


def test_a_single_process_is_rank_zero_of_one():
    assert data_parallel_info() == (0, 1)
    assert data_parallel_info(device_mesh=dict(dp=1, sp=1)) == (0, 1)


def test_given_numbers_decide():
    assert data_parallel_info(2, 4) == (2, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dp_rank=4, dp_world_size=4), r"in \[0, dp_world_size\), got dp_rank=4 and"),
        (dict(dp_rank=-1, dp_world_size=4), "got dp_rank=-1"),
        (dict(dp_rank=1), "belong together, got dp_rank=1 and dp_world_size=None"),
        (dict(dp_world_size=2), "belong together"),
        (dict(dp_rank="0", dp_world_size=2), "whole numbers, got dp_rank='0'"),
        (dict(dp_rank=0, dp_world_size=1, device_mesh=dict(dp=1)), "not both"),
        (dict(mesh_dim="dp"), "mesh_dim='dp' needs device_mesh"),
        (dict(device_mesh=dict(dp=2, sp=2)), "has 4 places for 1 processes"),
        (dict(device_mesh=dict(dp=0)), "sizes must be whole numbers of at least 1"),
        (dict(device_mesh=dict(tp=1)), r"mesh_dim 'dp' is no dimension .* \['tp'\]"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        data_parallel_info(**options)


MESHES = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from xlength.samplers.parallel import data_parallel_info as info

dist.init_process_group('fake', store=FakeStore(), rank=5, world_size=8)
assert info() == (5, 8)
mesh = init_device_mesh('cpu', (2, 2, 2), mesh_dim_names=('pp', 'dp', 'tp'))
assert info(device_mesh=mesh) == info(device_mesh=dict(pp=2, dp=2, tp=2)) == (0, 2)
assert info(device_mesh=mesh, mesh_dim='pp') == (1, 2)
assert info(device_mesh=mesh, mesh_dim=('pp', 'tp')) == (3, 4)
assert info(device_mesh=dict(dp=4, sp=2)) == (2, 4)

from xlength import LengthGroupedSampler, PlanSampler
from xlength.plan import FixedBatch

class Rows(list):
    length = [5, 9, 4, 1, 7, 8, 6, 2]

for make in (LengthGroupedSampler, PlanSampler):
    how = 1 if make is LengthGroupedSampler else FixedBatch(1)
    sampler = make(Rows(range(8)), how, seed=0, device_mesh=dict(dp=4, sp=2))
    assert (sampler.rank, sampler.world_size) == (2, 4)
print('fine')
"""


def test_ranks_of_one_tensor_parallel_group_have_one_data_parallel_rank():
    # Eight ranks' mesh without eight processes: torch's own fake process group.
    done = subprocess.run([sys.executable, "-c", MESHES], capture_output=True, text=True)
    assert done.stdout.endswith("fine\n"), done.stderr
