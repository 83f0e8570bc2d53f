"""The attention-TP group: what it refuses, and data-parallel attention over real subgroups."""

import pytest
import torch
import torch.distributed as dist

from headfit.distributed import AttnTPGroup
from headfit.launch import run_local_ranks


@pytest.mark.parametrize(
    ("rank", "size", "error"), [(2, 2, ValueError), (-1, 2, ValueError), (0, 0, ValueError), (True, 2, TypeError)]
)
def test_wrong_coordinates_are_named(rank, size, error):
    with pytest.raises(error, match=r"(rank|size): .*allowed"):
        AttnTPGroup(rank, size)


def test_more_than_one_rank_needs_torch_distributed():
    with pytest.raises(RuntimeError, match="needs torch"):
        AttnTPGroup(0, 2).all_reduce(torch.ones(1))


def test_partial_results_and_one_rank_need_nothing():
    x = torch.ones(2)
    assert AttnTPGroup(1, 4, reduce_results=False).all_reduce(x) is x
    assert AttnTPGroup().broadcast(x) is x


def sums_of_four(group, device):
    """Four ranks as two attention-TP groups of two, ranks 0 and 2 and ranks 1 and 3."""
    subgroups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    attention = AttnTPGroup(group.rank // 2, 2, process_group=subgroups[group.rank % 2])
    summed = attention.all_reduce(torch.tensor([10.0**group.rank]))
    first = attention.broadcast(torch.tensor([group.rank]))
    try:
        AttnTPGroup(group.rank // 2, 2).all_reduce(torch.ones(1))
        refused = ""
    except ValueError as error:
        refused = str(error)
    found = [None] * 4
    dist.all_gather_object(found, (summed.item(), first.item(), refused))
    return found


def test_data_parallel_attention_over_subgroups():
    found = run_local_ranks(sums_of_four, 4, timeout=120)
    assert [summed for summed, _, _ in found] == [101, 1010, 101, 1010]
    assert [first for _, first, _ in found] == [0, 1, 0, 1]
    for rank, (_, _, refused) in enumerate(found):
        assert f"this process is rank {rank} of 4" in refused and "pass its own process group" in refused
