"""What lines of forward can be. Each function draws from a `Draft` and returns an expression.

"@" stands for the variable that a statement assigns; a text that begins with "!" assigns none.
One file because the order of all entries decides what a seed draws.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.fuzz.draft import Draft, Unfit

Operator = Callable[[Draft], str]
OPERATORS: dict[str, Operator] = {}
WEIGHTS: dict[str, float] = {}

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
}


def operator(weight: float = 1.0) -> Callable[[Operator], Operator]:
    """Register under the function's name; twice the weight, twice as often."""

    def register(function: Operator) -> Operator:
        name = function.__name__.rstrip("_")
        OPERATORS[name], WEIGHTS[name] = function, weight
        return function

    return register


def simple(names: str, weight: float, *texts: str, dims: int = 0) -> None:
    """Operators of one tensor of at least `dims` dimensions: ``{x}`` is it; one text is drawn."""

    def draw(d: Draft) -> str:
        x, _ = d.tensor(lambda t: t.dim() >= dims)
        return d.one(*texts).replace("{x}", x)

    OPERATORS[names], WEIGHTS[names] = draw, weight


def width(t: Tensor, least: int = 1) -> bool:
    return t.dim() >= 2 and t.shape[-1] >= least


def dt(t: Tensor) -> str:
    """`, dtype=...` for a module that reads `t`."""
    return "" if t.dtype == torch.float32 else f", dtype={DTYPES[t.dtype]}"


def shaped(n: int) -> Callable[[Tensor], bool]:
    return lambda t: t.dim() == n and t.numel() > 0


# -- modules ---------------------------------------------------------------------------------------


@operator(8)
def linear(d: Draft) -> str:
    x, t = d.tensor(width)
    out = d.one(3, 4, 5, 6, 7, 8, 1)
    bias = d.one("", "", ", bias=False")
    return f"{d.attribute('m', f'nn.Linear({t.shape[-1]}, {out}{bias}{dt(t)})')}({x})"


@operator(3)
def linear_again(d: Draft) -> str:
    """A module that was called before is called once more."""
    names = [i.split(" = ")[0] for i in d.inits if "= nn.Linear(" in i]
    if not names:
        raise Unfit
    name = d.rng.choice(names)
    weight = d.live_value(f"{name}.weight")
    x, _ = d.tensor(lambda t: width(t) and t.shape[-1] == weight.shape[1])
    return f"{name}({x})"


@operator(2)
def parameter(d: Draft) -> str:
    x, t = d.tensor(width)
    last, dtype = t.shape[-1], DTYPES[t.dtype]
    shape = d.one(f"{last}", f"1, {last}", f"{t.shape[-2]}, 1", f"{t.shape[-2]}, {last}", "1")
    if d.chance(0.02):
        shape = "()"  # refused: it has no rows
    p = d.attribute("p", f"nn.Parameter(torch.randn({shape}).to({dtype}))")
    return d.one(f"{x} * {p}", f"{x} + {p}", f"torch.addcmul({x}, {p}, {x})", f"{p} - {x}")


@operator(1)
def parameter_of_another_dtype(d: Draft) -> str:
    x, t = d.tensor(width)
    dtype = d.one("BF16", "F16", "F64", "F32")
    p = d.attribute("p", f"nn.Parameter(torch.randn({t.shape[-1]}).to({dtype}))")
    return d.one(f"{x} * {p}", f"{x} + {p}.to({x}.dtype)", f"({x} * {p}).to({x}.dtype)")


@operator(1)
def linear_of_another_dtype(d: Draft) -> str:
    x, t = d.tensor(width)
    dtype = d.one("BF16", "BF16", "F16", "F64", "F32")
    m = d.attribute("m", f"nn.Linear({t.shape[-1]}, {d.one(3, 4, 6)}, dtype={dtype})")
    return d.one(f"{m}({x}.to({dtype}))", f"{m}({x}.to({dtype})).to({x}.dtype)")


@operator(1)
def matmul_with_a_parameter(d: Draft) -> str:
    x, t = d.tensor(width)
    n, out = t.shape[-1], d.one(2, 3, 5)
    dtype = DTYPES[t.dtype]
    p = d.attribute("p", f"nn.Parameter(torch.randn({n}, {out}).to({dtype}) / {n})")
    return d.one(f"{x} @ {p}", f"torch.einsum('...i,io->...o', {x}, {p})", f"{x}.matmul({p})")


@operator(1.5)
def view_of_a_parameter(d: Draft) -> str:
    """Slices, transposes and chunks of parameters are read."""
    x, t = d.tensor(lambda t: width(t, 2))
    n = t.shape[-1]
    p = d.attribute("p", f"nn.Parameter(torch.randn({n + 2}, {n}).to({DTYPES[t.dtype]}) / {n})")
    return d.one(
        f"F.linear({x}, {p}[1:{n}])",
        f"{x} @ {p}[:{n}].t()",
        f"{x} @ {p}.chunk(2)[0].t()",
        f"{x} * {p}[0]",
        f"{x} + {p}[1:-1].diagonal()",
        f"F.linear({x}, {p}.view(-1)[:{n}].view(1, {n}))",
        f"{x} * {p}.select(1, 0)[:{n}]",
        f"{x} * torch.stack(({p}[0], {p}[1])).mean(0)",
        f"F.linear({x}, {p}[::2])",
        f"F.linear({x}, {p}.unflatten(0, (1, -1))[0])",
    )


@operator(1)
def odd_parameter(d: Draft) -> str:
    """Parameters without elements, scalars, unused ones, integers, transposed and expanded ones."""
    x, t = d.tensor(width)
    n, to = t.shape[-1], f".to({DTYPES[t.dtype]})"
    code, text = d.one(
        (f"torch.randn(0, {n}){to}", "{x} + {p}.sum()"),
        (f"torch.randn(0){to}", "torch.cat(({p}, {x}.flatten()))"),
        (f"torch.randn(3, {n}){to}", "{x} + 0"),
        (f"torch.randn(2, 1, {n}){to}", "{x} * {p}[1, 0]"),
        (f"torch.randn({n}, 1){to}", "{x} @ {p}"),
    )
    p = d.attribute("p", f"nn.Parameter({code})")
    return text.replace("{x}", x).replace("{p}", p)


@operator(0.05)
def transposed_parameter(d: Draft) -> str:
    """Refused: its rows do not follow each other."""
    x, t = d.tensor(width)
    code = f"nn.Parameter(torch.randn({t.shape[-1]}, 3).to({DTYPES[t.dtype]}).t())"
    return f"F.linear({x}, {d.attribute('p', code)})"


@operator(0.7)
def frozen(d: Draft) -> str:
    """A frozen module or parameter."""
    x, t = d.tensor(width)
    m = d.attribute("m", f"nn.Linear({t.shape[-1]}, {d.one(3, 4, 5)}{dt(t)})")
    d.init(f"{m}{d.one('', '.weight', '.bias')}.requires_grad_(False)")
    return f"{m}({x})"


@operator(0.7)
def never_called(d: Draft) -> str:
    """A module that forward leaves out."""
    x, t = d.tensor()
    d.attribute("m", f"nn.Linear({d.one(3, 5)}, {d.one(2, 4)}{dt(t)})")
    return f"{x} * 1.5"


@operator(1)
def tied(d: Draft) -> str:
    """Another module with the weight of an earlier one, or the same module under two names."""
    weights = [i for i in d.inits if "= nn.Linear(" in i]
    if not weights:
        raise Unfit
    first = d.rng.choice(weights).split(" = ")[0]
    rows, columns = d.live_value(f"{first}.weight").shape
    dtype = d.live_value(f"{first}.weight").dtype
    x, t = d.tensor(lambda t: t.dim() >= 1 and t.shape[-1] in (rows, columns) and t.dtype == dtype)
    if t.shape[-1] == columns and d.chance(0.7):
        if d.chance(0.4):
            return f"{d.attribute('m', first)}({x})"
        m = d.attribute("m", f"nn.Linear({columns}, {rows}{dt(t)})")
        d.init(f"{m}.weight = {first}.weight")
        return f"{m}({x})"
    return f"F.linear({x}, {first}.weight.t())"


@operator(2)
def norm(d: Draft) -> str:
    x, t = d.tensor(lambda t: width(t, 2))
    n = t.shape[-1]
    kind = d.one(
        f"nn.LayerNorm({n}{dt(t)})",
        f"nn.RMSNorm({n}{dt(t)})",
        f"nn.LayerNorm({n}, elementwise_affine=False)",
        f"nn.LayerNorm({n}, bias=False{dt(t)})",
        f"nn.LayerNorm(({t.shape[-2]}, {n}){dt(t)})",
    )
    return f"{d.attribute('m', kind)}({x})"


@operator(1.5)
def batch_norm(d: Draft) -> str:
    x, t = d.tensor(lambda t: t.dim() in (2, 3) and t.numel() >= 4 and t.shape[0] > 1)
    c = t.shape[1]
    kind = d.one(
        f"nn.BatchNorm1d({c}{dt(t)})",
        f"nn.BatchNorm1d({c}, affine=False)",
        f"nn.BatchNorm1d({c}, track_running_stats=False{dt(t)})",
        f"nn.BatchNorm1d({c}, momentum=0.3{dt(t)})",
    )
    if t.dim() == 3:
        kind = d.one(kind, f"nn.GroupNorm(1, {c}{dt(t)})", f"nn.InstanceNorm1d({c}, affine=True)")
    return f"{d.attribute('m', kind)}({x})"


@operator(1.5)
def conv(d: Draft) -> str:
    x, t = d.tensor(lambda t: shaped(3)(t) and t.shape[-1] >= 3)
    c = t.shape[1]
    kind = d.one(
        f"nn.Conv1d({c}, {d.one(2, 3, 4)}, 3, padding=1{dt(t)})",
        f"nn.Conv1d({c}, {d.one(2, 4)}, 2, stride=2{dt(t)})",
        f"nn.Conv1d({c}, {c}, 3, groups={c}, bias=False{dt(t)})",
        f"nn.ConvTranspose1d({c}, 2, 2{dt(t)})",
        f"nn.Conv1d({c}, 2, 2, dilation=2, padding='same'{dt(t)})",
    )
    return f"{d.attribute('m', kind)}({x})"


@operator(0.7)
def conv2d(d: Draft) -> str:
    x, t = d.tensor(lambda t: shaped(3)(t) and t.shape[-1] >= 2 and t.shape[-2] >= 2)
    m = d.attribute("m", f"nn.Conv2d(1, 2, 2, bias={d.one(True, False)}{dt(t)})")
    return f"{m}({x}.unsqueeze(1)).flatten(1, 2)"


@operator(1.5)
def attention(d: Draft) -> str:
    x, t = d.tensor(lambda t: shaped(3)(t) and t.shape[-1] % 2 == 0)
    n = t.shape[-1]
    if d.chance(0.4):
        m = d.attribute("m", f"nn.MultiheadAttention({n}, 2, batch_first=True{dt(t)})")
        return f"{m}({x}, {x}, {x}{d.one('', ', need_weights=False')})[0]"
    m = d.attribute("m", f"nn.Linear({n}, {3 * n}{dt(t)})")
    q = d.one(
        f"{m}({x}).chunk(3, -1)",
        f"{m}({x}).split({n}, -1)",
        f"{m}({x}).unflatten(-1, (3, {n})).unbind(-2)",
    )
    how = d.one("", ", is_causal=True", ", scale=0.5")
    return f"F.scaled_dot_product_attention(*{q}{how})"


@operator(0.7)
def encoder_layer(d: Draft) -> str:
    x, t = d.tensor(lambda t: shaped(3)(t) and t.shape[-1] % 2 == 0)
    m = d.attribute(
        "m",
        f"nn.TransformerEncoderLayer({t.shape[-1]}, 2, 6, dropout=0.0, batch_first=True{dt(t)})",
    )
    return f"{m}({x})"


@operator(1)
def recurrent(d: Draft) -> str:
    x, t = d.tensor(lambda t: shaped(3)(t) and t.dtype in (torch.float32, torch.float64))
    n, h = t.shape[-1], d.one(3, 4)
    kind = d.one(
        f"nn.GRU({n}, {h}, batch_first=True{dt(t)})",
        f"nn.LSTM({n}, {h}{dt(t)})",
        f"nn.RNN({n}, {h}, num_layers=2{dt(t)})",
        f"nn.LSTM({n}, {h}, bidirectional=True{dt(t)})",
    )
    return f"{d.attribute('m', kind)}({x})[0]"


@operator(0.7)
def cell(d: Draft) -> str:
    """A cell called in a loop over the sequence."""
    x, t = d.tensor(lambda t: shaped(3)(t) and t.shape[1] <= 5)
    n = t.shape[-1]
    m = d.attribute("m", f"nn.{d.one('GRUCell', 'RNNCell')}({n}, {n}{dt(t)})")
    return f"@ = torch.zeros_like({x}[:, 0])\nfor step in {x}.unbind(1):\n    @ = {m}(step, @)"


@operator(2)
def embedding(d: Draft) -> str:
    i, _ = d.index()
    n = d.one(4, 5, 6)
    rest = d.one("", "", ", padding_idx=0", ", dtype=BF16")
    return f"{d.attribute('m', f'nn.Embedding(9, {n}{rest})')}({i}.clamp(0, 8))"


@operator(0.5)
def embedding_bag(d: Draft) -> str:
    i, _ = d.index(lambda t: t.dim() == 2)
    m = d.attribute("m", f"nn.EmbeddingBag(9, 4, mode={d.one('sum', 'mean')!r})")
    return f"{m}({i}.clamp(0, 8))"


@operator(0.7)
def parametrized(d: Draft) -> str:
    x, t = d.tensor(width)
    m = d.attribute("m", f"nn.Linear({t.shape[-1]}, 4{dt(t)})")
    d.init(f"nn.utils.parametrizations.{d.one('weight_norm', 'orthogonal')}({m})")
    return f"{m}({x})"


@operator(0.7)
def activation_module(d: Draft) -> str:
    x, t = d.tensor(lambda t: t.dim() >= 2)
    kind = d.one("PReLU()", f"PReLU({t.shape[1]})", "GELU()", "ReLU(inplace=True)", "SiLU()")
    if "PReLU" in kind and dt(t):
        kind = kind.replace("()", f"({dt(t)[2:]})")
    return f"{d.attribute('m', f'nn.{kind}')}({x})"


@operator(0.5)
def bilinear(d: Draft) -> str:
    x, t = d.tensor(shaped(2))
    y, u = d.tensor(lambda u: shaped(2)(u) and u.shape[0] == t.shape[0] and u.dtype == t.dtype)
    return f"{d.attribute('m', f'nn.Bilinear({t.shape[1]}, {u.shape[1]}, 3{dt(t)})')}({x}, {y})"


@operator(0.7)
def sequential(d: Draft) -> str:
    x, t = d.tensor(width)
    n = t.shape[-1]
    last = d.one(f"nn.LayerNorm(5{dt(t)})", "nn.Tanh()", "nn.Dropout(0.0)", "nn.Identity()")
    m = d.attribute("m", f"nn.Sequential(nn.Linear({n}, 5{dt(t)}), nn.ReLU(), {last})")
    return f"{m}({x})"


@operator(0.7)
def dropout(d: Draft) -> str:
    x, _ = d.tensor()
    return d.one(
        f"F.dropout({x}, 0.3, self.training)", f"{d.attribute('m', 'nn.Dropout(0.4)')}({x})"
    )


@operator(0.4)
def drawn_numbers(d: Draft) -> str:
    x, _ = d.tensor()
    return d.one(
        f"{x} + torch.rand({x}.shape).to({x}.dtype)",
        f"{x} * (torch.rand({x}.shape[:1] + (1,) * ({x}.dim() - 1)) < 0.5)",
    )


# -- buffers ---------------------------------------------------------------------------------------


@operator(1)
def buffer_read(d: Draft) -> str:
    x, t = d.tensor(width)
    b = d.buffer(f"torch.randn({t.shape[-1]}).to({DTYPES[t.dtype]})", d.chance(0.7))
    return d.one(f"{x} * {b}", f"{x} + {b}.exp()", f"torch.where({b} > 0, {x}, {b})")


@operator(1)
def buffer_written(d: Draft) -> str:
    """A moving average, a counter, a ring of the latest rows."""
    x, t = d.tensor(lambda t: width(t) and t.numel() > 0)
    b = d.buffer(f"torch.zeros({t.shape[-1]}).to({DTYPES[t.dtype]})", d.chance(0.7))
    mean = f"{x}.detach().flatten(0, -2).mean(0)"
    return d.one(
        f"{b}.mul_(0.9).add_({mean}, alpha=0.1)\n@ = {x} - {b}",
        f"@ = {x} + {b}\n{b}.copy_({mean})",
        f"{b} = {b} * 0.5 + {mean}\n@ = {x} * {b}.cos()",
        f"with torch.no_grad():\n    {b}.lerp_({mean}, 0.5)\n@ = {x} + {b}",
        f"{b}[0] += 1\n@ = {x} * {b}.sum().sigmoid()",
        f"if self.training:\n    {b} += {mean}\n@ = {x} - {b}",
    )


@operator(0.01)
def buffer_given_memory(d: Draft) -> str:
    """Refused: no operator says so."""
    x, t = d.tensor(lambda t: width(t) and t.numel() > 0)
    b = d.buffer(f"torch.zeros({t.shape[-1]}).to({DTYPES[t.dtype]})")
    return f"{b}.data = {b} * 0.5 + {x}.detach().flatten(0, -2).mean(0)\n@ = {x} * {b}.cos()"


@operator(0.5)
def counter(d: Draft) -> str:
    x, _ = d.tensor()
    b = d.buffer(d.one("torch.tensor(0)", "torch.zeros(())", "torch.zeros(1, dtype=torch.int32)"))
    return f"{b} += 1\n@ = {x} / ({b} + 1)"


@operator(0.5)
def buffer_shared(d: Draft) -> str:
    """Two buffers over one storage, or one under two names."""
    x, t = d.tensor(width)
    n, to = t.shape[-1], f".to({DTYPES[t.dtype]})"
    b = d.buffer(f"torch.ones({n}){to}")
    c = d.buffer(d.one(b, f"{b}[:]", f"{b}.view(1, -1)", f"{b}[:1]"), d.chance(0.7))
    return d.one(
        f"{x} * {b} + {c}",
        f"{b}.add_(1)\n@ = {x} * {c}",
        f"{c}.mul_(0.5)\n@ = {x} + {b}",
        f"@ = {x} + {b}\n{c}.add_(1)",
    )


# -- operators without parameters ------------------------------------------------------------------

simple(
    "pointwise",
    6,
    "torch.tanh({x})",
    "F.gelu({x})",
    "torch.sigmoid({x})",
    "{x} * 0.5",
    "{x} + 1",
    "F.silu({x})",
    "{x}.sin()",
    "F.relu({x})",
    "F.leaky_relu({x}, 0.1)",
    "F.softplus({x})",
    "{x}.clamp(-1, 1)",
    "{x}.abs()",
    "{x} - {x}.detach()",
    "-{x}",
    "{x}.square()",
    "({x}.abs() + 1).log()",
    "({x}.abs() + 1).sqrt()",
    "({x}.abs() + 1).reciprocal()",
    "torch.where({x} > 0, {x}, {x} * 0.1)",
    "{x}.masked_fill({x} < 0, 0.5)",
    "torch.maximum({x}, -{x})",
    "{x} ** 3 * 0.1",
    "F.hardtanh({x})",
    "F.elu({x})",
    "torch.atan2({x}, {x}.abs() + 1)",
    "F.logsigmoid({x})",
    "{x}.clone()",
    "{x}.contiguous()",
    "{x}.sign() * {x}",
    "torch.nan_to_num({x})",
)
simple(
    "reductions",
    2,
    "{x} - {x}.mean(-1, keepdim=True)",
    "{x}.softmax(-1)",
    "F.log_softmax({x}, -1)",
    "{x}.cumsum(-1)",
    "{x} / ({x}.norm(dim=-1, keepdim=True) + 1)",
    "F.normalize({x}, dim=-1)",
    "{x}.logsumexp(-1, keepdim=True) + {x}",
    "{x} - {x}.amax(-1, keepdim=True)",
    "{x}.sum(0, keepdim=True) * 0.1",
    "{x} * {x}.var()",
    "{x}.mean(-1)",
    "{x}.mean()",
    "{x}.max(-1)[0]",
    "{x}.sort(-1)[0]",
    "{x}.topk(1, -1)[0]",
    "{x}.std(-1, keepdim=True) + {x}",
    "{x}.cumprod(-1) * 0.1",
    dims=2,
)
simple(
    "views",
    4,
    "{x}.transpose(0, 1)",
    "{x}.flatten()",
    "{x}.flatten(1)",
    "{x}.unsqueeze(1)",
    "{x}.reshape(-1, 1)",
    "{x}[:, :2]",
    "{x}[:, ::2]",
    "{x}[1:]",
    "{x}[..., -1]",
    "{x}[:0]",
    "{x}.permute(*reversed(range({x}.dim())))",
    "{x}.expand(2, *{x}.shape)",
    "{x}.chunk(2, -1)[0]",
    "{x}.split(1, 0)[0]",
    "{x}.unbind(0)[-1]",
    "{x}.narrow(1, 0, 1)",
    "{x}.select(1, 0)",
    "{x}.mT",
    "{x}.unfold(1, 2, 1)",
    "{x}.movedim(0, -1)",
    "{x}[None]",
    "{x}.squeeze()",
    "{x}.diagonal()",
    "{x}.view({x}.shape)",
    "{x}.view_as({x})",
    dims=2,
)
simple(
    "shapes",
    3,
    "torch.cat(({x}, {x} * 2), 1)",
    "torch.stack(({x}, -{x}), 1)",
    "{x}.repeat(1, 2) if {x}.dim() == 2 else {x}",
    "{x}.flip(0)",
    "{x}.roll(1, 1)",
    "F.pad({x}, (1, 1))",
    "{x}.repeat_interleave(2, 0)",
    "{x}.tril()",
    "torch.cat(({x}[1:], {x}[:1]))",
    "torch.cat([t * i for i, t in enumerate({x}.split(2, 1))], 1)",
    "F.pad({x}, (-1, 0))",
    "torch.kron({x}, torch.ones(1, 2).to({x}.dtype)) if {x}.dim() == 2 else {x}",
    dims=2,
)
simple(
    "indexing",
    3,
    "{x}[:, torch.arange({x}.shape[1] - 1, -1, -1)]",
    "{x}.index_select(0, torch.tensor([0, 0]))",
    "{x}.gather(-1, {x}.argsort(-1))",
    "torch.zeros_like({x}).scatter_add(-1, {x}.argsort(-1), {x})",
    "torch.zeros_like({x}).index_add(0, torch.zeros({x}.shape[0], dtype=torch.int64), {x})",
    "{x}[[0, 0, -1]]",
    "{x}.take_along_dim({x}.argmax(-1, keepdim=True), -1)",
    "torch.zeros_like({x}).index_put((torch.tensor([0, 0]),), {x}[:1], accumulate=True)",
    "{x}.index_fill(0, torch.tensor([0]), 0.5)",
    "{x} * F.one_hot({x}.argmax(-1), {x}.shape[-1])",
    "{x}.masked_scatter({x} > 0, {x}.flip(0).contiguous())",
    "torch.scatter({x}, 0, torch.zeros_like({x}, dtype=torch.int64)[:1], {x}[-1:])",
    "torch.zeros_like({x}).scatter_reduce(-1, {x}.argsort(-1), {x}, 'mean')",
    dims=2,
)
simple(
    "pooling",
    1,
    "F.avg_pool1d({x}, 2)",
    "F.max_pool1d({x}, 2)",
    "F.adaptive_avg_pool1d({x}, 2)",
    "F.interpolate({x}, scale_factor=2)",
    "F.interpolate({x}, scale_factor=2, mode='linear')",
    "F.max_pool1d({x}, 2, 1, return_indices=True)[0]",
    dims=3,
)
simple(
    "products",
    2,
    "{x} @ {x}.mT * 0.1",
    "torch.einsum('b...i,b...i->b...', {x}, {x})",
    "torch.cdist({x} + 1, {x}.detach())",
    "{x}.unsqueeze(-1) * {x}.unsqueeze(-2)",
    "torch.linalg.vector_norm({x} + 1, dim=-1)",
    "F.cosine_similarity({x} + 1, {x}.flip(0), dim=-1)",
    "{x}.mT @ {x} * 0.1",
    dims=2,
)
simple(
    "casts",
    2,
    "{x}.to(BF16)",
    "{x}.to(F32)",
    "{x}.to(F16)",
    "{x}.to(F64)",
    "{x}.to(BF16).to({x}.dtype)",
    "({x} > 0).to({x}.dtype) * {x}",
)
simple("detached", 0.5, "{x}.detach()", "{x} + {x}.detach()", "{x}.detach() * 2")


@operator(4)
def two_tensors(d: Draft) -> str:
    x, _ = d.tensor()
    y, _ = d.tensor()
    return d.one(
        f"{x} + {y}",
        f"{x} * {y}",
        f"{x} - {y}",
        f"torch.cat(({x}, {y}), -1)",
        f"torch.where({x} > {y}, {x}, {y})",
        f"torch.minimum({x}, {y})",
        f"{x} @ {y}.mT",
        f"torch.lerp({x}, {y}, 0.3)",
        f"torch.addcmul({x}, {x}, {y}, value=0.1)",
        f"torch.stack(({x}, {y}))",
        f"F.mse_loss({x}, {y})",
        f"F.smooth_l1_loss({x}, {y}, reduction='none')",
    )


@operator(1)
def loss_inside(d: Draft) -> str:
    x, t = d.tensor(lambda t: t.dim() == 2 and t.numel() > 0)
    rows, classes = t.shape
    return d.one(
        f"F.cross_entropy({x}, torch.arange({rows}) % {classes})",
        f"F.nll_loss(F.log_softmax({x}, -1), torch.arange({rows}) % {classes})",
        f"F.binary_cross_entropy_with_logits({x}, torch.ones_like({x}))",
        f"F.kl_div(F.log_softmax({x}, -1), {x}.detach().softmax(-1), reduction='batchmean')",
    )


@operator(2)
def in_place(d: Draft) -> str:
    """Writes into a result, a clone, or a view of one."""
    x, _ = d.tensor(lambda t: t.dim() >= 2)
    return d.one(
        f"@ = {x}.clone()\n@.add_(1.0)",
        f"@ = {x} * 1\n@[:, 0] = 0.5",
        f"@ = {x}.tanh()\n@ += {x}",
        f"@ = {x} * 2\n@.mul_({x}.sigmoid())",
        f"@ = torch.zeros_like({x})\n@.copy_({x})",
        f"@ = torch.zeros_like({x})\n@[1:] = {x}[:-1]",
        f"@ = ({x} * 1).transpose(0, 1)\n@.add_(1.0)",
        f"@ = {x} + 0\n@.select(1, 0).mul_(0.5)",
        f"@ = {x} + 0\n@[..., :1].add_({x}[..., :1])",
        f"@ = F.relu_({x} * 1)",
        f"@ = {x} * 1\n@.masked_fill_(@ < 0, 0.0)",
        f"@ = {x} * 1\n@.t_()",
        f"@ = {x} * 1\n@.unsqueeze_(0)",
        f"@ = {x} * 1\n@.clamp_(min=-0.5)",
        f"@ = torch.empty_like({x})\n@.fill_(0.25)\n@ = @ * {x}",
        f"@ = {x} * 1\n@.index_add_(0, torch.tensor([0]), {x}[:1])",
        f"@ = {x} * 1\nfor i in range({x}.shape[0]):\n    @[i] *= i + 1",
    )


@operator(0.7)
def in_place_on_a_variable(d: Draft) -> str:
    """Writes into an earlier result; later readers see it."""
    x, _ = d.tensor(lambda t: t.dim() >= 2 and t.requires_grad and not t.is_leaf)
    return d.one(f"!{x}.add_(0.5)", f"!{x}.mul_(0.9)", f"!{x}[:, 0] = 0.0", f"!{x} += 1")


@operator(0.05)
def in_place_on_a_parameter(d: Draft) -> str:
    x, t = d.tensor(width)
    p = d.attribute("p", f"nn.Parameter(torch.randn({t.shape[-1]}).to({DTYPES[t.dtype]}))")
    write = d.one(f"{p}.mul_(0.99)", f"{p}.clamp_(-1, 1)", f"{p}[0] = 0.5")
    return f"with torch.no_grad():\n    {write}\n@ = {x} * {p}"


@operator(0.7)
def custom_function(d: Draft) -> str:
    x, _ = d.tensor()
    return f"{d.one('Doubled', 'Clipped', 'Product')}.apply({x})"


@operator(0.7)
def without_gradient(d: Draft) -> str:
    x, _ = d.tensor()
    return f"with torch.no_grad():\n    @ = {x}.tanh()\n@ = @ + {x}"


@operator(0.7)
def of_training(d: Draft) -> str:
    x, _ = d.tensor()
    return f"{x} * (2.0 if self.training else 1.0)"


@operator(0.7)
def autocast(d: Draft) -> str:
    x, t = d.tensor(width)
    m = d.attribute("m", f"nn.Linear({t.shape[-1]}, 4{dt(t)})")
    dtype = d.one("torch.bfloat16", "torch.bfloat16", "torch.float16")
    return f"with torch.autocast('cpu', {dtype}, enabled=CAST):\n    @ = {m}({x})"


@operator(0.1)
def data_dependent(d: Draft) -> str:
    x, _ = d.tensor(lambda t: t.dim() >= 1 and t.numel() > 0)
    return d.one(f"{x}[{x} > 0].sum() + {x}", f"{x} * {x}.gt(0).nonzero().shape[0] * 0.1")


@operator(1)
def indices(d: Draft) -> str:
    """An integer result."""
    x, _ = d.tensor(lambda t: t.dim() >= 2 and t.numel() > 0)
    return d.one(f"{x}.argmax(-1)", f"{x}.argsort(-1)", f"({x} > 0).long()", f"{x}.round().long()")


@operator(0.5)
def penalty(d: Draft) -> str:
    """A penalty on the parameters themselves."""
    x, _ = d.tensor()
    return d.one(
        f"{x} + 0.01 * sum(p.square().sum().to({x}.dtype) for p in self.parameters())",
        f"{x} + 0.01 * torch.stack([p.sum().to({x}.dtype) for p in self.parameters()]).mean()",
    )
