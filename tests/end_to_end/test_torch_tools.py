"""Tools of torch that watch a run: what CommDebugMode counts, and the ranges in a profile."""

from typing import Any

from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

from tests.end_to_end.losses_cases import made
from tests.end_to_end.training_cases import Net, batch, loss_of

GATHERS = "_allgather_base_"
REDUCTIONS = ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")  # FSDP2's, and ours


def counted(model: Any, rank: int, step: int) -> list[tuple[int, int]]:
    """All-gathers and reduce-scatters of a forward, of its backward, and of both under one mode."""
    with CommDebugMode() as forward:
        loss = loss_of(model(batch(rank, step)))
    with CommDebugMode() as backward:
        loss.backward()
    with CommDebugMode() as both:
        loss_of(model(batch(rank, step))).backward()
    found = []
    for mode in (forward, backward, both):
        counts = {packet.__name__: n for packet, n in mode.get_comm_counts().items()}
        reductions = sum(counts.pop(name, 0) for name in REDUCTIONS)
        found.append((counts.pop(GATHERS, 0), reductions))
        assert not counts
    return found


def counts(rank: int, world_size: int) -> None:
    ours, theirs = made("fully_shard", Net), made("fsdp2", Net)
    for step in range(3):  # the first call traces
        assert counted(ours, rank, step) == counted(theirs, rank, step) == [(4, 0), (3, 4), (7, 4)]


def test_comm_debug_mode_counts_as_for_fsdp2(ranks: Any) -> None:
    ranks(2).run(counts)


def ranges(model: Any, rank: int) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as run:
        loss_of(model(batch(rank))).backward()
    return {e.key: e.count for e in run.key_averages() if e.key.startswith(("FSDP", "fxshard"))}


def profiles(rank: int, world_size: int) -> None:
    ours, theirs = made("fully_shard", Net), made("fsdp2", Net)
    loss_of(ours(batch(rank))).backward()
    mine, expected = ranges(ours, rank), ranges(theirs, rank)
    for name, count in expected.items():
        if name.startswith(("FSDP::all_gather (", "FSDP::post_backward_reduce")):
            assert mine[name] == count, (name, mine)
    assert {name for name in mine if name.startswith("FSDP")} <= expected.keys()
    assert any(name.startswith("fxshard::region_") and name.endswith("(blocks.1)") for name in mine)


def test_rows_are_ranges_of_a_profile_with_fsdp2_s_names(ranks: Any) -> None:
    ranks(2).run(profiles)


def test_without_a_profiler_there_are_none() -> None:
    model = made("in_process", Net)
    model(batch(0)).sum().backward()
    (variant,) = model._fxshard.variants.values()
    assert variant.executor._in_ranges is None and "record_function" not in variant.executor.code
