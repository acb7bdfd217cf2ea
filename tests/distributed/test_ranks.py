"""Ranks that differ, disagree, die, or are only some of the processes: all raise, none hangs."""

import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import fxshard
from fxshard._torch import process_groups
from fxshard.errors import ConfigError
from fxshard.runtime.world import census
from fxshard.runtime.world.peers import Peers
from tests.eager import Net, batch
from tests.fsdp2 import full
from tests.ranks import Failure, told
from tests.zoo import MODELS, models


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].build()


# -- mismatches -----------------------------------------------------------------------------------


def other_model(rank: int, world_size: int, what: str) -> str:
    last = rank == world_size - 1
    if what == "depth":
        model = models.Mlp13(depth=2 if last else 3)
    else:
        model = models.Mlp13()
        if last:
            model.blocks[1].linear = nn.Linear(13, 14)
    before = list(model.parameters())
    text = told(lambda: fxshard.compile(model))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    return text


@pytest.mark.parametrize(
    ("what", "zero", "two"),
    [
        (
            "depth",
            "'parameter blocks.2.gain [1] torch.float32 Shard(0) unit=blocks.2'",
            "'(nothing)'",
        ),
        (
            "shape",
            "'parameter blocks.1.linear.weight [13, 13] torch.float32 Shard(0) unit=blocks.1'",
            "'parameter blocks.1.linear.weight [14, 13] torch.float32 Shard(0) unit=blocks.1'",
        ),
    ],
)
def test_another_model_on_one_rank(ranks: Any, what: str, zero: str, two: str) -> None:
    for text in ranks(3).run(other_model, what):
        assert text.startswith("RankMismatchError: ranks differ in the model. First difference")
        assert f"rank 0 has {zero}" in text
        assert f"rank 2 {two}" in text
        assert "Build the same model" in text


def other_call(rank: int, world_size: int, what: str) -> str:
    odd = rank == 1
    if what == "dtype":
        model = fxshard.compile(built("mlp13"))
        x = torch.ones(4, 5, dtype=torch.float64 if odd else torch.float32)
        return told(lambda: model(x))
    model = fxshard.compile(models.llama(1))
    tokens = torch.arange(16).view(2, 8)
    return told(lambda: model(input_ids=tokens, labels=None if odd else tokens))


@pytest.mark.parametrize(
    ("what", "zero", "one"),
    [
        ("dtype", "'input args[0]: 2-D torch.float32'", "'input args[0]: 2-D torch.float64'"),
        ("labels", "'input kwargs['labels']: 2-D torch.int64'", "'input kwargs['labels']: None'"),
    ],
)
def test_another_call_on_one_rank(ranks: Any, what: str, zero: str, one: str) -> None:
    for text in ranks(2).run(other_call, what):
        assert text.startswith("RankMismatchError: ranks differ in the model or the batch")
        assert f"rank 0 has {zero}, rank 1 {one}" in text
        assert "call it alike on every rank" in text


def other_call_later(rank: int, world_size: int) -> str:
    model = fxshard.compile(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))
    model(torch.ones(4, 5)).sum().backward()
    odd = rank == 1
    return told(lambda: model(torch.ones(4, 5, 5) if odd else torch.ones(4, 5)))


def test_another_call_on_one_rank_later(hasty: Any) -> None:
    """The odd rank asks whether all agree; the others, who know this call, run it."""
    text = hasty(3).run(other_call_later)
    assert all(each.startswith("RankMismatchError") for each in text)
    assert "rank 1 waits for all ranks to agree on" in text[0]
    assert "rank 1 would do something else in this call of the model than rank " in text[1]
    assert "they have 'input args[0]: 2-D torch.float32', it has 'input args[0]: 3-D" in text[1]


def refuses(net: Net, x: Tensor) -> Tensor:
    return net.a(x).sum() if x.dim() == 2 or x.sum() > 0 else net.b(x).sum()


def call_that_is_refused(rank: int, world_size: int, odd: int | None) -> tuple[str, str]:
    torch.manual_seed(0)
    model = fxshard.compile(Net(refuses))
    model(batch()).backward()
    bad = odd is None or rank == odd
    first = told(lambda: model(batch().unsqueeze(0) if bad else batch()).backward())
    return first, told(lambda: model(batch()).backward())


def test_a_call_that_all_refuse_leaves_all_as_they_were(ranks: Any) -> None:
    for first, second in ranks(2).run(call_that_is_refused, None):
        assert first.startswith("CaptureError: Net cannot be traced")
        assert second == "no error"


def test_a_call_that_one_rank_refuses_fails_on_all(hasty: Any) -> None:
    """The others, who know this call, wait in a collective until it leaves."""
    found = hasty(3).run(call_that_is_refused, 1)
    assert all(first.startswith("RankMismatchError") for first, _ in found)
    assert "it has 'refused: CaptureError: Net cannot be traced" in found[1][0]


def evaluated_by_one(rank: int, world_size: int) -> str:
    model = fxshard.compile(built("mlp13"), strategy="no_shard")
    args, _ = MODELS["mlp13"].batch(0, 0)

    def train() -> None:
        model(*args).sum().backward()

    def evaluate() -> None:
        with torch.no_grad():
            model(*args)

    def all_of_it() -> None:
        train()
        evaluate()
        for _ in range(10 if rank == 0 else 0):
            evaluate()
        for _ in range(3):
            train()
        with torch.autocast("cpu", torch.bfloat16):  # all make a program, in the same call
            train()

    return told(all_of_it)


def test_one_rank_may_make_calls_without_collectives(ranks: Any) -> None:
    """Nothing is sharded, so that forward alone has none."""
    assert ranks(2).run(evaluated_by_one) == ["no error"] * 2


# -- ranks that die -------------------------------------------------------------------------------


def dies(rank: int, world_size: int, victim: int, verb: str) -> None:
    """The victim is killed in the middle of its second step, at the second call of `verb`."""
    case = MODELS["mlp13"]
    model = fxshard.compile(built("mlp13"), units=case.units)
    args, kwargs = case.batch(rank, 0)
    case.loss(model(*args, **kwargs)).backward()
    if rank == victim:
        original, calls = getattr(model._fxshard.world, verb), []

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(verb)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(model._fxshard.world, verb, call)
    case.loss(model(*args, **kwargs)).backward()


@pytest.mark.parametrize(
    ("world_size", "victim", "verb"),
    [(2, 0, "all_gather"), (3, 2, "reduce_scatter"), (3, 0, "wait")],
)
@pytest.mark.sample(2)
def test_survivors_name_the_dead(hasty: Any, world_size: int, victim: int, verb: str) -> None:
    """Also those that wait for ranks which failed because of the dead one."""
    found = hasty(world_size).run_expecting_errors(dies, victim, verb)
    for rank, failure in enumerate(found):
        assert isinstance(failure, Failure)
        if rank == victim:
            assert "died, exit code -9" in failure
        else:
            said = (
                f"RankDiedError: a collective failed on rank {rank}: rank {victim} of {world_size}"
            )
            assert said in failure
            assert "restart from the last checkpoint" in failure


def dies_with_the_store(rank: int, world_size: int, port: int) -> str:
    """Rank 0 hosts a TCP store, as that of torchrun's ``MASTER_ADDR``."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    case = MODELS["mlp13"]
    model = fxshard.compile(built("mlp13"), units=case.units)
    args, kwargs = case.batch(rank, 0)

    def step() -> None:
        case.loss(model(*args, **kwargs)).backward()

    step()
    if rank == 0:
        os._exit(3)
    first = told(step)
    assert told(step).startswith("RankMismatchError: this rank has left the process group")
    return first


def test_survivors_know_that_the_store_died(hasty: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = hasty(3).run_expecting_errors(dies_with_the_store, port)
    assert "died, exit code 3" in found[0]
    for rank in (1, 2):
        said = f"RankDiedError: a collective failed on rank {rank}"
        assert found[rank].startswith(said), found[rank]
        assert "the store cannot be reached" in found[rank] or "rank 0 of 3" in found[rank]


def dies_before_it_agrees(rank: int, world_size: int) -> str:
    model = fxshard.compile(built("mlp13"))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return told(lambda: model(torch.ones(4, 5)))


def test_a_rank_that_dies_before_it_agrees(hasty: Any) -> None:
    text = hasty(2).run_expecting_errors(dies_before_it_agrees)[0]
    assert text.startswith("RankDiedError: rank 0 waited to agree on")
    assert "rank 1 died" in text


def test_a_process_knows_whether_another_is_dead() -> None:
    assert census.is_dead(census.identity()) is False
    script = f"import runpy; tell = runpy.run_path({census.__file__!r})['identity']"
    script += "; print(tell(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        who = process.stdout.readline().strip()
        assert census.is_dead(who) is False
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert census.is_dead(who) is True  # a zombie: nobody has waited for it
    assert census.is_dead(who) is True
    assert census.is_dead("elsewhere/pid:[1] 1 1") is None
    assert census.is_dead("") is None


# -- unequal batches ------------------------------------------------------------------------------

SIZES = {0: (4, 4, 4), 1: (2, 4, 1)}  # rank -> rows per step: rank 1 meets a new size alone


def rows(rank: int, step: int) -> Tensor:
    size = SIZES[rank][step]
    return torch.linspace(-1, 1 + rank + step, size * 5).view(size, 5)


def unequal(rank: int, world_size: int) -> dict[str, Tensor]:
    case, model = MODELS["mlp13"], fxshard.compile(built("mlp13"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        case.loss(model(rows(rank, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: full(param) for fqn, param in model.named_parameters()}


def test_batch_sizes_may_differ(ranks: Any) -> None:
    case, eager = MODELS["mlp13"], built("mlp13")
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    for step in range(3):
        torch.stack([case.loss(eager(rows(rank, step))) for rank in range(2)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    want = {fqn: param.detach() for fqn, param in eager.named_parameters()}
    for found in ranks(2).run(unequal):
        assert_close(found, want, rtol=1e-6, atol=1e-6)


# -- worlds of other shapes -----------------------------------------------------------------------


def wrong_world_size(rank: int, world_size: int) -> str:
    model = built("mlp13")
    before = list(model.parameters())
    with pytest.raises(ValueError) as failure:
        fxshard.compile(model, world_size=4)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    return str(failure.value)


def test_a_world_size_that_disagrees_with_the_group(ranks: Any) -> None:
    for text in ranks(2).run(wrong_world_size):
        assert text.startswith("world_size=4, but the process group has 2 ranks.")
        assert "--nproc-per-node=4" in text


def part_of_the_world(rank: int, world_size: int, how: str) -> dict[str, Tensor]:
    """Ranks 0, 1 and ranks 2, 3 train a model each."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    if how == "mesh":
        options: dict[str, Any] = {"mesh": grid["shard"]}
    else:
        options = {"process_group": grid["shard"].get_group()}
    case = MODELS["mlp13"]
    model = fxshard.compile(built("mlp13"), world_size=2, units=case.units, **options)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.device_mesh.mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    args, kwargs = case.batch(rank, 0)
    case.loss(model(*args, **kwargs)).backward()
    return {fqn: full(param.grad) for fqn, param in model.named_parameters()}


@pytest.mark.parametrize("how", ["mesh", "process_group"])
def test_a_part_of_the_world(ranks: Any, how: str) -> None:
    found = ranks(4).run(part_of_the_world, how)
    case = MODELS["mlp13"]
    for rank, grads in enumerate(found):
        eager = built("mlp13")
        mine = [case.batch(peer, 0) for peer in (rank // 2 * 2, rank // 2 * 2 + 1)]
        torch.stack([case.loss(eager(*args, **kwargs)) for args, kwargs in mine]).mean().backward()
        want = {fqn: param.grad for fqn, param in eager.named_parameters()}
        assert_close(grads, want, rtol=1e-6, atol=1e-6)


def one_part_disagrees(rank: int, world_size: int) -> str:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = models.Mlp13(depth=1 if rank == 3 else 2)
    return told(lambda: fxshard.compile(model, mesh=grid["shard"]))


def test_parts_of_the_world_do_not_meet(ranks: Any) -> None:
    found = ranks(4).run(one_part_disagrees)
    assert found[:2] == ["no error"] * 2
    for text in found[2:]:
        assert text.startswith("RankMismatchError")
        assert "rank 2 has 'parameter head.weight" in text and ", rank 3 'parameter" in text


def wrong_mesh(rank: int, world_size: int) -> list[str]:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = built("mlp13")
    before = list(model.parameters())
    both = {"mesh": grid["shard"], "process_group": grid["shard"].get_group()}
    texts = [told(lambda: fxshard.compile(model, mesh=grid))]
    texts += [told(lambda: fxshard.compile(model, **both))]
    texts += [told(lambda: fxshard.compile(model, mesh=grid["shard"], world_size=4))]
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    return texts


def test_meshes_that_are_refused(ranks: Any) -> None:
    for two_d, both, size in ranks(4).run(wrong_mesh):
        assert two_d.startswith("ConfigError: the mesh has 2 dimensions ('replica', 'shard')")
        assert "mesh['shard']" in two_d
        assert both.startswith("ConfigError: mesh and process_group were both given")
        assert size.startswith("ConfigError: world_size=4, but the process group has 2 ranks")
    assert issubclass(ConfigError, ValueError)


# -- what is in the store --------------------------------------------------------------------------

NOISE = (b"", b"\xff\xfe", b"{", b"null", b"[1]", b'["x", "y"]', b"one two three", b"10")
READERS = {
    "fxshard/cause": lambda peers: peers.cause(),
    "fxshard/identity/1": lambda peers: peers.never_over(1),
    "fxshard/reason/1": lambda peers: peers.cause_of_failure(),
    "fxshard/calls/1/0/1": lambda peers: peers.agree([], "this", lambda why: None, 1),
    "fxshard/stopped/1/1/first": lambda peers: peers.never_over(1),
    "fxshard/calls/1/told/0/1": lambda peers: peers.any_of(peers.tell("01"), "01"),
    "fxshard/agree/1/differs/1": lambda peers: peers.agree(["a"], "this", lambda why: None),
}


def reads_noise(rank: int, world_size: int, key: str) -> list[str]:
    said = []
    for noise in NOISE:
        group = process_groups.new_group([0, 1], dist.group.WORLD)
        peers = Peers(group)
        store: Any = process_groups.group_store(group)
        dist.barrier(group)
        if rank == 1:
            store.set(key, noise)
            if "differs" in key:
                store.add("fxshard/agree/1/seen", 1)
            else:
                store.set("fxshard/agree/1/failed", "")
        dist.barrier(group)
        said.append(told(lambda peers=peers: READERS[key](peers)) if rank == 0 else "")
        dist.barrier(group)
        dist.destroy_process_group(group)
    return said


@pytest.mark.parametrize("key", READERS)
@pytest.mark.sample(3)
def test_what_cannot_be_read_in_the_store_is_refused(ranks: Any, key: str) -> None:
    said, _ = ranks(2).run(reads_noise, key)
    assert any("cannot be read" in text for text in said)
