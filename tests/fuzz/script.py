"""A case as a script that runs by itself, for a bug report."""

from __future__ import annotations

from tests.fuzz.case import Case
from tests.fuzz.judge import Verdict

VALIDATE = """
if __name__ == "__main__":
    torch.manual_seed(0)
    found = fxshard.validate(
        Model(), kwargs=batch(0, 0), world_size={world}, loss=loss_of,
        micro_batches={micro}, no_sync={no_sync},{options}
    )
    print(found.table(only_different=True))
    print(found.points, found.summary())
"""
TRAIN = """
if __name__ == "__main__":{start}
    torch.manual_seed(0)
    eager = Model()
    ours = fxshard.compile(copy.deepcopy(eager), world_size={world},{options}
    )
    optimizers = [make(list(m.parameters())) for m in (eager, ours)]
    for step in range({steps}):
        for micro in range({micro}):
            outs = []
            for model in (eager, ours):
                torch.manual_seed(10_000 * step + 100 * micro + rank)
                out = model(**batch(rank, step * {micro} + micro))
                outs.append([t.detach().clone() for t in leaves(out)])
                loss_of(out).backward()
            print(step, "outputs", outs)
        {reduce}for (name, p), (_, q) in zip(eager.named_parameters(), ours.named_parameters()):
            print(step, name, p.grad, getattr(q.grad, "full_tensor", lambda: q.grad)())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip([*eager.parameters(), *eager.buffers()], [*ours.parameters(), *ours.buffers()]):
        print(a, getattr(b, "full_tensor", lambda: b)())
"""
WHOLE = """
if __name__ == "__main__":{start}
    torch.manual_seed(0)
    eager = Model()
    model = copy.deepcopy(eager)
    step = fxshard.compile_step(
        model, loss_of, make(list(model.parameters())), max_norm=float("inf"),
        world_size={world},{options}
    )
    optimizer = make(list(eager.parameters()))
    for number in range({steps}):
        torch.manual_seed(10_000 * number + rank)
        loss = loss_of(eager(**batch(rank, number)))
        loss.backward()
        {reduce}optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(10_000 * number + rank)
        print(number, "loss", loss, step(**batch(rank, number)))
    sides = ([*m.parameters(), *m.buffers()] for m in (eager, model))
    for a, b in zip(*sides):
        print(a, getattr(b, "full_tensor", lambda: b)())
"""
RANKS = """
    import os
    import torch.distributed as dist
    dist.init_process_group("gloo")  # torchrun --nproc-per-node {ranks} this.py
    rank = dist.get_rank()"""
REDUCE = """for p in eager.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= {ranks}
        """


def script(case: Case, verdict: Verdict) -> str:
    """Imports, the program, and the loop that shows what is not as it should be."""
    named = "".join(f"\n        {name}={code}," for name, code in case.options)
    sizes = verdict.kind == "bytes" or verdict.reason.startswith("validate")
    sizes = sizes and not case.whole  # step.memory says them
    if sizes and not any(name == "optimizer" for name, _ in case.options):
        named += f"\n        optimizer={case.optimizer},"
    if not sizes and any(name == "memory_budget" for name, _ in case.options):
        named += "\n        kwargs=batch(rank, 0),"
    filled = {
        "world": case.world,
        "micro": case.micro_batches,
        "no_sync": case.no_sync,
        "options": named,
        "steps": case.steps,
        "ranks": case.ranks,
        "start": RANKS.format(ranks=case.ranks) if case.processes else "\n    rank = 0",
        "reduce": REDUCE.format(ranks=case.ranks) if case.processes else "",
    }
    head = "import fxshard\n"
    if "MixedPrecision" in named or "Offload" in named:
        names = "CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy"
        head += f"from torch.distributed.fsdp import {names}\n"
    make = "" if sizes else f"\nmake = {case.optimizer}\n"
    body = (VALIDATE if sizes else WHOLE if case.whole else TRAIN).format(**filled)
    return head + case.program.code() + make + "\n" + body
