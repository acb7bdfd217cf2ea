"""Checkpoints: torch.distributed.checkpoint across world sizes and wrappers, and crashes in it."""

import copy
import dataclasses
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fxshard
from fxshard.errors import CheckpointError
from fxshard.runtime.checkpoint import files
from tests.fsdp2 import adamw, full
from tests.ranks import told
from tests.runtime.test_module import built, compiled, load, reference, save, train
from tests.zoo import MODELS

KINDS = ("fxshard", "fsdp2", "plain")


def made(kind: str, name: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    case = MODELS[name]
    if kind == "fsdp2":
        model = reference(case)
    else:
        model = case.build()
        if kind in ("in_backward", "on_shards"):  # see tests/codegen/test_optimizer_in_program.py
            own: dict[str, Any] = {} if dist.is_initialized() else {"world_size": 2}
            own |= {"optimizer": adamw, "optimizer_in_backward": kind == "in_backward"}
            model = fxshard.compile(model, units=case.units, **own)
            return model, model.optimizer
        if kind != "plain":
            options: dict[str, Any] = {} if dist.is_initialized() else {"world_size": 2}
            if kind != "fxshard":
                options |= {"strategy": kind}
            if kind == "hybrid_shard":
                names = ("copies", "shard")
                options |= {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=names)}
            model = fxshard.compile(model, units=case.units, **options)
    return model, adamw(model.parameters())


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that a checkpoint holds, whole; collective."""
    found = {f"model.{key}": full(value) for key, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"optimizer.{name}.{key}"] = full(value)
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    for key in a:
        assert torch.equal(a[key], b[key]), key


# -- state dicts of torch.distributed.checkpoint ---------------------------------------------------


def exchanged(
    rank: int, world_size: int, name: str, options: StateDictOptions, kind: str = "fxshard"
) -> None:
    """State of a trained model goes into a fresh one, of the plain model too if it is full."""
    case = MODELS[name]
    source, optimizer = made(kind, name)
    train(case, source, optimizer, 0, 2)
    model_state, optimizer_state = copy.deepcopy(  # not to share tensors with what is loaded
        (
            get_model_state_dict(source, options=options),
            get_optimizer_state_dict(source, optimizer, options=options),
        )
    )
    if options.full_state_dict and options.cpu_offload:
        assert (rank == 0) == bool(model_state)
    tensors = [v for v in model_state.values() if isinstance(v, Tensor)]
    if options.full_state_dict:
        assert all(type(v) is Tensor for v in tensors)
    elif name == "mlp13":
        assert all(isinstance(v, DTensor) for v in tensors)
    target, other = made(kind, name, seed=1)
    given = copy.deepcopy((model_state, optimizer_state))  # torch changes what it is given
    set_model_state_dict(target, given[0], options=options)
    set_optimizer_state_dict(target, other, given[1], options=options)
    assert_same(values(target, other), values(source, optimizer))
    if options.full_state_dict and not options.cpu_offload:
        plain, plain_optimizer = made("plain", name, seed=1)
        set_model_state_dict(plain, copy.deepcopy(model_state))
        set_optimizer_state_dict(plain, plain_optimizer, copy.deepcopy(optimizer_state))
        assert_same(values(plain, plain_optimizer), values(source, optimizer))
        # ... and back from the plain model into the sharded one
        target, other = made(kind, name, seed=1)
        set_model_state_dict(target, plain.state_dict(), options=options)
        state = copy.deepcopy(get_optimizer_state_dict(plain, plain_optimizer))
        set_optimizer_state_dict(target, other, state, options=options)
        assert_same(values(target, other), values(source, optimizer))
    assert train(case, target, other, 2, 4) == train(case, source, optimizer, 2, 4)


@pytest.mark.parametrize(
    "options",
    [
        StateDictOptions(),
        StateDictOptions(cpu_offload=True),
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
    ],
    ids=["sharded", "sharded on CPU", "full", "full from rank 0"],
)
@pytest.mark.parametrize("name", ["mlp13", "tied", "convnet"])
@pytest.mark.sample(2)
def test_state_dicts(ranks: Any, name: str, options: StateDictOptions) -> None:
    ranks(2).run(exchanged, name, options)


def test_full_state_dicts_without_a_process_group() -> None:
    exchanged(0, 1, "mlp13", StateDictOptions(full_state_dict=True))


# -- resharding ------------------------------------------------------------------------------------


def saved_and_trained_on(
    rank: int, world_size: int, kind: str, name: str, path: str
) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Saves after step 2: the values then; losses of steps 3 and 4; the values after those."""
    model, optimizer = made(kind, name)
    train(MODELS[name], model, optimizer, 0, 2)
    save(model, optimizer, path)
    at_save = values(model, optimizer)
    return at_save, train(MODELS[name], model, optimizer, 2, 4), values(model, optimizer)


def loaded(
    rank: int, world_size: int, kind: str, name: str, path: str, again: str | None = None
) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """As `saved_and_trained_on`, from the checkpoint; written once more to `again`."""
    model, optimizer = made(kind, name, seed=1)
    load(model, optimizer, path)
    at_load = values(model, optimizer)
    if again:
        save(model, optimizer, again)
    return at_load, train(MODELS[name], model, optimizer, 2, 4), values(model, optimizer)


@pytest.mark.parametrize(
    "name", ["mlp13", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tied", "convnet"))]
)
def test_resharding(ranks: Any, tmp_path: Path, name: str) -> None:
    """2 -> 4 -> 1 ranks, and a process without ranks."""
    two, four, one = (str(tmp_path / each) for each in ("two", "four", "one"))
    want = ranks(2).run(saved_and_trained_on, "fxshard", name, two)[0]

    same = ranks(2).run(loaded, "fxshard", name, two)[0]
    assert_same(same[0], want[0])
    assert same[1] == want[1]  # bitwise what training without a stop gives
    assert_same(same[2], want[2])

    resharded = ranks(4).run(loaded, "fxshard", name, two, four)[0]
    assert_same(resharded[0], want[0])
    assert resharded[1] == pytest.approx(want[1], rel=1e-5)

    alone = ranks(1).run(loaded, "fxshard", name, four, one)[0]
    assert_same(alone[0], want[0])
    assert alone[1] == pytest.approx(want[1], rel=1e-5)
    for kind in ("plain", "fxshard"):  # here: in this process
        for path in (two, four, one):
            found = loaded(0, 1, kind, name, path)
            assert_same(found[0], want[0])
            assert found[1] == pytest.approx(want[1], rel=1e-5)


@pytest.mark.parametrize("name", ["mlp13", "tied"])
@pytest.mark.parametrize("kind", ["fsdp2", "plain"])
@pytest.mark.sample(2)
def test_exchange_with(ranks: Any, tmp_path: Path, kind: str, name: str) -> None:
    """Checkpoints of others go into fxshard, and ours into theirs."""
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    want = ranks(2).run(saved_and_trained_on, "fxshard", name, ours)[0]
    other = (
        ranks(2).run(saved_and_trained_on, kind, name, theirs)[0]
        if kind == "fsdp2"
        else saved_and_trained_on(0, 1, kind, name, theirs)
    )
    found = ranks(2).run(loaded, "fxshard", name, theirs)[0]
    assert_same(found[0], other[0])
    assert found[1] == pytest.approx(other[1], rel=1e-5)
    if kind == "fsdp2":
        assert_same(other[0], want[0])  # they train alike up to here, so:
        assert found[1] == other[1]
        assert_same(ranks(2).run(loaded, kind, name, ours)[0][2], want[2])
    else:
        assert_same(loaded(0, 1, kind, name, ours)[0], want[0])


@pytest.mark.parametrize(("kind", "world_size"), [("hybrid_shard", 4), ("no_shard", 2)])
def test_exchange_between_strategies(
    ranks: Any, tmp_path: Path, kind: str, world_size: int
) -> None:
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    want = ranks(world_size).run(saved_and_trained_on, kind, "mlp13", theirs)[0]
    same = ranks(world_size).run(loaded, kind, "mlp13", theirs)[0]
    assert_same(same[2], want[2])
    found = ranks(2).run(loaded, "fxshard", "mlp13", theirs, ours)[0]
    assert_same(found[0], want[0])
    assert_same(ranks(world_size).run(loaded, kind, "mlp13", ours)[0][2], want[2])
    assert_same(loaded(0, 1, "plain", "mlp13", theirs)[0], want[0])


def saved_behind_its_back(rank: int, world_size: int, path: str) -> None:
    """What is saved is the state at the call, though training goes on meanwhile."""
    case = MODELS["mlp13"]
    model, optimizer = made("fxshard", "mlp13")
    train(case, model, optimizer, 0, 2)
    want = values(model, optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    # In a group of its own: its collectives run in a thread beside those of training.
    saving = dcp.async_save(state, checkpoint_id=path, process_group=dist.new_group())
    train(case, model, optimizer, 2, 4)
    saving.result()
    dist.barrier()
    assert_same(loaded(rank, world_size, "fxshard", "mlp13", path)[0], want)


def test_async_save(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(saved_behind_its_back, str(tmp_path))


# -- save_checkpoint and load_checkpoint -----------------------------------------------------------


def kept(rank: int, world_size: int, kind: str, path: str) -> None:
    case = MODELS["mlp13"]
    model, optimizer = made(kind, "mlp13")
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*FileNotFoundError"):
        fxshard.load_checkpoint(path, model, optimizer)
    for step in (1, 2):
        train(case, model, optimizer, step - 1, step)
        extra = {"step": step, "rng": torch.get_rng_state()}
        fxshard.save_checkpoint(path, model, optimizer, extra=extra)
    want = values(model, optimizer)
    losses = train(case, model, optimizer, 2, 4)
    model, optimizer = made(kind, "mlp13", seed=1)
    extra = fxshard.load_checkpoint(path, model, optimizer)
    assert extra["step"] == 2 and isinstance(extra["rng"], Tensor)
    assert_same(values(model, optimizer), want)
    assert train(case, model, optimizer, 2, 4) == losses
    assert sorted(os.listdir(path)) == ["latest", "version-2"]
    alone, _ = made(kind, "mlp13", seed=1)
    fxshard.load_checkpoint(path, alone)  # the model only
    assert all(torch.equal(full(v), want[f"model.{k}"]) for k, v in alone.state_dict().items())
    other = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"version-2 could not be loaded; was it saved with"):
        fxshard.load_checkpoint(path, other)
    fxshard.save_checkpoint(path, alone)
    assert fxshard.load_checkpoint(path, alone) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(2)
def test_save_and_load_checkpoint(ranks: Any, tmp_path: Path, kind: str) -> None:
    ranks(2).run(kept, kind, str(tmp_path / "ranks"))
    if kind != "fsdp2":
        kept(0, 1, kind, str(tmp_path / "alone"))


def first_save(rank: int, world_size: int, path: str) -> dict[str, Tensor]:
    model, optimizer = made("fxshard", "mlp13")
    train(MODELS["mlp13"], model, optimizer, 0, 2)
    fxshard.save_checkpoint(path, model, optimizer, extra="first")
    return values(model, optimizer)


class Failing(FileSystemWriter):
    """Writes a part of what this rank has to write, and then ends it."""

    def __init__(self, path: Any, end: Callable[[], None]) -> None:
        super().__init__(path)
        self.end = end

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        super().write_data(dataclasses.replace(plan, items=plan.items[:3]), planner).wait()
        self.end()


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError("disk full")


def fails_in_save(rank: int, world_size: int, path: str, end: Callable[[], None]) -> str:
    model, optimizer = made("fxshard", "mlp13", seed=1)
    if rank == 1:
        files.save = lambda state, storage_writer, process_group: dcp.save(
            state, storage_writer=Failing(storage_writer.path, end), process_group=process_group
        )
    try:
        return told(lambda: fxshard.save_checkpoint(path, model, optimizer, extra="second"))
    finally:
        files.save = dcp.save


def read_back_and_save(rank: int, world_size: int, path: str) -> tuple[dict[str, Tensor], Any]:
    model, optimizer = made("fxshard", "mlp13", seed=1)
    extra = fxshard.load_checkpoint(path, model, optimizer)
    fxshard.save_checkpoint(path, model, optimizer)
    return values(model, optimizer), extra


@pytest.mark.parametrize("end", [kill_me, fail])
def test_a_rank_fails_while_it_saves(ranks: Any, tmp_path: Path, end: Callable[[], None]) -> None:
    path = str(tmp_path)
    want = ranks(2).run(first_save, path)[0]
    answers = ranks(2).run_expecting_errors(fails_in_save, path, end)
    if end is kill_me:
        assert "rank 1 died, exit code -9" in answers[1] and "CheckpointError" in answers[0]
    else:
        for answer in answers:
            assert answer.startswith("CheckpointError: ") and "OSError: disk full" in answer
            assert "could not be written, and the state before is as it was" in answer
    assert not (tmp_path / "writing-2").exists()  # rank 0, which lives on, removes what was
    got, extra = ranks(2).run(read_back_and_save, path)[0]
    assert extra == "first"
    assert_same(got, want)
    assert sorted(os.listdir(path)) == ["latest", "version-2"]


class Crash(BaseException):
    """Stands for the death of the process."""


CALLS = [(os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "write_text")]


def crash_at(monkeypatch: Any, number: int, after: bool) -> None:
    """Let the `number`-th change that the file system is asked for raise, before or after it."""
    count = iter(range(1000))

    def patched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            now = next(count) == number
            if now and not after:
                raise Crash
            result = real(*args, **kwargs)
            if now:
                raise Crash
            return result

        return call

    for where, name in (*CALLS, (Path, "mkdir"), (Path, "unlink"), (shutil, "rmtree")):
        monkeypatch.setattr(where, name, patched(getattr(where, name)))


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_moment_leaves_one_of_the_two(
    tmp_path: Path, monkeypatch: Any, after: bool
) -> None:
    seen, crashes = [], 0
    for number in range(100):
        path = str(tmp_path / str(number))
        old, new = nn.Linear(2, 2), nn.Linear(2, 2)
        fxshard.save_checkpoint(path, old, extra="old")
        with monkeypatch.context() as patch:
            crash_at(patch, number, after)
            try:
                fxshard.save_checkpoint(path, new, extra="new")
            except BaseException as error:
                crashes += isinstance(error, Crash) or "Crash" in repr(error)
            else:
                break
        model = nn.Linear(2, 2)
        seen.append(fxshard.load_checkpoint(path, model))
        assert torch.equal(model.weight, {"old": old, "new": new}[seen[-1]].weight)
        fxshard.save_checkpoint(path, new, extra="newest")  # and it goes on from there
        assert fxshard.load_checkpoint(path, model) == "newest"
        assert len(os.listdir(path)) == 2
    assert crashes == len(seen) >= 8
    assert seen == sorted(seen, reverse=True)  # old, ..., old, new, ...
    assert {"old", "new"} == set(seen)


def cannot_write(rank: int, world_size: int, path: str) -> None:
    model, optimizer = made("fxshard", "mlp13")
    with pytest.raises(CheckpointError, match=r"cannot be written.*all ranks see.*FileExistsError"):
        fxshard.save_checkpoint(path, model, optimizer)
    with pytest.raises(CheckpointError, match=r"extra cannot be pickled.*[Pp]ickle"):
        fxshard.save_checkpoint(f"{path}-other", model, optimizer, extra=lambda: 1)


def test_all_ranks_hear_of_what_rank_0_cannot_write(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ranks(2).run(cannot_write, str(tmp_path / "file"))


def test_values_compared_are_the_eager_ones() -> None:
    """The comparisons above rest on this: a trained state is not the initial one."""
    model, optimizer = made("plain", "mlp13")
    train(MODELS["mlp13"], model, optimizer, 0, 2)
    before = dict(built("mlp13").state_dict())
    assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])
    ours = compiled("mlp13")
    train(MODELS["mlp13"], ours, adamw(ours.parameters()), 0, 2)
    assert_close(dict(ours.state_dict()), dict(model.state_dict()))
