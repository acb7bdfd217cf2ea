"""Writes docs/models.md and docs/models.csv: every architecture of tests/zoo, tried once.

    python -m benchmarks.models_page          # tries all of them (14 CPU-minutes)
    python -m benchmarks.models_page --page   # the page alone, from the results of the last run
    python -m benchmarks.models_page --only U-Net SiglipModel   # these again, the rest as it was

The trial is the one that the tests make (`tests.zoo.trial`): one step beside plain eager with
dropout on, and two steps whose bytes are measured and compared with what was predicted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import warnings
from typing import Any

import torch
import transformers
from tabulate import tabulate

from benchmarks.figures import RESULTS, ROOT, machine, write, write_csv
from tests.zoo import trial
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.trial import Trial

PAGE = ROOT / "docs" / "models.md"
ROWS = PAGE.with_suffix(".csv")
RECORD = RESULTS / "models.json"

HEAD = """# Models that fxshard takes

Written by `make models` (`python -m benchmarks.models_page`) from `tests/zoo/architectures.py`; do
not edit. Each is a tiny model of the real class with random weights, without a download:
{taken} are taken ({bitwise} bitwise equal to eager), {refused} are refused by name.

What was tried of each: `fxshard.compile` on two ranks inside one process, one training
step beside plain eager from the same seed with dropout on, comparing the loss, all gradients and
all buffers; then `fxshard.validate` for rank 0 of {ranks}, two AdamW steps. No option is given: the
units are those that fxshard finds, and models of transformers are called as they come
(`config.use_cache`, attention and experts at their defaults).

- **bitwise**: every value is eager's. **within x**: the largest difference of any tensor, relative
  to its largest value (to the model's largest gradient, where all of the tensor's own are below
  {close:g} of that one: they are zero but for rounding). At most {close:g} passes. Models of
  transformers that are not bitwise mostly are without a cache: eager puts keys and values into the
  cache that it returns, other strides for the same numbers.
- **refused**: [models.csv](models.csv) has why, as the error begins; the rest of the error names
  the line and the remedy.

[models.csv](models.csv) also has of each how many **nodes** the captured graph of forward and
backward has (operators, inputs and the output); what **capture** and **plan** take, in CPU-seconds
in one thread (planning includes a capture of its own); and the largest difference in **bytes**
between prediction and measurement, over every module, state and category of both steps (`-`: a size
depends on the data, and bytes are not predicted).

{table}

## Models of Hugging Face transformers

They are given to `fxshard.compile` as they are. While tracing (`fxshard/capture/hf.py`):

- `config.use_cache` counts as False, in training and under `no_grad`: the output is the same
  `ModelOutput` class, with `past_key_values` None. A call that says `use_cache=True`, or passes
  `past_key_values`, is refused: a program cannot make or take a cache. Generate with the plain
  model.
- SDPA keeps the branch of eager (`is_causal`, no mask made); packed sequences, which only the
  values of `position_ids` tell, are refused.
- experts: the default `grouped_mm`, and `batched_mm`, are taken; `experts_implementation="eager"`
  looks at values and is refused, with the call that changes it. Nothing is switched by itself: the
  implementations round differently.
- checks of values (`torch_compilable_check`, such as "as many image tokens as image features") are
  not repeated by the program: run one batch through the plain model first.
- LayerDrop (`layerdrop > 0`) and SpecAugment (`apply_spec_augment`), which draw random numbers into
  Python or numpy, are refused; set them to 0 and False.

A parameter without a dimension (CLIP's `logit_scale`) or with other strides than contiguous ones is
refused, as by FSDP2: the error says the one line that makes it fit.

{date}: {machine} ({cpu}), Python {python}, torch {torch}, transformers {transformers}.
"""


def measure(names: list[str] | None) -> None:
    """Try architectures and write what came out, with machine and date.

    Args:
        names: those to try; the others stay as the last run found them, if it was on the same day,
            machine and versions. None: all.

    Raises:
        ValueError: the last run was another day or elsewhere.
        AssertionError: one is refused or taken against its row, or differs from eager or in bytes.
    """
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    trials: dict[str, Any] = {}
    if names is not None:
        last = json.loads(RECORD.read_text())
        where = {key: value for key, value in machine().items() if key != "load"}
        if any(last[key] != value for key, value in where.items()):
            raise ValueError("the last run was on another day or machine, or of other versions")
        trials = last["trials"]
    for name in names or ARCHITECTURES:
        row = ARCHITECTURES[name]
        done = trial.try_out(row, timed=True)
        as_said = trial.matches(row, done.refusal) if row.refused else not done.refusal
        if not as_said or done.worst > trial.CLOSE or done.memory_difference:
            raise AssertionError(f"{name} is not what its row in the table says: {done}")
        print(f"{name}: {status(done)}", flush=True)
        trials[name] = dataclasses.asdict(done)
        write(RECORD, {"trials": {n: trials[n] for n in ARCHITECTURES if n in trials}})


def status(done: Trial) -> str:
    """A trial in a few words."""
    if done.refusal:
        return f"refused: {reason(done.refusal)}"
    return "bitwise" if done.bitwise else f"within {done.worst:.1e}"


def reason(refusal: str) -> str:
    """Why, from the text of an error: its first sentence and the line of code that it shows."""
    first, *rest = refusal.splitlines()
    first = re.sub(r"^\w+ cannot be traced(: | (?=\())", "", first).removesuffix(", at")
    shown = [line.strip() for line in rest if line.startswith("    ")]
    return f"{first}: `{shown[0]}`" if shown else first


def page(result: dict[str, Any]) -> str:
    """The page, from what `measure` wrote."""
    trials = {name: Trial(**values) for name, values in result["trials"].items()}
    taken = [done for done in trials.values() if not done.refusal]
    families = [by_status(family, names, trials) for family, names in by_family(trials).items()]
    table = tabulate(families, headers="keys", tablefmt="github", disable_numparse=True)
    return HEAD.format(
        taken=len(taken),
        bitwise=sum(done.bitwise for done in taken),
        refused=len(trials) - len(taken),
        ranks=trial.RANKS,
        close=trial.CLOSE,
        table=re.sub("-{4,}", "---", re.sub(" {2,}", " ", table)),  # cells are long
        **{key: result[key] for key in machine()},
    )


def by_family(trials: dict[str, Trial]) -> dict[str, list[str]]:
    """The names of each family, in the order of the table."""
    found: dict[str, list[str]] = {}
    for name in trials:
        if name in ARCHITECTURES:
            found.setdefault(ARCHITECTURES[name].family, []).append(name)
    return {each.family: found[each.family] for each in ARCHITECTURES.values()}


def by_status(family: str, names: list[str], trials: dict[str, Trial]) -> dict[str, str]:
    """A line of the page: models by what came out."""
    came_out = {name: status(trials[name]).split()[0].rstrip(":") for name in names}
    return {"family": family} | {
        each: ", ".join(f"`{name}`" for name in names if came_out[name] == each) or "-"
        for each in ("bitwise", "within", "refused")
    }


def rows(result: dict[str, Any]) -> list[dict[str, str]]:
    """The file beside the page: one line per model."""
    trials = {name: Trial(**values) for name, values in result["trials"].items()}
    return [
        {"family": family, **row(name, trials[name])}
        for family, names in by_family(trials).items()
        for name in names
    ]


def row(name: str, done: Trial) -> dict[str, str]:
    """One line of the file."""
    figures = {
        "nodes": f"{done.nodes:,}",
        "capture, s": f"{done.capture_seconds:.1f}",
        "plan, s": f"{done.plan_seconds:.1f}",
        "bytes": "-" if done.memory_difference is None else f"{done.memory_difference:,}",
    }
    blank = dict.fromkeys(figures, "-")
    shown = status(done)
    if ARCHITECTURES[name].optimizer.func is torch.optim.SGD:  # type: ignore[attr-defined]
        shown += " (bytes with SGD: of complex parameters, AdamW's step is not exact)"
    if not ARCHITECTURES[name].onednn:
        shown += " (beside eager without oneDNN)"
    return {"model": name, "status": shown, **(blank if done.refusal else figures)}


def main() -> int:
    """Measure unless told not to, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="try these alone")
    chosen = parser.parse_args()
    if not chosen.page:
        measure(chosen.only)
    result = json.loads(RECORD.read_text())
    PAGE.write_text(page(result))
    write_csv(ROWS, rows(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
