"""The gradients are the plain module's, averaged: for every kind of gradient and way of bucketing."""

import pytest
import torch
from compare import (
    add_mean,
    assert_equal_on_ranks,
    assert_same_gradients,
    check_backward,
    inputs,
    loss,
    mlp,
    raised,
    wrap,
)
from ranks import Ranks, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torchrelay.errors import ReductionError

OPTIONS = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "each alone": {"bucket_cap_mb_list": [0]},
    "pairs, views": {"bucket_cap_mb_list": [0.0002], "gradient_as_bucket_view": True},
    "hints": {"find_unused_parameters": True, "static_graph": True},
}


class Shared(nn.Module):
    """One layer at two places."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Mixed(nn.Module):
    """Parameters of three dtypes, an empty one and a scalar, and a frozen one of integers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4).float()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.z = nn.Parameter(torch.complex(torch.ones(4), torch.ones(4)).to(torch.complex128))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.indices = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x):
        # Multiples of 1/8 and small integers: exact in float32 as well, so that one tolerance serves all.
        x = (x * 8).round() / 8
        y = self.b((x > 0).float()).double().sum() + (self.z * x).abs().sum() + self.empty.sum()
        return self.a(x[:, self.indices]) * self.scale + y


class Transposed(nn.Module):
    """A parameter whose elements lie in another order, and one with a dimension of size 1."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4).t())
        self.thin = nn.Parameter(torch.randn(1, 4, 1).as_strided((1, 4, 1), (7, 1, 5)))

    def forward(self, x):
        return (x @ self.w) * self.thin


def convolutions():
    layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3)).to(
        memory_format=torch.channels_last
    )
    return nn.Sequential(nn.Unflatten(0, (1, 1, -1)), layers)


def large():
    """Gradients of 2 MiB and 1 MiB, and a transposed one, among small ones."""
    wide = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 256))
    wide[2].weight = nn.Parameter(wide[2].weight.detach().t().contiguous().t())
    return wide


MODELS = {"mlp": mlp, "shared": Shared, "mixed": Mixed, "transposed": Transposed, "conv": convolutions, "large": large}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("model", MODELS)
@on_ranks
def test_three_steps_are_the_plain_modules(rank, world, model, options):
    torch.set_default_dtype(torch.float64)
    try:
        module = MODELS[model]()
        wrapped, plain = wrap(module, **OPTIONS[options])
        for seed, to_none in ((1, True), (2, False), (3, True)):
            samples = inputs(world, 4, 4, seed=seed)
            wrapped.zero_grad(set_to_none=to_none)
            plain.zero_grad(set_to_none=to_none)
            check_backward(wrapped, plain, samples)
            for parameter in module.parameters():
                if parameter.grad is not None and not parameter.is_complex():
                    assert_equal_on_ranks(parameter.grad)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("options", ["default", "views", "each alone"])
@on_ranks
def test_gradients_are_added_up_when_they_are_not_zeroed(rank, world, options):
    module = mlp()
    wrapped, plain = wrap(module, **OPTIONS[options])
    for seed in (1, 2, 3):
        check_backward(wrapped, plain, inputs(world, 2, 4, seed=seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks
def test_short_floats(rank, world, dtype):
    module = nn.Linear(4, 1, bias=False).to(dtype)
    wrapped, _ = wrap(module)
    for _ in range(2):
        module.zero_grad()
        wrapped(torch.full((1, 4), float(rank + 1), dtype=dtype)).sum().backward()
        assert module.weight.grad.dtype == dtype
        assert module.weight.grad.tolist() == [[(world + 1) / 2] * 4]


@on_ranks
def test_equal_to_torchs_class_bit_for_bit(rank, world):
    samples = inputs(world, 8, 4)
    ours, theirs = mlp().float(), None
    wrapped, theirs = wrap(ours)
    torchs = TorchDDP(theirs)
    for wrapper in (wrapped, torchs):
        loss(wrapper, samples[rank].float()).backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("views", [False, True])
@on_ranks
def test_sparse_gradients(rank, world, views):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 2, sparse=True)
            self.bag = nn.EmbeddingBag(6, 2, sparse=True, mode="sum")
            self.idle = nn.Embedding(6, 2, sparse=True)
            self.head = nn.Linear(2, 2)

        def forward(self, indices):
            return self.head(self.table(indices) + self.bag(indices[None])).tanh()

    module = Model().double()
    wrapped, plain = wrap(module, gradient_as_bucket_view=views)
    assert [bucket.names for bucket in wrapped.plan.buckets if bucket.sparse] == [
        ("idle.weight",),
        ("bag.weight",),
        ("table.weight",),
    ]
    for step in range(3):
        samples = [torch.tensor([r, (r + step) % 6]) for r in range(world)]
        module.zero_grad()
        plain.zero_grad()
        wrapped(samples[rank]).sum().backward()
        add_mean(plain, samples, lambda m, x: m(x).sum())
        assert_same_gradients(module, plain)
        assert module.idle.weight.grad is None


@on_ranks
def test_a_table_tied_to_a_dense_layer_on_one_rank(rank, world):
    module = nn.Embedding(4, 2, sparse=True).double()
    module.weight.requires_grad_()
    wrapped, plain = wrap(module)

    def one(m, r):
        return (
            m(torch.tensor([r])).sum() if r == 0 else (m.weight if m is plain else wrapped.module.weight).pow(2).sum()
        )

    one(wrapped, rank).backward()
    add_mean(plain, range(world), one)
    torch.testing.assert_close(module.weight.grad.to_dense(), plain.weight.grad.to_dense())
    assert module.weight.grad.is_sparse == (rank == 0)  # as autograd left it


@on_ranks
def test_a_sparse_gradient_that_no_layer_announced_is_named(rank, world):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)
            self.w = nn.Parameter(torch.randn(4, 2))

        def forward(self, i):
            return self.lin(nn.functional.embedding(i, self.w, sparse=True))

    module = Model()
    wrapped, _ = wrap(module)
    message = raised(ReductionError, lambda: wrapped(torch.tensor([1])).sum().backward())
    assert "the gradient of w is torch.sparse_coo" in message
    assert "sparse=True" in message


@pytest.mark.parametrize("cap", [25, 1])
@on_ranks
def test_gradients_that_share_memory(rank, world, cap):
    """Autograd gives p and q one memory; averaged in place, each must be averaged as if it were alone."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.zeros(600, 600))
            self.p = nn.Parameter(torch.zeros(600, 600))
            self.q = nn.Parameter(torch.zeros(600, 600))

        def forward(self, x):
            return (self.p.view(-1) + self.q.view(-1)) * x

    module = Model()
    wrapped, _ = wrap(module, bucket_cap_mb=cap)  # in one bucket, or in two
    assert (wrapped.plan.bucket_of("p") == wrapped.plan.bucket_of("q")) == (cap == 25)
    x = torch.arange(360000.0)
    for _ in range(3):
        module.zero_grad()
        wrapped(x * (rank + 1)).sum().backward()
        for parameter in (module.p, module.q):
            assert torch.equal(parameter.grad.view(-1), x * (world + 1) / 2)


@pytest.fixture(scope="module")
def three():
    """Three ranks: a number that is no power of two."""
    pool = Ranks(3)
    yield pool
    pool.stop()


class TestThree:
    @pytest.fixture
    def ranks(self, three):
        return three

    def test_three_ranks(self, ranks):
        ranks.run(__name__, "test_three_steps_are_the_plain_modules", {"model": "mlp", "options": "pairs, views"})
        ranks.run(__name__, "test_gradients_are_added_up_when_they_are_not_zeroed", {"options": "default"})
        ranks.run("test_unused", "test_each_rank_skips_another_layer", {"options": "views"})
