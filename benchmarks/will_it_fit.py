"""Writes docs/will-it-fit.md: dry runs of examples/train_fsdp2.py, as the terminal shows them.

python -m benchmarks.will_it_fit    # three minutes, no GPU; the picture needs chromium
"""

from __future__ import annotations

import datetime
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
SCRIPT = "examples/train_fsdp2.py"
PAGE, PICTURE = ROOT / "docs" / "will-it-fit.md", ROOT / "docs" / "will-it-fit.png"
ON_H100 = ("--world-size", "8", "--device", "h100", "--budget", "79GiB", "--top", "3")

TEXT = """# Will it fit?

You have a script that trains with torch's own FSDP2, and no GPU at hand. This one, say
([examples/train_fsdp2.py](../examples/train_fsdp2.py)), Llama 3 8B on random tokens:

```python
{script}
```

Ask what a rank of it takes on 8 H100s. Nothing in the script changes, and it imports no fxshard: it
runs on tensors without data, as `torchrun` would start it, to the end of its second step.

```
$ {first[0]}
{first[1]}
```

It does not fit, and the table says why: {activations} of activations. So let the layers be
recomputed in backward, which the script has a flag for; what stands after `--` is for the script:

```
$ {second[0]}
{second[1]}
```

It fits. The peak is the loss now: three tensors of {logits}, the logits in fp32. The first line of
each is the operator, the last one the line of code that made it.

## Over a step

`--html page.html` writes a page for the browser: memory over the step by category, below it what is
held by each stream, and on the right what is alive at a point. Click on any.

![Memory of a step, by category and stream](will-it-fit.png)

## The largest batch

The script's own flags are the sizes to try. Four sequences fit if the allocator is told to use
expandable segments, and five do not fit in any way:

```
$ for batch in {batches}; do fxshard dryrun {script_name} ... -- --checkpoint --batch $batch; done
{largest}
```

## What the figures are

- **peak of tensors**: bytes of all tensors that the rank holds, to the byte, as with eager PyTorch
  on that GPU; what kernels take for themselves is in *requested*.
- **allocated**: as `torch.cuda.max_memory_allocated()`; **reserved**: as
  `torch.cuda.max_memory_reserved()`, by a model of CUDA's caching allocator with the settings of
  your `PYTORCH_ALLOC_CONF`. *With expandable segments* is the same under
  `PYTORCH_ALLOC_CONF=expandable_segments:True`, which we recommend.
- `--budget` counts what lies outside of the allocator, too: CUDA's context and NCCL's buffers.

How far to trust them: [published peaks of FSDP2 jobs](published-peaks.md) beside dry runs, and
[what is proved](dry-run.md#how-it-is-known-to-be-right). `fxshard fsdp2 --hf-config config.json`
answers the same for a transformers configuration without a script, and `--compare` puts fxshard
beside FSDP2.

(Written by `python -m benchmarks.will_it_fit`: torch {torch}, transformers {transformers}, {date};
two of the runs took {seconds:.0f} s each, on 2 cores beside other work.)
"""


def main() -> None:
    """Run the commands, and write page and picture."""
    began = datetime.datetime.now()
    first = dryrun(*ON_H100)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        second = dryrun(*ON_H100, "--html", str(page), "--", "--checkpoint")
        draw(page)
    seconds = (datetime.datetime.now() - began).total_seconds() / 2
    batches = (3, 4, 5, 6)
    fits = [dryrun(*ON_H100, "--", "--checkpoint", "--batch", str(n)) for n in batches]
    found = [f"batch {n}: {last_line(said)}" for n, (_, said) in zip(batches, fits, strict=True)]
    PAGE.write_text(
        TEXT.format(
            script=body(),
            first=(first[0], head(first[1])),
            second=(second[0], head(second[1])),
            activations=figure(first[1], "Activation"),
            logits=figure(second[1], "Activation: aten._log_softmax", before=True),
            batches=" ".join(map(str, batches)),
            script_name=SCRIPT,
            largest="\n".join(found),
            torch=torch.__version__,
            transformers=transformers.__version__,
            date=datetime.date.today(),
            seconds=seconds,
        )
    )


def dryrun(*arguments: str) -> tuple[str, str]:
    """The command as a user types it, and what it prints."""
    command = [sys.executable, "-W", "ignore", "-m", "fxshard", "dryrun", SCRIPT, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    named = [Path(each).name if each.endswith(".html") else each for each in arguments]
    typed = " ".join(("fxshard dryrun", SCRIPT, *named))
    return typed, done.stdout + "".join(
        line for line in done.stderr.splitlines(keepends=True) if line.startswith("fxshard:")
    )


def head(said: str) -> str:
    """What is printed without the tables of phases and modules, and what the end says."""
    lines = said.strip().splitlines()
    tables = next(i for i, line in enumerate(lines) if line.startswith("Bytes of one rank"))
    shown = [*lines[: tables - 1], "... (phases and modules)", "", last_line(said)]
    return "\n".join(line.rstrip() for line in shown)


def last_line(said: str) -> str:
    """Whether it fits: the first line of what is said of it."""
    verdicts = [line for line in said.splitlines() if line.startswith(("fits", "fxshard:"))]
    return verdicts[-1].removeprefix("fxshard: ")


def figure(said: str, row: str, *, before: bool = False) -> str:
    """The bytes in a row of the table of peaks, or before what is alive at the peak."""
    line = next(line for line in said.splitlines() if row in line)
    return " ".join(line.split(row)[0 if before else 1].split()[:2])


def body() -> str:
    """The script without its docstring."""
    return (ROOT / SCRIPT).read_text().split('"""', 2)[2].strip()


def draw(page: Path) -> None:
    """The upper part of the page, as a browser shows it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page(viewport={"width": 1300, "height": 900})
        tab.goto(page.as_uri())
        tab.wait_for_timeout(2500)  # plotly draws
        tab.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
