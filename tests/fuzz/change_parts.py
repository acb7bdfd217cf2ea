"""What forward reads and a user changes between calls, as code (see changes.py).

In a part, `§` is its number, `@` what has it (the model or a block) and `CLS` that one's class.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Part:
    """Attributes:
    forward: lines of forward, on `h`.
    changes: what a user may do between two calls.
    defines, in_class, init: lines before the classes, in the class, and in ``__init__``.
    """

    forward: str
    changes: tuple[str, ...]
    defines: str = ""
    in_class: str = ""
    init: str = ""


PARTS = [
    # -- globals
    Part("h = h * G§", ("G§ = 0.5", "G§ = 2", "G§ = 1.0", "G§ = True"), "G§ = 1.0"),
    Part(
        "h = h * G§['a']",
        ("G§['a'] = 0.5", "G§ = {'a': 3.0}", "G§.update(a=2.0)"),
        "G§ = {'a': 1.0, 'b': 2.0}",
    ),
    Part(
        "h = h * sum(G§)",
        ("G§.append(0.5)", "G§.pop()", "G§[0] = 3.0", "G§ = [2.0]"),
        "G§ = [1.0, 2.0]",
    ),
    Part("h = h if 'no' in G§ else h * 2", ("G§.add('no')", "G§.discard('no')"), "G§ = set()"),
    Part(
        "h = h * G§.a.b",
        ("G§.a.b = 0.5", "G§.a = types.SimpleNamespace(b=4.0)"),
        "G§ = types.SimpleNamespace(a=types.SimpleNamespace(b=1.0))",
    ),
    Part(
        "h = h * (2.0 if G§ is Kind§.A else 0.5)",
        ("G§ = Kind§.B", "G§ = Kind§.A"),
        "class Kind§(enum.Enum):\n    A = 1\n    B = 2\nG§ = Kind§.A",
    ),
    Part(
        "h = h * float(G§[0])",
        ("G§[0] = 3.0", "G§ = np.array([0.5])", "G§ *= 2"),
        "G§ = np.array([1.0, 2.0])",
    ),
    Part(
        "h = h * G§",
        ("G§ = torch.tensor(0.5)", "G§.mul_(2)", "G§ = G§ + 1"),
        "G§ = torch.tensor(1.0)",
    ),
    Part(
        "h = G§(h)",
        ("G§ = torch.relu", "G§ = torch.tanh", "G§ = lambda x: x * 3"),
        "G§ = torch.tanh",
    ),
    Part(
        "h = f§(h)",
        ("f§ = lambda x: x * 4", "f§.__defaults__ = (0.25,)", "f§.scale = 2.0"),
        "def f§(x, by=2.0):\n    return x * by",
    ),
    Part(
        "h = f§(h)",
        ("f§.scale = 2.0", "f§.scale = 0.25"),
        "def f§(x):\n    return x * f§.scale\nf§.scale = 1.0",
    ),
    Part(
        "h = f§(h)",
        ("g§(0.25)", "g§(3.0)"),
        "def make§():\n    by = 1.0\n    def f(x):\n        return x * by\n"
        "    def g(v):\n        nonlocal by\n        by = v\n    return f, g\nf§, g§ = make§()",
    ),
    Part(
        "h = f§(h)",
        ("f§ = functools.partial(torch.mul, other=3.0)", "f§.keywords['other'] = 0.5"),
        "f§ = functools.partial(torch.mul, other=2.0)",
    ),
    Part(
        "h = h * f§(2)",
        ("f§.cache_clear()", "G§ = 3.0; f§.cache_clear()"),
        "G§ = 1.0\n@functools.lru_cache\ndef f§(n):\n    return n * G§",
    ),
    Part(
        "h = h * float(os.environ.get('CHANGE_§', '1'))",
        ("os.environ['CHANGE_§'] = '0.5'", "os.environ.pop('CHANGE_§', None)"),
        "import os",
    ),
    Part("h = h * float(os.getenv('CHANGE_§', '1'))", ("os.environ['CHANGE_§'] = '0.5'",)),
    Part(
        "h = h * G§.get()",
        ("G§.set(0.5)", "G§.set(3.0)"),
        "G§ = contextvars.ContextVar('G§', default=1.0)",
    ),
    Part("h = h * G§.by", ("G§.by = 0.5", "G§.by = 2.0"), "G§ = threading.local()\nG§.by = 1.0"),
    Part(
        "h = h * sum(G§)",
        ("G§.append(0.5)", "G§.clear(); G§.append(2.0)"),
        "G§ = collections.deque([1.0], maxlen=3)",
    ),
    Part(
        "h = h * G§.by",
        ("G§ = G§._replace(by=0.5)", "G§ = P§(3.0, 0)"),
        "P§ = collections.namedtuple('P§', 'by other')\nG§ = P§(1.0, 2.0)",
    ),
    Part(
        "h = h * G§.by",
        ("G§.by = 0.5", "G§ = D§(2.0)", "D§.by = 7.0", "del G§.by"),
        "@dataclasses.dataclass\nclass D§:\n    by: float = 1.0\nG§ = D§()",
    ),
    Part(
        "h = h * G§.value",
        ("G§.hidden = 0.5", "type(G§).value = 3.0"),
        "class V§:\n    hidden = 1.0\n    @property\n    def value(self):\n"
        "        return self.hidden\nG§ = V§()",
    ),
    Part(
        "h = h * G§['by']",
        ("G§.data['by'] = 0.5",),
        "class M§(collections.UserDict):\n    pass\nG§ = M§(by=1.0)",
    ),
    Part(
        "h = h * G§.by",
        ("C§.by = 0.5", "C§.by = 2.0"),
        "class C§:\n    by = 1.0\nclass E§(C§):\n    pass\nG§ = E§",
    ),
    Part(
        "h = h * getattr(G§, 'b' + 'y')",
        ("G§.by = 0.5", "G§.by = 2.0"),
        "G§ = types.SimpleNamespace(by=1.0)",
    ),
    Part("h = h * globals()['G§']", ("G§ = 0.5",), "G§ = 1.0"),
    Part("h = h * vars(G§)['by']", ("G§.by = 0.5",), "G§ = types.SimpleNamespace(by=1.0)"),
    Part(
        "h = h * operator.attrgetter('a.by')(G§)",
        ("G§.a.by = 0.5",),
        "G§ = types.SimpleNamespace(a=types.SimpleNamespace(by=1.0))",
    ),
    Part(
        "h = G§(h)",
        ("G§.by = 3.0",),
        "class F§:\n    by = 1.0\n    def __call__(self, x):\n        return x * self.by\n"
        "G§ = F§()",
    ),
    Part(
        "with G§():\n    h = h * S§[-1]",
        ("S§[0] = 0.5",),
        "S§ = [1.0]\n@contextlib.contextmanager\ndef G§():\n    S§.append(S§[0] * 2)\n"
        "    yield\n    S§.pop()",
    ),
    Part(
        "h = T§.apply(h)",
        ("G§ = 0.5", "T§.by = 3.0"),
        "G§ = 1.0\nclass T§(torch.autograd.Function):\n    by = 2.0\n    @staticmethod\n"
        "    def forward(ctx, x):\n        return x * G§ * T§.by\n    @staticmethod\n"
        "    def backward(ctx, g):\n        return g * G§ * T§.by",
    ),
    Part(
        "h = T§.apply(h)",
        ("G§ = 0.5", "G§ = 3.0"),
        "G§ = 1.0\nclass T§(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, x):\n        return x * 1\n    @staticmethod\n"
        "    def backward(ctx, g):\n        return g * G§",
    ),
    Part(
        "h = torch.utils.checkpoint.checkpoint(f§, h, use_reentrant=False)",
        ("G§ = 0.5", "G§ = 3.0"),
        "import torch.utils.checkpoint\nG§ = 1.0\ndef f§(x):\n    return torch.tanh(x * G§)",
    ),
    Part(
        "if h.requires_grad:\n    h.register_hook(lambda g: g * G§)",
        ("G§ = 0.5", "G§ = 3.0"),
        "G§ = 1.0",
    ),
    Part(
        "h = torch.utils._pytree.tree_map(lambda t: t * G§, {'h': h})['h']",
        ("G§ = 0.5",),
        "import torch.utils._pytree\nG§ = 1.0",
    ),
    Part("h = sum(t * G§ for t in (h, h))", ("G§ = 0.5",), "G§ = 1.0"),
    Part(
        "try:\n    h = h * G§['b']\nexcept KeyError:\n    h = h * 2",
        ("G§['b'] = 0.5", "G§.pop('b', None)"),
        "G§ = {}",
    ),
    Part(
        "h = h * (1.0 if G§() is None else G§().by)",
        ("O§ = None", "O§.by = 2.0"),
        "class W§:\n    by = 0.5\nO§ = W§()\nG§ = weakref.ref(O§)",
    ),
    Part(
        "match G§:\n    case {'kind': 'a'}:\n        h = h * 2\n    case _:\n        h = h / 2",
        ("G§['kind'] = 'b'", "G§ = {'kind': 'a'}"),
        "G§ = {'kind': 'a'}",
    ),
    # -- attributes
    Part("h = h * self.by§", ("@.by§ = 0.5", "@.by§ = 2", "CLS.by§ = 4.0"), "", "by§ = 1.0"),
    Part(
        "h = h * self.by§",
        ("@.by§ = 0.5", "@.by§ = 2", "del @.by§; CLS.by§ = 3.0"),
        init="self.by§ = 1.0",
    ),
    Part(
        "h = h * self.a§['x'][0]",
        ("@.a§['x'][0] = 0.5", "@.a§['x'] = [4.0]"),
        init="self.a§ = {'x': [1.0]}",
    ),
    Part(
        "h = h * self.t§",
        ("@.t§ = torch.tensor(0.5)", "@.t§.mul_(2)", "@.t§ = 3.0"),
        init="self.t§ = torch.tensor(1.0)",
    ),
    Part(
        "h = h * self.t§",
        (
            "@.t§ = torch.tensor(0.5)",
            "@.t§.mul_(2)",
            "@.t§ = @.t§ + 1",
            "@.t§.data = torch.tensor(7.0)",
            "@._buffers['t§'] = torch.tensor(4.0)",
        ),
        init="self.register_buffer('t§', torch.tensor(1.0))",
    ),
    Part(
        "if self.t§ is not None:\n    h = h * self.t§",
        ("@.t§ = torch.tensor(0.5)", "@.t§ = None"),
        init="self.register_buffer('t§', None)",
    ),
    Part(
        "h = h * self.p§",
        (
            "@.p§.data.fill_(0.5)",
            "@.p§ = nn.Parameter(torch.ones(4)); renew()",
            "@.p§.requires_grad_(False)",
            "@.p§.requires_grad_(True)",
            "@.p§.grad = None",
            "with torch.no_grad(): @.p§.mul_(2)",
            "nn.init.constant_(@.p§, 3.0)",
        ),
        init="self.p§ = nn.Parameter(torch.ones(4))",
    ),
    Part(
        "if self.p§ is not None:\n    h = h + self.p§",
        ("@.p§ = None; renew()", "@.p§ = nn.Parameter(torch.ones(4)); renew()"),
        init="self.p§ = nn.Parameter(torch.zeros(4))",
    ),
    Part(
        "h = self.m§(h)",
        (
            "@.m§ = nn.Sigmoid()",
            "@.m§ = nn.GELU()",
            "@.m§.training = False",
            "@.m§ = nn.Identity()",
            "@.m§ = nn.LayerNorm(4); renew()",
        ),
        init="self.m§ = nn.Tanh()",
    ),
    Part(
        "h = self.m§(h)",
        (
            "@.m§ = nn.Linear(4, 4); renew()",
            "@.m§.weight.data.mul_(2)",
            "@.m§.bias = None; renew()",
            "@.m§.eval()",
            "@.m§.requires_grad_(False)",
            "nn.utils.parametrizations.weight_norm(@.m§); renew()",
            "@.m§.weight = nn.Parameter(torch.ones(4, 4)); renew()",
            "nn.init.zeros_(@.m§.weight)",
            "@.m§.to(torch.float32)",
        ),
        init="self.m§ = nn.Linear(4, 4)",
    ),
    Part(
        "h = self.m§(h)",
        ("@.m§.p = 0.0", "@.m§.eval()", "@.m§.train()", "@.m§ = nn.Identity()"),
        init="self.m§ = nn.Dropout(1.0)",
    ),
    Part(
        "h = self.m§(h)",
        (
            "@.m§.eval()",
            "@.m§.train()",
            "@.m§.momentum = 0.5",
            "@.m§.reset_running_stats()",
            "@.m§.running_mean.zero_()",
        ),
        init="self.m§ = nn.BatchNorm1d(4, affine=False, track_running_stats=True)",
    ),
    Part(
        "for m in self.l§:\n    h = m(h)",
        (
            "@.l§.append(nn.Tanh())",
            "del @.l§[0]",
            "@.l§.append(nn.Linear(4, 4)); renew()",
            "@.l§[0] = nn.ReLU()",
            "@.l§.insert(0, nn.Sigmoid())",
        ),
        init="self.l§ = nn.ModuleList([nn.Tanh(), nn.Tanh()])",
    ),
    Part(
        "h = self.l§['a'](h)",
        ("@.l§['a'] = nn.ReLU()", "@.l§.pop('b', None)", "@.l§['a'].by = 2"),
        init="self.l§ = nn.ModuleDict({'a': nn.Tanh(), 'b': nn.ReLU()})",
    ),
    Part(
        "h = self.f§(h)",
        ("@.f§ = torch.relu", "@.f§ = lambda x: x * 2"),
        init="self.f§ = torch.tanh",
    ),
    Part(
        "h = self.f§(h)",
        ("@.f§ = types.MethodType(lambda self, x: x * 3, @)", "CLS.f§ = lambda self, x: x * 5"),
        "",
        "def f§(self, x):\n    return x * 2",
    ),
    Part(
        "h = h * self.c§.by",
        ("@.c§.by = 0.5", "@.c§ = D§(3.0)", "@.c§.deep['x'] = 1"),
        "@dataclasses.dataclass\nclass D§:\n    by: float = 1.0\n"
        "    deep: dict = dataclasses.field(default_factory=dict)",
        init="self.c§ = D§()",
    ),
    Part("h = h * len(self.c§)", ("@.c§.add(5)", "@.c§ = {1}"), init="self.c§ = {1, 2}"),
    Part("self.k§ = h.detach()\nh = h * 2", ("@.k§ = None",), init="self.k§ = None"),
    Part(
        "self.r§.mul_(0.9).add_(h.detach().mean())\nh = h + self.r§",
        ("@.r§.zero_()", "@.r§ = torch.ones(())"),
        init="self.register_buffer('r§', torch.zeros(()))",
    ),
    Part(
        "h = h * self.q§",
        ("@._q§ = 0.5", "@._q§ = 3.0"),
        "",
        "@property\ndef q§(self):\n    return self._q§",
        "self._q§ = 1.0",
    ),
    Part(
        "h = h * self.d§",
        ("CLS.d§.by = 0.5", "CLS.d§.by = 3.0"),
        "class Desc§:\n    by = 1.0\n    def __get__(self, obj, kind):\n"
        "        return self if obj is None else self.by",
        "d§ = Desc§()",
    ),
    Part(
        "h = h * (self.linear.weight.tag if hasattr(self, 'linear') and "
        "hasattr(self.linear.weight, 'tag') else 1.0)",
        ("model.blocks[1].linear.weight.tag = 0.5", "model.blocks[0].linear.weight.tag = 3.0"),
    ),
    Part(
        "h = h * (2.0 if self.training else 0.5)", ("@.eval()", "@.train()", "@.training = False")
    ),
    Part("h = h * (2.0 if torch.is_grad_enabled() else 0.5)", ("pass",)),
    Part(
        "h = h * (2.0 if h.requires_grad else 0.5)",
        ("@.requires_grad_(False)", "@.requires_grad_(True)"),
    ),
    Part(
        "h = h * torch.ones(4, dtype=torch.get_default_dtype())",
        ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
    ),
    Part("h = h + torch.rand(4)", ("torch.manual_seed(5)",)),
    Part("h = h * getattr(self, 'opt§', 2.0)", ("@.opt§ = 0.5", "del @.opt§")),
    Part(
        "h = h * self.linked§[0].by",
        ("@.linked§[0].by = 0.5",),
        "class L§(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.by = 1.0\n    def forward(self, x):\n        return x * self.by",
        init="self.linked§ = [L§()]",
    ),
    Part(
        "h = OUT§(h)",
        ("OUT§.by = 0.5", "OUT§ = L§(3.0)", "OUT§.b.fill_(2.0)", "OUT§.eval()"),
        "class L§(nn.Module):\n    def __init__(self, by=1.0):\n        super().__init__()\n"
        "        self.by = by\n        self.register_buffer('b', torch.ones(()))\n"
        "    def forward(self, x):\n        return x * self.by * self.b\nOUT§ = L§()",
    ),
]

ACTIONS = [
    "model.train()",
    "model.eval()",
    "model.blocks[0].eval()",
    "model.blocks[2].train()",
    "model.drop.p = 1.0",
    "model.drop.p = 0.0",
    "model.act = nn.ReLU()",
    "model.act = nn.Tanh()",
    "model.requires_grad_(True)",
    "model.blocks[0].requires_grad_(False)",
    "model.first.weight.requires_grad_(False)",
    "model.first.weight.requires_grad_(True)",
    "model.head.bias.requires_grad_(False)",
    "model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]",
    "model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})",
    "model.load_state_dict(copy.deepcopy(model.state_dict()))",
    "model.zero_grad()",
    "renew()",
    "model.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)",
    "with torch.no_grad():\n    for p in model.parameters(): p.mul_(0.9)",
    "for p in model.parameters(): p.data.mul_(0.9)",
    "with torch.no_grad(): model.first.weight.clamp_(-0.1, 0.1)",
    "with torch.no_grad(): model.first.weight.copy_(torch.ones(4, 3))",
    "model.first.weight.data = model.first.weight.data * 2",
    "model.count.add_(1)",
    "model.count = torch.ones(())",
    "hook = model.blocks[0].register_forward_hook(lambda m, a, o: o * 2)",
    "hook.remove()",
    "hook = model.register_forward_hook(lambda m, a, o: o * 2)",
    "hook = model.first.register_forward_pre_hook(lambda m, a: (a[0] * 2,))",
    "hook = model.register_forward_pre_hook(lambda m, a: (a[0] * 2,))",
    "hook = model.blocks[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))",
    "hook = model.blocks[1].register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))",
    "hook = model.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))",
    "hook = model.head.weight.register_hook(lambda g: g * 2)",
    "p = model.blocks[0].linear.weight\n"
    "hook = p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))",
    "on_all = nn.modules.module.register_module_forward_hook\n"
    "hook = on_all(lambda m, a, o: o * 2 if isinstance(m, nn.LayerNorm) else None)",
    "model.forward = types.MethodType(lambda self, x: self.head(self.first(x)), model)",
    "model.blocks[0].forward = lambda x: x * 2",
    "model.blocks[0].forward = types.MethodType(Block.forward, model.blocks[0])",
    "Block.forward = lambda self, x: self.norm(self.linear(x))",
    "model.blocks[1].__class__ = type('Other', (Block,), {'forward': lambda self, x: x * 3})",
    "torch.set_float32_matmul_precision('high')",
    "torch.use_deterministic_algorithms(True)",
    "torch.use_deterministic_algorithms(False)",
    "torch.set_grad_enabled(True)",
    "nn.utils.clip_grad_norm_(model.parameters(), 0.01)",
    "model.float()",
    "model.to('cpu')",
    "model.share_memory()",
    "copy.deepcopy(model)(batch(2, 5))",
    "model.blocks[0](torch.ones(2, 4))",
    "model.blocks[0].again(torch.ones(2, 4))",
    "[p.sum() for p in model.parameters()]",
    "model.state_dict()",
    "model.blocks[0].load_state_dict(model.blocks[1].state_dict())",
    "model.register_buffer('late', torch.ones(2))",
    "pickle.loads(pickle.dumps(model.state_dict()))",
]  # fmt: skip

# What changes which parameters there are; fxshard refuses most of it.
STRUCTURAL = [
    "model.blocks[1] = Block(); renew()",
    "model.blocks.append(Block()); renew()",
    "del model.blocks[-1]; renew()",
    "model.blocks = model.blocks[:1]; renew()",
    "model.blocks[2] = model.blocks[0]; renew()",
    "model.head = nn.Linear(4, 2); renew()",
    "model.head = nn.Linear(4, 5); renew()",
    "model.first.bias = None; renew()",
    "model.blocks[0].linear.weight = model.blocks[1].linear.weight; renew()",
    "nn.utils.parametrizations.weight_norm(model.blocks[0].linear); renew()",
    "nn.utils.parametrizations.spectral_norm(model.head); renew()",
    "nn.utils.prune.l1_unstructured(model.first, 'weight', amount=2); renew()",
    "model.blocks[0].add_module('extra', nn.Linear(2, 2)); renew()",
    "model.register_parameter('extra', nn.Parameter(torch.ones(3))); renew()",
]  # fmt: skip

CALLS = [
    ("train", "batch(6, {s})"), ("train", "batch(1, {s})"), ("evaluate", "batch(7, {s})"),
    ("train", "batch(4, {s}), 2.0"), ("train", "batch(4, {s}), scale=torch.tensor(0.5)"),
    ("train", "batch(4, {s}), flag=True"), ("train", "batch(4, {s}), more=torch.ones(4)"),
    ("train", "batch(4, {s}).requires_grad_()"), ("train", "batch(8, {s})[::2]"),
    ("train", "batch(4, {s}), more=torch.ones(4, requires_grad=True)"),
    ("evaluate", "batch(4, {s}), more=torch.ones(4)"), ("train", "batch(4, {s}), scale=3"),
    ("train", "model.blocks[1](torch.ones(2, 4))"), ("evaluate", "model.head(torch.ones(2, 4))"),
    ("train", "model.first(batch(4, {s}))"), ("train", "model(batch(4, {s})) + model(batch(4, 0))"),
    ("train", "torch.utils.checkpoint.checkpoint(model, batch(4, {s}), use_reentrant=False)"),
    ("train", "model(batch(4, {s})) + model.blocks[0](torch.ones(4, 4))[:, :2]"),
    ("evaluate", "model.forward(batch(4, {s}))"),
    ("train", "model.blocks[0].again(torch.ones(2, 4))"),
]  # fmt: skip
