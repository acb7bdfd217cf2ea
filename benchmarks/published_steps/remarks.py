"""What docs/published-peaks.md says beside its figures."""

from __future__ import annotations

from benchmarks.published_steps.jobs import NOT_RUN, figures, job_of

HEAD = """# Published peaks beside dry runs

Written by `python -m benchmarks.published_steps`; do not edit. Each row is a peak of GPU memory
that somebody published, of a job with torch's FSDP2, FSDP1 or DDP. Beside it is what
`fxshard.dry_run` says of the same steps on a machine without a GPU: three steps of the models in
`benchmarks/published_steps/`, by the settings of the source. `figures.csv` there has the sources,
their settings and what they leave unsaid. No constant was chosen by these figures.

Of {all} figures {run} are of jobs that can be run dry with what is stated. Of these {near} are
within 1%, {between} lie between the two ends that a dry run of FSDP1 gives, and {far} are off: the
remarks say why, or that it is not known. {missing} have no dry run beside them.

{table}

(torch {torch}, Python {python}, {date}. GiB. "active", "allocated" and "reserved" are those of
torch.cuda's statistics. "A to B": FSDP1 frees memory when the GPU is done with it; A if the GPU
keeps up with the host, B if the host is ahead as far as its own waits allow.)

{remarks}
"""

# By the beginning of an id; the longest counts.
REMARKS = {
    "tt165-fsdp1": "Where between the ends a job lies depends on how far its host is ahead.",
    "tt165-fsdp2-ac-reserved": "The tensors fit (active); 1.2 GiB of what the plain allocator "
    "reserved in that job are not explained.",
    "tt165-fsdp2-sac-reserved": "The tensors fit (active); the plain allocator of the dry run "
    "reserves 1.4 GiB more, not explained.",
    "tt165-fsdp2-ac-compile": "Whole model compiled, with graph breaks at FSDP's hooks, by the "
    "torch of 2024-03; the dry run's Inductor is that of the installed torch.",
    "tt165-fsdp2-sac-compile": "Not explained: 2.0 and 2.9 GiB. The torch of 2024-03 compiled it; "
    "today's partitioner drops what per-op checkpointing keeps and backward does not read.",
    "tt165-fsdp2-noac-compile": "As the row with full checkpointing, compiled.",
    "tt165-2d": "Not explained: 23 GiB with full checkpointing, 9.4 GiB per op.",
    "tt820-rowwise-abs-saved": "Saving every `abs` costs 10.8 GiB in that job, and 19.1 GiB here: "
    "which of them backward reads depends on torchao's and torch's version.",
    "ttb-8b": "The script asks for expandable segments; its figures, compiled or not, fit only the "
    "plain allocator, by which they are shown. Why is open.",
    "ttb-h200": "Not explained: 3.7 and 4.9 GiB. The allocator's settings are not stated.",
    "ao-tut": "Not explained: 7.0, 7.0 and 6.7 GiB. 7.0 GiB is what the outputs of `w1` take in "
    "all 32 blocks, which per-op checkpointing saves; the torch of that job is not stated.",
    "ao-b200": "torchtitan of 2025-08 shards the embedding, and norm with head, as units apart. As "
    "one unit, as before, it would be 35.90 GiB in bf16.",
    "li-fabric-shardgradop": "Not explained: 0.23 GiB.",
    "li-fabric-offload": "Not explained: 0.08 GiB.",
    "li-trainer-offload": "Not explained: 0.05 GiB.",
}


def _longest(texts: dict[str, str], name: str) -> str | None:
    return max((start for start in texts if name.startswith(start)), key=len, default=None)


def _key(name: str) -> str | None:
    """What the remark of a figure is found by: in `NOT_RUN` if its job is not run."""
    return _longest(NOT_RUN if job_of(name) is None else REMARKS, name)


def _numbers() -> dict[str, int]:
    keys = dict.fromkeys(key for name in figures() if (key := _key(name)) is not None)
    return {key: number for number, key in enumerate(keys, 1)}


def remark_of(name: str) -> str:
    """The number of a figure's remark, or ""."""
    key = _key(name)
    return f"({_numbers()[key]})" if key is not None else ""


def remarks() -> str:
    """All of them, as a list of Markdown."""
    return "\n".join(
        f"{number}. " + (REMARKS.get(key) or f"No dry run: {NOT_RUN[key]}.")
        for key, number in _numbers().items()
    )
