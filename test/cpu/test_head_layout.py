"""Head plans: the padding rule, who owns which heads, and every refusal."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headfit import head_layout
from headfit.head_layout import HeadLayout, allowed_tp_sizes, attn_tp_coordinates, plan_heads

FLASHMLA = (64, 128)


def plan(num_heads, size=1, rank=0, supported=FLASHMLA, o_groups=None):
    return plan_heads(num_heads=num_heads, attn_tp_size=size, attn_tp_rank=rank, supported=supported, o_groups=o_groups)


def assert_refused(parts, call):
    """The call raises ValueError: one line that holds every part."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert not [part for part in parts if part not in message], message


@pytest.mark.parametrize(
    ("num_heads", "size", "kernel"),
    [(128, 1, 128), (128, 2, 64), (128, 4, 64), (128, 8, 64), (64, 1, 64), (64, 8, 64)],
)
def test_flashmla_pads_to_the_published_widths(num_heads, size, kernel):
    layout = plan(num_heads, size)
    assert layout.kernel_num_heads == kernel
    assert layout.num_local_heads == num_heads // size
    assert layout.is_padded == (kernel != num_heads // size)
    assert layout.waste == 1 - num_heads / size / kernel


@pytest.mark.parametrize("num_heads", [1, 4, 8, 12, 24, 40, 48, 63, 64])
def test_odd_head_counts_pad_to_64(num_heads):
    assert plan(num_heads).kernel_num_heads == 64
    assert plan(num_heads).num_local_heads == num_heads
    assert plan(num_heads, supported=None).kernel_num_heads == num_heads


@pytest.mark.parametrize("num_heads", range(65, 128))
def test_more_than_64_heads_pad_to_128(num_heads):
    assert plan(num_heads).kernel_num_heads == 128


def test_the_order_of_supported_counts_does_not_matter():
    assert plan(16, supported=(128, 32, 64)).kernel_num_heads == 32


@pytest.mark.parametrize(
    ("num_heads", "size", "o_groups", "allowed"),
    [
        (64, 6, 8, "1, 2, 4, 8"),
        (64, 16, 8, "1, 2, 4, 8"),  # divides the heads, not the groups
        (128, 6, 16, "1, 2, 4, 8, 16"),
        (128, 32, 16, "1, 2, 4, 8, 16"),
        (12, 4, 6, "1, 2, 3, 6"),
        (64, 128, 8, "1, 2, 4, 8"),
    ],
)
def test_a_tp_size_that_does_not_divide_is_refused_with_those_that_do(num_heads, size, o_groups, allowed):
    parts = [f"num_heads {num_heads}", f"o_groups {o_groups}", f"attn_tp_size {size}"]
    assert_refused([*parts, f"allowed attn_tp_size: {allowed}"], lambda: plan(num_heads, size, o_groups=o_groups))


def test_without_groups_only_the_heads_must_divide():
    assert_refused(["num_heads 12", "attn_tp_size 5", "1, 2, 3, 4, 6, 12"], lambda: plan(12, 5))
    assert plan(64, 16).num_local_heads == 4
    assert plan(64, 16).local_groups is None


def test_allowed_tp_sizes():
    assert allowed_tp_sizes(64, 8) == (1, 2, 4, 8)
    assert allowed_tp_sizes(128, 16) == (1, 2, 4, 8, 16)
    assert allowed_tp_sizes(63) == (1, 3, 7, 9, 21, 63)
    assert allowed_tp_sizes(7, 8) == (1,)


def test_more_heads_than_the_kernel_runs_are_refused():
    parts = ["129 local heads", "num_heads 129", "attn_tp_size 1", "supported: 64, 128"]
    assert_refused(parts, lambda: plan(129))
    parts = ["150 local heads", "num_heads 300", "attn_tp_size 2", "supported: 64, 128"]
    assert_refused(parts, lambda: plan(300, 2, supported=(128, 64)))
    assert plan(129, supported=None).kernel_num_heads == 129


def test_slices_of_heads_and_groups():
    layout = plan(128, 8, 5, o_groups=16)
    assert layout.local_slice == slice(80, 96)
    assert layout.local_groups == slice(10, 12)


@pytest.mark.parametrize(
    ("parts", "arguments"),
    [
        (["num_heads is 0", "from 1"], dict(num_heads=0)),
        (["num_heads is True"], dict(num_heads=True)),
        (["num_heads is 64.0", "integer"], dict(num_heads=64.0)),
        (["num_heads is 1000000", "65536"], dict(num_heads=10**6)),
        (["num_heads is '64'"], dict(num_heads="64")),
        (["attn_tp_size is 0"], dict(size=0)),
        (["attn_tp_size is True"], dict(size=True)),
        (["attn_tp_size is None"], dict(size=None)),
        (["attn_tp_rank is 4", "from 0 to 3"], dict(size=4, rank=4)),
        (["attn_tp_rank is -1"], dict(rank=-1)),
        (["attn_tp_rank is False"], dict(rank=False)),
        (["o_groups is 0"], dict(o_groups=0)),
        (["o_groups is True"], dict(o_groups=True)),
        (["supported is ()", "None or a tuple"], dict(supported=())),
        (["supported is 64"], dict(supported=64)),
        (["supported is 0"], dict(supported=(64, 0))),
        (["supported is True"], dict(supported=(True,))),
    ],
)
def test_arguments_that_are_no_counts_are_refused(parts, arguments):
    assert_refused(parts, lambda: plan(**{"num_heads": 64, **arguments}))


def test_attention_tp_rank_under_dp_attention():
    assert attn_tp_coordinates(global_rank=5, world_size=8, dp_size=2) == (1, 4)
    rank, size = attn_tp_coordinates(global_rank=5, world_size=8, dp_size=2)
    assert plan(64, size, rank).local_slice == slice(16, 32)
    assert attn_tp_coordinates(global_rank=5, world_size=8, dp_size=1) == (5, 8)
    assert attn_tp_coordinates(global_rank=5, world_size=8, dp_size=8) == (0, 1)


@pytest.mark.parametrize(
    ("parts", "coordinates"),
    [
        (["dp_size is 3", "world_size 8"], (0, 8, 3)),
        (["dp_size is 16", "world_size 8"], (0, 8, 16)),
        (["dp_size is 0"], (0, 8, 0)),
        (["dp_size is True"], (0, 8, True)),
        (["global_rank is 8", "from 0 to 7"], (8, 8, 2)),
        (["global_rank is -1"], (-1, 8, 2)),
        (["global_rank is True"], (True, 8, 2)),
        (["world_size is 0"], (0, 0, 1)),
        (["world_size is '8'"], (0, "8", 1)),
    ],
)
def test_coordinates_that_cannot_be_are_refused(parts, coordinates):
    rank, world, dp = coordinates
    assert_refused(parts, lambda: attn_tp_coordinates(global_rank=rank, world_size=world, dp_size=dp))


@given(
    num_heads=st.integers(1, 300),
    groups=st.none() | st.integers(1, 40),
    size=st.integers(1, 40),
    supported=st.none() | st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple),
)
def test_a_plan_is_the_smallest_fit_or_a_value_error(num_heads, groups, size, supported):
    divides = num_heads % size == 0 and (groups is None or groups % size == 0)
    local = num_heads // size
    fits = supported is None or local <= max(supported)
    if not (divides and fits):
        assert_refused([str(num_heads), str(size)], lambda: plan(num_heads, size, 0, supported, groups))
        return
    layouts = [plan(num_heads, size, rank, supported, groups) for rank in range(size)]
    heads = list(range(num_heads))
    assert [head for layout in layouts for head in heads[layout.local_slice]] == heads
    if groups is not None:
        every = list(range(groups))
        assert [group for layout in layouts for group in every[layout.local_groups]] == every
    for layout in layouts:
        assert len(heads[layout.local_slice]) == layout.num_local_heads == local
        assert layout.kernel_num_heads >= local
        assert 0 <= layout.waste < 1 and layout.is_padded == (layout.waste > 0)
        smaller = [] if supported is None else [n for n in supported if local <= n < layout.kernel_num_heads]
        assert not smaller and layout.kernel_num_heads in (supported or [local])


ANYTHING = st.none() | st.booleans() | st.integers(-3, 200) | st.integers() | st.floats() | st.text(max_size=3)


@given(num_heads=ANYTHING, size=ANYTHING, rank=ANYTHING, groups=ANYTHING, supported=ANYTHING | st.tuples(ANYTHING))
def test_arbitrary_arguments_give_a_plan_or_a_value_error(num_heads, size, rank, groups, supported):
    try:
        layout = plan(num_heads, size, rank, supported, groups)
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert isinstance(layout, HeadLayout) and layout.num_local_heads * size == num_heads and rank < size


@given(dp=st.integers(1, 8), size=st.integers(1, 8))
def test_every_dp_group_holds_each_attention_tp_rank_once(dp, size):
    world = dp * size
    found = [attn_tp_coordinates(global_rank=rank, world_size=world, dp_size=dp) for rank in range(world)]
    assert found == [(rank, size) for rank in range(size)] * dp


def test_a_layout_is_frozen():
    with pytest.raises(AttributeError):
        plan(64).num_heads = 128
    assert plan(64) == plan(64) and hash(plan(64)) == hash(plan(64))


def test_the_file_names_no_kernel_head_count():
    assert not re.search(r"\b(64|128)\b", Path(head_layout.__file__).read_text())
