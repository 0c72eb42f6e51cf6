"""Training jobs for tests under a budget.

What stays of a job (weights, gradients, the optimizer's state) and what one op needs at once are
small beside its activations: each of the twelve can be trained in a third of its plain peak.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


@dataclass(frozen=True)
class Job:
    """`step` trains one iteration on a batch of its own drawing, and gives the loss."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[], torch.Tensor]


Build = Callable[[], Job]


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def job_of(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> Job:
    """Trained by SGD with momentum; `loss_of` runs one forward pass on a batch of its drawing."""
    optimizer = _momentum(model)

    def step() -> torch.Tensor:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, [optimizer], step)


def mlp() -> Job:
    torch.manual_seed(0)
    layers = [part for _ in range(20) for part in (nn.Linear(96, 96), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(96, 8))
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, 1.5)  # type: ignore[arg-type]
    return job_of(model, lambda: model(torch.randn(1024, 96)).square().mean())


class _Residual(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(into, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.short = nn.Conv2d(into, out, 1) if into != out else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        out += self.short(x)
        found: torch.Tensor = self.relu(out)
        return found


def resnet() -> Job:
    torch.manual_seed(0)
    widths = [3, *[8] * 10, *[16] * 6]
    blocks: list[nn.Module] = [_Residual(into, out) for into, out in pairwise(widths)]
    blocks.insert(11, nn.MaxPool2d(2))
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(0, 10, (8,)))

    return job_of(model, loss)


class _UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = [*zip((3, *widths), widths, strict=False)]
        self.down = nn.ModuleList(self._twice(into, out) for into, out in pairs)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(low, high, 2, stride=2) for high, low in pairs[:0:-1]
        )
        self.join = nn.ModuleList(self._twice(2 * high, high) for high, _ in pairs[:0:-1])
        self.last = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def _twice(into: int, out: int) -> nn.Module:
        parts: list[nn.Module] = []
        for count in (into, *[out] * 4):
            parts += [nn.Conv2d(count, out, 3, padding=1), nn.GroupNorm(2, out), nn.SiLU()]
        return nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for i, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        found: torch.Tensor = self.last(x)
        return found


def unet() -> Job:
    torch.manual_seed(0)
    model = _UNet((8, 16, 32))

    def loss() -> torch.Tensor:
        x = torch.randn(4, 3, 32, 32)
        return 10 * F.binary_cross_entropy_with_logits(model(x), (x[:, :2] > 0).float())

    return job_of(model, loss)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.mix(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return torch.as_tensor(self.out(found.transpose(1, 2).flatten(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attend(self.norms[0](x)))
        found: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))
        return found


class _GPT(nn.Module):
    def __init__(self, width: int, depth: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits = F.linear(
            self.norm(self.blocks(F.dropout(x, 0.1, self.training))), self.words.weight
        )
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def gpt() -> Job:
    torch.manual_seed(0)
    model = _GPT(32, 6, 64, 64)
    return job_of(model, lambda: model(torch.randint(0, 64, (16, 64))))


def accumulation() -> Job:
    """Also autocast, clipping, AdamW, and an evaluation between the parts of a step."""
    torch.manual_seed(0)
    model = _GPT(32, 6, 64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = model(torch.randint(0, 64, (16, 64)))
        return found / 3

    def step() -> torch.Tensor:
        total = torch.zeros(())
        for i in range(3):
            part = loss()
            part.backward()
            total += part.detach()
            if i == 1:
                model.eval()
                with torch.no_grad():
                    total += loss()
                model.train()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return total

    return Job(model, [optimizer], step)


def bert() -> Job:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=100,
            hidden_size=32,
            num_hidden_layers=5,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=64,
        )
    )

    def loss() -> torch.Tensor:
        tokens, labels = torch.randint(0, 100, (8, 64)), torch.randint(0, 2, (8,))
        found: torch.Tensor = model(input_ids=tokens, labels=labels).loss
        return found

    return job_of(model, loss)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(16, 64), nn.LSTMCell(64, 32)
        self.gru = nn.GRU(32, 16, num_layers=2, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = None, None
        seen: list[torch.Tensor] = []
        for now in x:
            one = self.first(now, one)
            two = self.second(one[0], two)
            seen.append(two[0])
        found: torch.Tensor = self.gru(torch.stack(seen))[0]
        return found


def rnn() -> Job:
    torch.manual_seed(0)
    model = _Recurrent()
    return job_of(model, lambda: model(torch.randn(24, 128, 16)).square().sum() / 500)


class _Tree(nn.Module):
    """A TreeLSTM whose tree is drawn anew every time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.random = width, random.Random(0)
        self.leaf, self.join = nn.Linear(width, 2 * width), nn.Linear(2 * width, 5 * width)

    def forward(self, rows: int, leaves: int) -> tuple[torch.Tensor, torch.Tensor]:
        if leaves == 1:
            h, c = self.leaf(torch.randn(rows, self.width)).tanh().chunk(2, 1)
            return h, c
        left = self.random.randint(1, leaves - 1)
        (h1, c1), (h2, c2) = self(rows, left), self(rows, leaves - left)
        parts = self.join(torch.cat([h1, h2], 1)).chunk(5, 1)
        keep, other, into, out = (part.sigmoid() for part in parts[:4])
        c = keep * c1 + other * c2 + into * parts[4].tanh()
        return out * c.tanh(), c


def tree() -> Job:
    torch.manual_seed(0)
    model = _Tree(48)

    def loss() -> torch.Tensor:
        h: torch.Tensor = model(128, model.random.randint(16, 24))[0]
        return h.square().sum() / 50

    return job_of(model, loss)


def gan() -> Job:
    """The generator learns through four steps that the critic would make."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.Tanh())
    critic = nn.Sequential(nn.Linear(48, 48), nn.Softplus(), nn.Linear(48, 48), nn.Tanh())
    critic.append(nn.Linear(48, 1))
    makers, critics = _momentum(maker), _momentum(critic)

    def loss_of(weights: dict[str, torch.Tensor], fake: torch.Tensor) -> torch.Tensor:
        real = torch.randn(512, 48).tanh_()
        right = F.softplus(-functional_call(critic, weights, (real,)))
        return (right + F.softplus(functional_call(critic, weights, (fake,)))).mean()

    def step() -> torch.Tensor:
        weights: dict[str, torch.Tensor] = dict(critic.named_parameters())
        fake = maker(torch.randn(512, 8))
        for _ in range(4):
            loss = loss_of(weights, fake)
            slopes = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
            pairs = zip(weights.items(), slopes, strict=True)
            weights = {name: weight - 0.1 * slope for (name, weight), slope in pairs}
        wrong = -loss_of(weights, fake)
        wrong.backward()
        makers.step()
        makers.zero_grad()
        critics.zero_grad()
        loss = loss_of(dict(critic.named_parameters()), maker(torch.randn(512, 8)).detach())
        loss.backward()
        critics.step()
        return torch.stack([wrong.detach(), loss.detach()])

    return Job(nn.ModuleList([maker, critic]), [makers, critics], step)


class _Swish(torch.autograd.Function):
    """Two outputs; saves an input, an output and something of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate = x.sigmoid()
        y = x * gate
        ctx.save_for_backward(x, gate, y)
        return y, gate

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, gate, y = ctx.saved_tensors
        return grads[0] * (gate + y * (1 - gate)) + grads[1] * gate * (1 - gate) + 0 * x


class _Odd(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = self.wide(x).chunk(4, 1)
        first = first.clone()
        first[:, ::2].mul_(0.5)
        first.t()[1:].add_(1)
        second, gate = _Swish.apply(second)  # type: ignore[no-untyped-call]
        most, _ = third.unflatten(1, (-1, 4)).max(2)
        top, where = fourth.topk(8, 1)
        picked = x.gather(1, where) * top.softmax(1)
        joined = torch.cat([most, picked], 1)
        joined = joined.repeat_interleave(x.shape[1] // joined.shape[1], 1)
        split = torch.stack([first * gate, joined.exp_().tanh(), second]).unbind()
        x = x + split[0].clamp(-1, 1).mul_(0.1)
        x += split[1] * split[2].expand_as(x)
        ordered, _ = x.view(-1, 2, x.shape[1] // 2).transpose(1, 2).sort(1)
        return F.layer_norm(x + ordered.transpose(1, 2).reshape(x.shape), x.shape[1:])


def odd() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Odd(32) for _ in range(6)))
    return job_of(model, lambda: model(torch.randn(1024, 32)).sigmoid().square().sum() / 500)


class _Trunk(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(16))
        self.heads = nn.ModuleList(nn.Linear(width, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What is in the middle, and the three heads' results."""
        seen = [x]
        for i, layer in enumerate(self.layers):
            x = x + F.dropout(F.silu(layer(x)), 0.2)
            if i == 7:
                seen = [x]
        return [*seen, *(head(x).square().mean() for head in self.heads)]


def partial() -> Job:
    """Gradients of some outputs first, the graph kept, then of all, twice."""
    torch.manual_seed(0)
    model = _Trunk(48)
    optimizer = _momentum(model)

    def step() -> torch.Tensor:
        middle, *losses = model(torch.randn(1024, 48))
        (slope,) = torch.autograd.grad(losses[0], middle, retain_graph=True)
        (losses[0] + losses[1] * slope.norm()).backward(retain_graph=True)
        losses[2].backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([loss.detach() for loss in losses])

    return Job(model, [optimizer], step)


class _Mixture(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.noise = nn.Linear(width, 4), nn.Linear(width, 2 * width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.noise(x).chunk(2, 1)
        x = x + mean + torch.randn_like(mean) * (0.5 * spread).exp()
        gates, chosen = self.router(x).softmax(1).topk(2, 1)
        found = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            if len(rows) > len(x) // 8:  # few rows are dropped
                found = found.index_add(0, rows, expert(x[rows]) * gates[rows, place, None])
        return F.layer_norm(x + found, x.shape[1:])


def mixture() -> Job:
    """A mixture of experts with noise as in a VAE: batches, routes and branches vary."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Mixture(32) for _ in range(6)))

    def loss() -> torch.Tensor:
        rows = int(torch.randint(700, 1000, ()))
        return torch.square(model(torch.randn(rows, 32)).sigmoid()).sum() / 500

    return job_of(model, loss)


def heavy(rows: int = 64, *, foreach: bool | None = None, tidy: bool = False) -> Job:
    """Weights, gradients and Adam's state take nearly all; `tidy`: gradients go with the step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(torch.randn(rows, 256)).square().mean()
        if not tidy:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if tidy:
            optimizer.zero_grad()
        return loss.detach()

    return Job(model, [optimizer], step)


JOBS: dict[str, Build] = {
    build.__name__: build
    for build in (
        *(mlp, resnet, unet, gpt, accumulation, bert),
        *(rnn, tree, gan, odd, partial, mixture),
    )
}
