"""Small training loops, ordinary and awkward. Each builder returns a fresh `Loop`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import CustomNet, bert, gpt2, small_resnet
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Loop:
    """`step` trains one iteration, `state` gives every tensor that training changes."""

    step: Callable[[], object]
    state: Callable[[], list[torch.Tensor]]


def loop(
    model: nn.Module,
    loss_of: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
) -> Loop:
    """The plainest loop there is."""
    chosen = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step() -> None:
        chosen.zero_grad()
        loss_of().backward()
        chosen.step()

    return Loop(step, lambda: [*model.state_dict().values()])


def resnet() -> Loop:
    job = small_resnet("cpu")
    return Loop(job.step, lambda: [*job.model.state_dict().values()])


def gpt() -> Loop:
    job = gpt2("cpu", 4, 32, n_layer=3, n_embd=64, n_head=4, vocab_size=300)
    return Loop(job.step, lambda: [*job.model.state_dict().values()])


def bert_classifier() -> Loop:
    job = bert(
        "cpu",
        *(4, 32),
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=300,
    )
    return Loop(job.step, lambda: [*job.model.state_dict().values()])


def custom_function() -> Loop:
    model = CustomNet(48)
    x = torch.randn(64, 48)
    return loop(model, lambda: model(x).square().mean(), torch.optim.Adam(model.parameters()))


def inplace_relu_and_batchnorm() -> Loop:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 16 * 16, 10),
    )
    x, y = torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))
    return loop(model, lambda: F.cross_entropy(model(x), y))


def dropout() -> Loop:
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 8))
    x = torch.randn(16, 32)
    return loop(model, lambda: model(x).square().mean(), torch.optim.AdamW(model.parameters()))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.body = nn.Linear(24, 24)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(self.embed(x)).tanh())
        return found


def weight_tying() -> Loop:
    model = Tied()
    x = torch.randint(0, 50, (8, 12))
    return loop(model, lambda: F.cross_entropy(model(x).flatten(0, 1), x.flatten()))


class Viewer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        a, b, c = h.view(-1, 4, 12).transpose(1, 2).chunk(3, dim=1)
        a = a[:, 1:].unsqueeze(0).expand(2, -1, -1, -1).select(0, 1)[..., ::2]
        product = b.permute(1, 0, 2) * c.permute(1, 0, 2)
        return torch.square(a.reshape(-1).sum() + product.sum())


def views_of_views() -> Loop:
    model = Viewer()
    x = torch.randn(8, 16)
    return loop(model, lambda: model(x) * 1e-3)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        total: torch.Tensor = (h * h.sigmoid() + h.exp() * h).sum()  # saves h twice, and exp(h)
        return total


def saved_by_several_ops() -> Loop:
    model = Shared()
    x = torch.randn(8, 16)
    return loop(model, lambda: model(x) * 1e-3)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
            for _ in range(3)
        )
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.add(x, checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


def checkpointing() -> Loop:
    model = Checkpointed(reentrant=False)
    x = torch.randn(2048, 32)
    return loop(model, lambda: model(x).square().mean())


def reentrant_checkpointing() -> Loop:
    model = Checkpointed(reentrant=True)
    x = torch.randn(2048, 32, requires_grad=True)
    return loop(model, lambda: model(x).square().mean())


def double_backward() -> Loop:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(16, 8)

    def step() -> None:
        x = data.clone().requires_grad_()
        y = model(x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        (y * 1e-2 + penalty).backward()
        optimizer.step()

    return Loop(step, lambda: [*model.parameters()])


def no_grad_parts() -> Loop:
    teacher = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    student = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(16, 16)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        with torch.inference_mode():
            teacher(x).sum()
        return F.mse_loss(student(x), target)

    return loop(student, loss)


def autocast_with_scaler() -> Loop:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    x = torch.randn(16, 32)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Loop(step, lambda: [*model.parameters()])


def rnn() -> Loop:
    model = nn.LSTM(8, 16, num_layers=2, dropout=0.1)
    x = torch.randn(12, 4, 8)
    return loop(model, lambda: model(x)[0].square().mean())


def unrolled_cell() -> Loop:
    model = nn.GRUCell(8, 16)
    x = torch.randn(6, 4, 8)

    def loss() -> torch.Tensor:
        h = torch.zeros(4, 16)
        for t in range(6):
            h = model(x[t], h)
        return h.square().mean()

    return loop(model, loss)


def accumulation() -> Loop:
    model = nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = torch.randn(3, 8, 16)

    def step() -> None:
        for batch in batches:
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return Loop(step, lambda: [*model.parameters()])


def gan() -> Loop:
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 1))
    first = torch.optim.Adam(generator.parameters())
    second = torch.optim.RMSprop(critic.parameters())
    real, noise = torch.randn(16, 8), torch.randn(16, 4)

    def step() -> None:
        for _ in range(2):
            second.zero_grad()
            (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
            second.step()
        first.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        first.step()

    return Loop(step, lambda: [*generator.parameters(), *critic.parameters()])


def never_backward() -> Loop:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())
    x = torch.randn(8, 16)
    kept: list[torch.Tensor] = []

    def step() -> None:
        kept[:] = [model(x).sum()]  # the graph of the last step lives until here

    return Loop(step, lambda: [*model.state_dict().values()])


def sparse_embedding() -> Loop:
    model = nn.Embedding(40, 8, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 40, (6, 5))
    return loop(model, lambda: model(tokens).square().sum(), optimizer)


def manual_update() -> Loop:
    weight = torch.randn(16, 16, requires_grad=True)
    x = torch.randn(8, 16)

    def step() -> None:
        (x @ weight).tanh().square().mean().backward()
        with torch.no_grad():
            assert weight.grad is not None
            weight.sub_(weight.grad, alpha=0.1)
            weight.grad = None

    return Loop(step, lambda: [weight])


def foreach_and_fused() -> Loop:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    x = torch.randn(8, 16)
    optimizers: list[Any] = [
        torch.optim.AdamW(model[0].parameters(), foreach=True),
        torch.optim.AdamW(model[2].parameters(), fused=True),
    ]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    return Loop(step, lambda: [*model.parameters()])


def functional_transforms() -> Loop:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(12, 8)
    names: dict[str, torch.Tensor] = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.square(torch.func.functional_call(model, weights, (x,)).sum())

    def step() -> None:
        optimizer.zero_grad()
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(names, data)
        for name, parameter in names.items():
            parameter.grad = each[name].detach().mean(dim=0)
        loss(names, data).backward()
        optimizer.step()

    return Loop(step, lambda: [*model.parameters()])


ZOO: dict[str, Callable[[], Loop]] = {
    build.__name__: build
    for build in (
        *(resnet, gpt, bert_classifier, custom_function),
        *(inplace_relu_and_batchnorm, dropout, weight_tying, views_of_views),
        *(saved_by_several_ops, checkpointing, reentrant_checkpointing, double_backward),
        *(no_grad_parts, autocast_with_scaler, rnn, unrolled_cell, accumulation, gan),
        *(never_backward, sparse_embedding, manual_update, foreach_and_fused),
        functional_transforms,
    )
}
