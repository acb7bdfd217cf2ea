"""`chunk_loss`: the head and the cross entropy by chunks of rows, beside eager PyTorch."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.errors import ConfigError
from fxshard.integrations.transformers import without_logits
from fxshard.ir import dump, text
from fxshard.memory.category import Category
from tests.fsdp2 import full
from tests.ranks import Ranks
from tests.tiny import llama, tokens

Pools = Callable[[int], Ranks]
VOCAB, WIDTH, SHAPE = 50, 8, (2, 6)  # 12 rows
IGNORED = -100


class Model(nn.Module):
    """An embedding, two layers, a head, and a loss: `loss(self, logits, tokens, labels)`."""

    def __init__(self, loss: Callable[..., Any], bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.loss = loss
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=bias)
        if tied:
            self.head.weight = self.emb.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        return self.loss(self, self.head(self.hidden(tokens)), tokens, labels)


def entropy(**options: Any) -> Callable[..., Tensor]:
    """As torchtitan writes it."""

    def loss(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), **options)

    return loss


def shifted(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def shifted_later(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    kept = logits.float()[..., :-1, :].contiguous()
    return F.cross_entropy(kept.view(-1, VOCAB), labels[..., 1:].contiguous().view(-1))


def with_z_loss(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    z = torch.logsumexp(logits.float(), -1).square().mean()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-2 * z


def masked(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    mask = (tokens > 10).flatten()
    return (each * mask).sum() / mask.sum()


def weighted(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), torch.arange(1.0, VOCAB + 1))


def capped(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((logits / 3).tanh().flatten(0, 1) * 3, labels.flatten())


def padded(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :47].flatten(0, 1), labels.flatten().clamp(max=46))


def with_accuracy(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Any:
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss, (logits.argmax(-1) == labels).float().mean()


def written_out(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    logs = logits.float().log_softmax(-1)
    return -logs.gather(-1, tokens.unsqueeze(-1)).mean()


def soft(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    wanted = F.one_hot(tokens, VOCAB).float().flatten(0, 1)
    return F.cross_entropy(logits.flatten(0, 1), wanted)


def in_a_sum(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    """With what else the model has to learn: the tangent of the cross entropy is computed."""
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return (loss * 0.3).exp() + _.emb.weight.square().mean()


def frozen(model: Model, *fqns: str) -> Model:
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(fqns))
    return model


class Checkpointed(Model):
    """The head and its loss are in a checkpoint of the model's own."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        def last(x: Tensor) -> Tensor:
            return self.loss(self, self.head(x), tokens, labels)  # type: ignore[no-any-return]

        return checkpoint(last, self.hidden(tokens), use_reentrant=False)


MODELS: dict[str, Callable[[], Model]] = {
    "plain": lambda: Model(entropy()),
    "bias": lambda: Model(entropy(), bias=True),
    "tied": lambda: Model(entropy(), tied=True),
    "smoothing": lambda: Model(entropy(label_smoothing=0.1), bias=True),
    "sum": lambda: Model(entropy(reduction="sum")),
    "masked": lambda: Model(masked),
    "weighted": lambda: Model(weighted),
    "z-loss": lambda: Model(with_z_loss),
    "capped": lambda: Model(capped),
    "padded": lambda: Model(padded),
    "accuracy": lambda: Model(with_accuracy),
    "shifted": lambda: Model(shifted, bias=True),
    "shifted later": lambda: Model(shifted_later),
    "written out": lambda: Model(written_out),
    "soft": lambda: Model(soft),
    "in a sum": lambda: Model(in_a_sum),
    "frozen head": lambda: frozen(Model(entropy(), bias=True), "head"),
    "frozen trunk": lambda: frozen(Model(entropy(), bias=True), "emb", "layers"),
    "frozen bias": lambda: frozen(Model(entropy(), bias=True), "head.bias"),
    "checkpointed": lambda: Checkpointed(entropy(), bias=True),
}


def built(name: str) -> Model:
    torch.manual_seed(0)
    return MODELS[name]()


def batch(seed: int = 0, ignored: int = 3) -> tuple[Tensor, Tensor]:
    """Tokens and labels, of which the first row's first are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(VOCAB, (2, *SHAPE), generator=generator)
    labels[0, :ignored] = IGNORED
    return tokens, labels


def loss_of(output: Any) -> Tensor:
    loss: Tensor = output[0] if isinstance(output, tuple) else output
    return loss


def trained(model: Any, scale: float = 1.0) -> dict[str, Any]:
    """Outputs and gradients of a step in which `scale` arrives at the loss."""
    model.zero_grad()
    output = model(*batch())
    (loss_of(output) * scale).backward()
    grads = {n: None if p.grad is None else full(p.grad) for n, p in model.named_parameters()}
    return {"output": output, **grads}


def assert_close(ours: dict[str, Any], wanted: dict[str, Any], **tolerances: float) -> None:
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        if value is None:
            assert ours[name] is None, name
        else:
            torch.testing.assert_close(
                ours[name], value, **tolerances, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_eager(name: str) -> None:
    model = built(name)
    ours = fxshard.compile(
        copy.deepcopy(model), world_size=2, units=["layers.*"], chunk_loss=5
    )  # chunks of 5, 5 and 2 rows
    for scale in (1.0, -0.3):  # no power of two
        assert_close(trained(ours, scale), trained(model, scale))
    with torch.no_grad():
        assert_close({"": ours(*batch())}, {"": model(*batch())})


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_known(name: str) -> None:
    seen = fxshard.validate(built(name), batch(), world_size=2, units=["layers.*"], chunk_loss=5)
    assert seen.max_abs_difference == 0


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"mixed_precision": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "bf16 alone": {"mixed_precision": MixedPrecisionPolicy(torch.bfloat16)},
    "checkpoint": {"units": ["layers.*", "head"], "checkpoint": "full"},
    "budget": {"checkpoint": "4KiB"},
    "unit of the head": {"units": ["layers.*", "head"]},
    "kept": {"units": ["layers.*", "head"], "strategy": "shard_grad_op"},
    "offload": {"offload": CPUOffloadPolicy()},
    "in backward": {"optimizer": torch.optim.AdamW, "optimizer_in_backward": True},
    "accumulated": {"micro_batches": 2, "no_sync": True},
    "hybrid": {"strategy": "hybrid_shard", "world_size": (2, 2)},
    "chosen": {"chunk_loss": True},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_bytes_and_numbers_under_other_options(options: str) -> None:
    chosen = {"world_size": 2, "units": ["layers.*"], "chunk_loss": 5, **OPTIONS[options]}
    seen = fxshard.validate(built("bias"), batch(), numerics=True, **chosen)
    assert seen.max_abs_difference == 0
    assert seen.numerics is not None
    assert {row.verdict for row in seen.numerics.rows} <= {"bitwise", "close"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, MixedPrecisionPolicy(torch.bfloat16)])
def test_bytes_and_numbers_of_compiled_regions(precision: Any) -> None:
    chosen = {"units": ["layers.*"], "backend": "inductor", "mixed_precision": precision}
    seen = fxshard.validate(
        built("smoothing"), batch(), world_size=2, chunk_loss=5, numerics=True, **chosen
    )
    assert seen.max_abs_difference == 0
    assert seen.numerics is not None
    assert {row.verdict for row in seen.numerics.rows} <= {"bitwise", "close"}


# -- memory --------------------------------------------------------------------------------------


def wide() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Of a vocabulary that is large beside all else: 96 rows of 2,000 logits."""
    torch.manual_seed(0)
    model = Model(entropy())
    model.emb, model.head = nn.Embedding(2000, WIDTH), nn.Linear(WIDTH, 2000, bias=False)
    tokens, labels = torch.randint(2000, (2, 4, 24))
    return model, (tokens, labels)


def test_nothing_of_the_logits_size_is_left() -> None:
    model, call = wide()
    plans = {
        rows: fxshard.plan(
            model, call, world_size=2, units=["layers.*"], chunk_loss=rows, pack_bytes=0
        )
        for rows in (False, 8)
    }
    logits = 96 * 2000 * 4
    largest = {
        rows: max(
            each.bytes
            for each in plan.memory.ledger().ranges
            if each.category is not Category.INPUTS
        )
        for rows, plan in plans.items()
    }
    assert largest[False] == logits
    assert largest[8] == 2000 * WIDTH * 4  # the unsharded weights, and their gradients
    # Of the backward of the loss two of the logits' size go, logs and their gradient.
    assert plans[False].memory.peak_bytes - plans[8].memory.peak_bytes > logits


def test_the_peak_falls_by_what_the_report_says() -> None:
    model, call = wide()
    peaks = {}
    for rows in (False, 8):
        options = {"world_size": 2, "units": ["layers.*"], "chunk_loss": rows}
        seen = fxshard.validate(copy.deepcopy(model), call, **options)
        assert seen.max_abs_difference == 0
        peaks[rows] = (
            fxshard.plan(model, call, **options).memory.peak_bytes,
            seen.measured_peak_bytes,
        )
    assert peaks[False][0] - peaks[8][0] == peaks[False][1] - peaks[8][1] > 96 * 2000 * 4


def test_the_head_is_gathered_once_and_reduced_once() -> None:
    plan = fxshard.plan(
        built("plain"), batch(), world_size=2, units=["layers.*", "head"], chunk_loss=5
    )
    gathered = [
        (phase, line)
        for phase, lines in by_phase(dump.text(plan.program)).items()
        for line in lines
        if "fxshard.all_gather(" in line and "| head" in line
    ]
    assert [phase for phase, _ in gathered] == ["forward"]
    reduced = [line for line in dump.text(plan.program).splitlines() if "reduce_scatter(" in line]
    assert len([line for line in reduced if "| head" in line]) == 1


def by_phase(written: str) -> dict[str, list[str]]:
    forward, _, backward = written.partition("backward:")
    return {"forward": forward.splitlines(), "backward": backward.splitlines()}


def test_the_program_is_read_back() -> None:
    program = fxshard.plan(built("smoothing"), batch(), world_size=2, chunk_loss=5).program
    written = text.write(program)
    assert text.write(text.parse(written)) == written


# -- ranks ---------------------------------------------------------------------------------------


def on_ranks(rank: int, world_size: int, name: str, options: dict[str, Any]) -> None:
    """Two steps on a batch of one's own, beside eager on the batches of all ranks."""
    model = built(name)
    ours = fxshard.compile(copy.deepcopy(model), units=["layers.*"], chunk_loss=5, **options)
    batches = [batch(seed=r, ignored=1 + 4 * r) for r in range(world_size)]
    for number, scale in enumerate((1.0, 4.0, 0.3)):
        waits = number == 1  # its gradients come with those of the next
        with ours.no_sync() if waits else contextlib.nullcontext():
            loss = loss_of(ours(*batches[rank]))
            (loss * scale).backward()
        wanted = [loss_of(model(*each)) for each in batches]
        torch.testing.assert_close(loss, wanted[rank])
        (sum(wanted) / world_size * scale).backward()  # type: ignore[union-attr]
        if waits:
            continue
        for (fqn, mine), (_, theirs) in zip(
            ours.named_parameters(), model.named_parameters(), strict=True
        ):
            if theirs.grad is None:
                assert mine.grad is None, fqn
            else:
                torch.testing.assert_close(full(mine.grad), theirs.grad)
        ours.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("name", ["bias", "tied", "shifted", "sum", "frozen head"])
def test_ranks_with_batches_of_their_own(ranks: Pools, name: str) -> None:
    ranks(2).run(on_ranks, name, {})


def test_ranks_that_keep_and_share_the_head(ranks: Pools) -> None:
    ranks(2).run(on_ranks, "plain", {"reshard_after_forward": False})


def scaled_in_fp16(rank: int, world_size: int) -> None:
    """The tangent is a scaler's; a mean over rows leaves gradients below fp16's least."""
    policy = MixedPrecisionPolicy(torch.float16, torch.float32)
    grads = {}
    for rows in (False, 5):
        model = fxshard.compile(built("plain"), mixed_precision=policy, chunk_loss=rows)
        (loss_of(model(*batch(seed=rank))) * 2.0**12).backward()
        grads[rows] = [full(p.grad) / 2**12 for p in model.parameters()]
    wanted = built("plain")
    both = [loss_of(wanted(*batch(seed=r))) for r in range(world_size)]
    (sum(both) / world_size).backward()  # type: ignore[union-attr]
    for found in grads.values():
        for mine, theirs in zip(found, wanted.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.grad, rtol=2e-2, atol=2e-4)


def test_scaled_gradients_in_fp16(ranks: Pools) -> None:
    ranks(2).run(scaled_in_fp16)


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_batch_of_which_no_label_counts(dtype: torch.dtype | None) -> None:
    """As in eager: the loss is not a number, and gradients are zeros."""
    tokens, labels = batch()[0], torch.full(SHAPE, IGNORED)
    model = built("plain")
    model(tokens, labels).backward()
    policy = MixedPrecisionPolicy(dtype, torch.float32)
    ours = fxshard.compile(built("plain"), world_size=2, mixed_precision=policy, chunk_loss=5)
    loss = ours(tokens, labels)
    loss.backward()
    assert loss.isnan()
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(mine.grad), full(theirs.grad)) and not full(mine.grad).any()


# -- transformers --------------------------------------------------------------------------------


def test_a_model_of_transformers_without_its_logits() -> None:
    ids = tokens(0, 2, 7)
    labels = ids.clone()
    labels[:, :2] = IGNORED
    call = {"input_ids": ids, "labels": labels}
    wanted = llama()
    wanted(**call).loss.backward()
    model = fxshard.compile(without_logits(llama()), world_size=2, chunk_loss=4)
    output = model(**call)
    output.loss.backward()
    assert output.logits is None
    torch.testing.assert_close(output.loss, wanted(**call).loss)
    for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), theirs.grad)
    with torch.no_grad():  # not of the loss: the logits are returned in full
        torch.testing.assert_close(model.eval()(**call).logits, wanted.eval()(**call).logits)
    seen = fxshard.validate(without_logits(llama()), (), call, world_size=2, chunk_loss=4)
    assert seen.max_abs_difference == 0


# -- what is refused, and what is left as it is --------------------------------------------------


def returned(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def by_class(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


def across_rows(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + logits.flatten(0, 1).softmax(0).square().sum()


def no_loss(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return logits.square().mean()


def two_losses(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Any:
    z = torch.logsumexp(logits, -1).square().mean()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), z


def dropped(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(logits).flatten(0, 1), labels.flatten())


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e-3, 1e-3)


def clipped(_: Model, logits: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
    cut: Any = Clipped.apply(logits)
    return F.cross_entropy(cut.flatten(0, 1), labels.flatten())


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "returned": (returned, r"the logits \(%\w+\) are returned, as \[1\].*Return the loss alone"),
    "by class": (by_class, r"classes in another dimension.*Flatten the rows"),
    "across rows": (
        across_rows,
        r"aten\._softmax\.default at .* reads the logits .* along the rows",
    ),
    "no loss": (no_loss, r"no cross entropy is in what the model computes, which returns output"),
    "two losses": (two_losses, r"gradients arrive at it in several ways.*return one loss"),
    "dropped": (dropped, r"reads the logits .* is not known to work row by row"),
    "clipped": (clipped, r"aten\.clamp\.default .* is not linear in the gradient that arrives"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    loss, why = REFUSED[name]
    with pytest.raises(ConfigError, match=f"(?s)chunk_loss: .*{why}.*Or leave chunk_loss out"):
        fxshard.plan(Model(loss), batch(), world_size=2, chunk_loss=5)
    fxshard.plan(Model(loss), batch(), world_size=2)  # by default nothing happens


def test_a_loss_outside_of_the_model_is_refused() -> None:
    model = Model(lambda _, logits, *others: logits)
    tokens, labels = batch()
    with pytest.raises(
        ConfigError, match=r"which returns output\. A loss that is computed of what"
    ):
        fxshard.plan(
            *(model, (tokens, labels)),
            loss=lambda out: F.cross_entropy(out.flatten(0, 1), labels.flatten()),
            world_size=2,
            chunk_loss=True,
        )


@pytest.mark.parametrize("rows", [0, -1, 1.5, "all", None])
def test_rows_are_a_number_or_a_flag(rows: Any) -> None:
    with pytest.raises(ConfigError, match=r"chunk_loss=.*: expected False, True, or the rows"):
        fxshard.plan(built("plain"), batch(), world_size=2, chunk_loss=rows)


def test_too_many_chunks_are_refused() -> None:
    tokens = torch.zeros(1, 514, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"514 rows of logits make 257 chunks.*at least 3 rows"):
        fxshard.plan(built("plain"), (tokens, tokens), world_size=2, chunk_loss=2)


def test_open_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dynamic=.* with chunk_loss: .*Leave one of the two"):
        fxshard.plan(
            *(built("plain"), batch()),
            dynamic={"seq": [("tokens", 1), ("labels", 1)]},
            world_size=2,
            chunk_loss=True,
        )


def test_batches_of_other_sizes_get_programs_of_their_own() -> None:
    model = built("plain")
    ours = fxshard.compile(copy.deepcopy(model), world_size=2, chunk_loss=5)
    for length in (6, 4, 3, 6):
        call = [each[:, :length] for each in batch(ignored=1)]
        torch.testing.assert_close(ours(*call), model(*call))


def test_one_chunk_is_no_chunk() -> None:
    texts = [
        dump.text(fxshard.plan(built("plain"), batch(), world_size=2, chunk_loss=rows).program)
        for rows in (False, 12)
    ]
    assert texts[0] == texts[1]


def test_a_forward_without_a_loss_is_left_as_it_is() -> None:
    """Such as generation, of a model that trains in chunks."""
    model = Model(lambda self, logits, *others: logits)
    with torch.no_grad():
        fxshard.plan(model, batch(), world_size=2, chunk_loss=5)


def test_candidates_of_a_search() -> None:
    model, call = wide()
    found = fxshard.tune(
        *(model, call),
        world_size=2,
        batches=[4],
        hardware="h100",
        space={"chunk_loss": [False, True], "checkpoint": [None], "offload": [None]},
        mixed_precision=None,
        strategy="full_shard",
        forward_prefetch=1,
        backward_prefetch=1,
    )
    planned = [trial for trial in found.trials if trial.tried is not None]
    assert {trial.candidate.changes["chunk_loss"] for trial in planned} == {False, True}
