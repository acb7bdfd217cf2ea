"""What several of the tests beside it need (test_passes)."""

import re
from collections.abc import Callable

import torch

from fxshard import pipeline
from fxshard.config.checked import Config
from fxshard.config.precision import Precision
from fxshard.ir.calls import Call
from fxshard.ir.program import Program
from fxshard.passes.compile_regions import CompileRegions
from tests import graphs

PASSES = {step.name.replace("-", "_"): step for step in pipeline.default_passes(Config())}
EXACT = list(PASSES.values())  # what Inductor makes is close: tests/codegen/test_inductor.py
PASSES["compile_regions"] = CompileRegions()
CHECKPOINTED = """
%x : f32[2,4] = input 0
%count : f32[4] = buffer count
%a : f32[4,4] = param layers.0.a
%b : f32[4,4] = param layers.1.b
%dy : f32[2,4] = tangent 0
forward:
%ta = aten.t(%a)  | layers.0 checkpoint=0
%h = aten.mm(%x, %ta)  | layers.0 checkpoint=0 save
%large = aten.gt.Scalar(%h, 0)  | layers.0 checkpoint=0
%g = aten.gelu(%h)  | layers.0 checkpoint=0
%noise = aten.rand_like(%g)  | layers.0 checkpoint=0
%more_noise = aten.rand_like(%g)  | layers.0 checkpoint=0
%n = aten.mul.Tensor(%noise, %more_noise)  | layers.0 checkpoint=0
%x_1 = aten.mul.Tensor(%g, %n)  | layers.0 checkpoint=0
%more = aten.add.Tensor(%count, 1)  | layers.1 checkpoint=1
%mm = aten.mm(%x_1, %b)  | layers.1 checkpoint=1
%counted = aten.mul.Tensor(%mm, %more)  | layers.1 checkpoint=1
%x_2 = aten.tanh(%counted)  | layers.1 checkpoint=1
%y = aten.sin(%x_2)
%copy = aten.copy_(%count, %more)
backward:
%cos = aten.cos(%x_2)
%dx_2 = aten.mul.Tensor(%dy, %cos)
%dcounted = aten.tanh_backward(%dx_2, %x_2)  | layers.1 checkpoint=1
%dmm = aten.mul.Tensor(%dcounted, %more)  | layers.1 checkpoint=1
%tx = aten.t(%x_1)  | layers.1 checkpoint=1
%db = aten.mm(%tx, %dmm)  | layers.1 checkpoint=1
%tb = aten.t(%b)  | layers.1 checkpoint=1
%dx_1 = aten.mm(%dmm, %tb)  | layers.1 checkpoint=1
%dg = aten.mul.Tensor(%dx_1, %n)  | layers.0 checkpoint=0
%dlarge = aten.mul.Tensor(%dg, %large)  | layers.0 checkpoint=0
%dh = aten.gelu_backward(%dlarge, %h)  | layers.0 checkpoint=0
%th = aten.t(%dh)  | layers.0 checkpoint=0
%da = aten.mm(%th, %x)  | layers.0 checkpoint=0
return %y (0), %da (layers.0.a), %db (layers.1.b)
"""

# A head and its loss: 4 rows, of 2 batches; and the same of a loss over all but the last of each.
LOSS = """
%h : f32[4,2] = input 0
%y : i64[4] = input 1
%w : f32[5,2] = param head.weight
%b : f32[5] = param head.bias
%dloss : f32[] = tangent 0
forward:
%t = aten.t(%w)  | head
%logits = aten.addmm(%b, %h, %t)  | head
%logs = aten._log_softmax(%logits, 1, False)
%nll = aten.nll_loss_forward(%logs, %y, None, 1, -100)
%loss = getitem(%nll, 0)
%total = getitem(%nll, 1)
backward:
%dlogs = aten.nll_loss_backward(%dloss, %logs, %y, None, 1, -100, %total)
%dlogits = aten._log_softmax_backward_data(%dlogs, %logs, 1, torch.float32)
%dt = aten.t(%dlogits)  | head
%dw = aten.mm(%dt, %h)  | head
%db = aten.sum.dim_IntList(%dlogits, [0])  | head
%dh = aten.mm(%dlogits, %w)  | head
return %loss (0), %dw (head.weight), %db (head.bias), %dh (input[0])
"""
SHIFTED_LOSS = """
%h : f32[6,2] = input 0
%y : i64[4] = input 1
%w : f32[5,2] = param head.weight
%dloss : f32[] = tangent 0
forward:
%t = aten.t(%w)  | head
%mm = aten.mm(%h, %t)  | head
%logits = aten.view(%mm, [2, 3, 5])  | head
%cut = aten.slice.Tensor(%logits, 1, 0, -1)
%clone = aten.clone(%cut, memory_format=torch.contiguous_format)
%flat = aten.view(%clone, [4, 5])
%logs = aten._log_softmax(%flat, 1, False)
%nll = aten.nll_loss_forward(%logs, %y, None, 1, -100)
%loss = getitem(%nll, 0)
%total = getitem(%nll, 1)
backward:
%dlogs = aten.nll_loss_backward(%dloss, %logs, %y, None, 1, -100, %total)
%dflat = aten._log_softmax_backward_data(%dlogs, %logs, 1, torch.float32)
%dcut = aten.view(%dflat, [2, 2, 5])
%dlogits = aten.slice_backward(%dcut, [2, 3, 5], 1, 0, -1, 1)
%dmm = aten.view(%dlogits, [6, 5])  | head
%dt = aten.t(%dmm)  | head
%dw = aten.mm(%dt, %h)  | head
%dh = aten.mm(%dmm, %w)  | head
return %loss (0), %dw (head.weight), %dh (input[0])
"""

EACH = frozenset({"layers.0.weight", "head"})

FP16 = Precision(torch.float16)
root = {"": "Model"}
Build = Callable[[], Program]


def marked() -> Program:
    """Three calls, of which the first layer is checkpointed selectively and the second fully."""
    text = re.sub(r" checkpoint=\d( save)?", "", CHECKPOINTED)
    text = re.sub(
        r"layers\.(\d)$", lambda m: f"layers.{m[1]} call={int(m[1]) + 1}", text, flags=re.M
    )
    program = graphs.parse(text, root | {"layers.0": "L", "layers.1": "L"})
    program.calls = (Call("", 0, None), Call("layers.0", 0, 0), Call("layers.1", 0, 0))
    program.checkpoints = {"layers.0": "selective", "layers.1": "full"}
    return program


def full(program: Program) -> Program:
    pipeline.run(program, list(PASSES.values()))
    return program
