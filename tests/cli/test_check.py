"""``fxshard check``: what it refuses, what it records, when it fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fxshard.cli import check, main
from fxshard.errors import ConfigError
from tests.cli.check_models import WIDTH

ROOT = Path(__file__).parents[2]
JOBS = """
# a comment of the user's
[defaults]
world_size = 4

[[job]]
name = "small"
model = "tests.cli.check_models:short"
tolerance = "1%"

[[job]]
name = "other"
model = "tests.cli.check_models:short"
micro_batches = 2
budget = "1GiB"
options = { checkpoint = "full", optimizer = "sgd" }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "memory.toml").write_text(JOBS)
    return tmp_path / "memory.toml"


def run(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, str, str]:
    code = main.main(["check", *map(str, argv)])
    return code, *capsys.readouterr()


def test_a_change_of_code_fails_with_the_table(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said, _ = run(capsys, file)
    assert code == 1 and said.count("memory.lock.json has no record of it") == 2
    assert "run fxshard check with --update" in said
    code, said, _ = run(capsys, file, "--update")
    assert code == 0 and said.endswith("2 jobs, 0 failed; recorded\n")
    assert file.read_text() == JOBS, "comments stay, as nothing is written"
    lock = file.with_name("memory.lock.json")
    recorded = lock.read_text()
    code, said, _ = run(capsys, file)
    assert code == 0 and said.startswith("ok    small: ") and "2 jobs, 0 failed" in said
    assert run(capsys, file, "--update")[0] == 0 and lock.read_text() == recorded

    monkeypatch.setenv(WIDTH, "65")
    code, said, _ = run(capsys, file)
    assert code == 1 and "2 jobs, 2 failed" in said
    assert "FAIL  small" in said and "peak: " in said and "more than recorded" in said
    assert "Sharded Param" in said and "layers.*.up" in said and "more (MiB)" in said
    monkeypatch.setenv(WIDTH, "48")
    code, said, _ = run(capsys, file, "--all")
    assert code == 0 and "less: --update records it" in said and "layers.*.up" in said
    assert run(capsys, file, "--only", "small", "--update")[0] == 0
    before, after = json.loads(recorded)["jobs"], json.loads(lock.read_text())["jobs"]
    assert before["other"] == after["other"] and before["small"] != after["small"]
    assert list(after) == ["small", "other"]


def test_a_record_has_what_the_report_says(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, file, "--update")
    told = json.loads(file.with_name("memory.lock.json").read_text())
    assert told["schema"] == check.SCHEMA and torch.__version__.startswith(told["torch"])
    small = told["jobs"]["small"]
    assert sum(small["peak_by_category"].values()) == small["peak_bytes"]
    peaks = small["modules"][""]
    assert max(sum(sizes.values()) for sizes in peaks.values()) <= small["peak_bytes"]
    assert {"layers.*", "layers.*.up", "head"} <= small["modules"].keys()


def test_within_the_tolerance_it_passes(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(JOBS.replace('"1%"', '"50%"').replace('budget = "1GiB"', "tolerance = 1000000"))
    run(capsys, file, "--update")
    monkeypatch.setenv(WIDTH, "72")
    code, said, _ = run(capsys, file)
    assert code == 0 and "2 jobs, 0 failed" in said


def test_a_budget_fails_also_when_it_is_recorded(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(JOBS.replace("1GiB", "100KiB"))
    code, said, _ = run(capsys, file, "--update")
    assert code == 1 and "FAIL  other" in said and "budget: " in said
    assert "100.00 KiB given" in said and "1 failed; recorded" in said
    code, said, _ = run(capsys, file)
    assert code == 1 and "ok    small" in said


def test_a_model_that_cannot_be_planned_fails_alone(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = 'name = "other"\nmodel = "tests.cli.test_cli:data_dependent"'
    file.write_text(JOBS.replace('name = "other"\nmodel = "tests.cli.check_models:short"', other))
    code, said, _ = run(capsys, file, "--update")
    assert code == 1 and "ok    small" in said
    assert "FAIL  other\n      it cannot be planned: " in said


def test_a_model_of_transformers_has_the_options_of_the_command_line(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss in chunks among them, for which the model may not return its logits."""
    job = '[[job]]\nname = "%s"\nhf_config = "tiny-llama"\nseq = 512\noptions = { %s }\n'
    options = {"whole": "", "chunked": "chunk_loss = 64"}
    file.write_text("".join(job % each for each in options.items()))
    code, said, wrong = run(capsys, file, "--update")
    assert code == 0 and "2 jobs, 0 failed" in said, wrong
    jobs = json.loads(file.with_name("memory.lock.json").read_text())["jobs"]
    logits = 512 * 256 * 4
    assert jobs["whole"]["peak_bytes"] - jobs["chunked"]["peak_bytes"] > logits


def test_what_this_project_watches_is_as_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """As .ci/run checks it, so that a change of bytes is seen before that."""
    code, said, _ = run(capsys, ROOT / ".ci/memory.toml", "--all")
    assert code == 0, said


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("tolerance", "tolerence", "job 'small': unknown key 'tolerence' (did you mean 'toleranc"),
        ("[defaults]", "[default]", "unknown key 'default' (did you mean 'defaults'?); legal: "),
        ("checkpoint =", "checkpoints =", "job 'other': unknown option 'checkpoints'. Did you"),
        ('"1%"', '"x%"', "tolerance='x%': expected 0% to 100%"),
        ('"1%"', "-1", "tolerance=-1"),
        ('"1%"', "true", "tolerance=True: expected a share or a size"),
        ('"1GiB"', '"much"', "'much' is no size"),
        ("world_size = 4", 'world_size = "4"', "defaults: world_size='4': expected a number of"),
        ("world_size = 4", "world_size = [2, 2]", "world_size"),
        ("micro_batches = 2", "micro_batches = 0", "micro_batches=0: expected a whole number"),
        ('name = "other"', "", "job 2: it has no name"),
        ('name = "other"', 'name = "small"', "job 'small': there are two of this name"),
        ('model = "tests', 'hf_config = "x"\nmodel = "tests', "give either model or hf_config"),
        (":short", ":absent", "has no attribute 'absent'"),
        ('"full"', '"none"', "checkpoint"),
        ('"sgd"', '"nothing"', "nothing"),
        ("[defaults]", "[defaults", "it cannot be read"),
        ("[[job]]", "[[jobs]]", "unknown key 'jobs' (did you mean 'job'?)"),
        ('checkpoint = "full"', 'mixed_precision = { param_dtype = "x" }', "'x' is no dtype"),
        ('checkpoint = "full"', "mixed_precision = { dtype = 1 }", "unknown key 'dtype'"),
    ],
)
def test_what_the_file_may_not_have_is_named(
    old: str, new: str, why: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in JOBS
    file.write_text(JOBS.replace(old, new))
    code, _, error = run(capsys, file, "--update")
    assert code == 2 and why in error, error
    assert not file.with_name("memory.lock.json").exists()


def test_files_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it cannot be read" in run(capsys, tmp_path / "absent.toml")[2]
    (tmp_path / "empty.toml").write_text("")
    assert "has no job" in run(capsys, tmp_path / "empty.toml")[2]
    (tmp_path / "memory.toml").write_text(JOBS)
    code, _, error = run(capsys, tmp_path / "memory.toml", "--only", "x")
    assert code == 2 and "has no job named 'x'" in error


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"schema": "fxshard.check/1", "jobs": 1}', "[" * 100_000]
)
def test_a_record_that_is_none_says_so(
    content: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.with_name("memory.lock.json").write_text(content)
    code, _, error = run(capsys, file)
    assert code == 2 and "memory.lock.json" in error


def test_altered_records_are_refused_or_compared(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, file, "--update")
    lock = file.with_name("memory.lock.json")
    whole = json.loads(lock.read_text())
    for key, value in (
        ("peak_bytes", "1"),
        ("peak_by_category", []),
        ("modules", {"": 1}),
        ("modules", {"": {"Peak Forward": {"Temp": "x"}}}),
    ):
        told = json.loads(json.dumps(whole))
        told["jobs"]["small"][key] = value
        lock.write_text(json.dumps(told))
        code, _, error = run(capsys, file, "--only", "small")
        assert (code == 2 and "altered" in error) or "report" in error, error


def test_options_as_toml_has_them(tmp_path: Path) -> None:
    head = '[[job]]\nname = "a"\nmodel = "m:f"\nworld_size = [2, 4]\n[job.options]\n'
    (tmp_path / "m.toml").write_text(
        head + 'mixed_precision = { param_dtype = "bfloat16", cast_forward_inputs = false }\n'
        'strategy = "hybrid_shard"\noffload = true\noptimizer = "none"\nunits = ["layers.*"]\n'
        'param_init_fn = "tests.cli.check_models:encoder"'
    )
    with pytest.raises(ConfigError, match="param_init_fn"):
        check.read(str(tmp_path / "m.toml"))
    text = (tmp_path / "m.toml").read_text()
    (tmp_path / "m.toml").write_text(text.rpartition("param_init_fn")[0])
    job = check.read(str(tmp_path / "m.toml"))[0]
    assert job.step["world_size"] == (2, 4) and job.step["optimizer"] is None
    policy = job.step["mixed_precision"]
    assert policy.param_dtype is torch.bfloat16 and policy.cast_forward_inputs is False


def test_this_projects_own_jobs_are_recorded() -> None:
    jobs = check.read(str(ROOT / ".ci" / "memory.toml"))
    told = json.loads((ROOT / ".ci" / "memory.lock.json").read_text())
    assert [job.name for job in jobs] == list(told["jobs"]) and len(jobs) == 3
    assert "fxshard check .ci/memory.toml" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [("--only small", 1, "no record of it"), ("--update --only small", 0, "ok    small")],
    ids=["fails", "passes"],
)
@pytest.mark.sample(1)
def test_the_script_of_the_action_runs(
    arguments: str, code: int, said: str, file: Path, tmp_path: Path
) -> None:
    """Of the composite action, the step that checks, under bash, with the inputs as variables."""
    import yaml  # of transformers

    action = yaml.safe_load((ROOT / ".github/actions/fxshard-check/action.yml").read_text())
    step = action["runs"]["steps"][-1]
    assert set(step["env"]) == {"FILE", "ARGUMENTS"} and "${{" not in step["run"]
    summary = tmp_path / "summary.md"
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        cwd=tmp_path,
        env={
            **{"FILE": str(file), "ARGUMENTS": arguments, "GITHUB_STEP_SUMMARY": str(summary)},
            **{"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert summary.read_text().count("```") == 2 and said in summary.read_text()
