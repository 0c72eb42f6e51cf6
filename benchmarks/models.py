"""Models to measure: each builder returns the function that trains one step, and the parameters.

Weights are random and batches are fixed: nothing is downloaded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Job:
    """A training loop: `step` runs one iteration, `model` is what it trains."""

    model: nn.Module
    step: Callable[[], object]


def _train(model: nn.Module, loss_of: Callable[[], torch.Tensor], **how: Any) -> Job:
    optimizer = how["optimizer"]

    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return Job(model, step)


def resnet50(device: str, batch: int = 256) -> Job:
    """ResNet-50 on 224×224 images, tf32, SGD with momentum."""
    import torchvision

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = torchvision.models.resnet50().to(device)
    images = torch.randn(batch, 3, 224, 224, device=device)
    labels = torch.randint(0, 1000, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return _train(model, lambda: F.cross_entropy(model(images), labels), optimizer=optimizer)


def gpt2(device: str, batch: int, length: int, **size: int) -> Job:
    """GPT-2 as Hugging Face writes it, bf16 autocast on a GPU, AdamW."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_positions=length, bos_token_id=0, eos_token_id=0, **size)
    config.loss_type = "ForCausalLM"
    model = GPT2LMHeadModel(config).to(device)
    tokens = torch.randint(0, config.vocab_size, (batch, length), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
            return found

    return _train(model, loss, optimizer=optimizer)


def gpt2_medium(device: str) -> Job:
    """GPT-2 medium, 16 sequences of 1024."""
    return gpt2(device, 16, 1024, n_layer=24, n_embd=1024, n_head=16)


def bert(device: str, batch: int, length: int, **size: int) -> Job:
    """BERT with a classification head, AdamW."""
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(**size)).to(device)
    tokens = torch.randint(0, model.config.vocab_size, (batch, length), device=device)
    labels = torch.randint(0, 2, (batch,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return _train(model, lambda: model(input_ids=tokens, labels=labels).loss, optimizer=optimizer)


def bert_large(device: str) -> Job:
    """BERT large, 16 sequences of 384, fp32."""
    return bert(
        device,
        16,
        384,
        num_hidden_layers=24,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=4096,
    )


def small_resnet(device: str) -> Job:
    """A ResNet of Hugging Face's at a size for the CPU."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2], num_labels=10
    )
    model = ResNetForImageClassification(config).to(device)
    images = torch.randn(8, 3, 64, 64, device=device)
    labels = torch.randint(0, 10, (8,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return _train(model, lambda: model(images, labels=labels).loss, optimizer=optimizer)


class _Squared(torch.autograd.Function):
    """x², saving an input and an output of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        return 2 * x * grads[0] + 0 * y


class CustomNet(nn.Module):
    """Linear layers with a hand-written `autograd.Function` between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Squared activations."""
        for layer in self.layers:
            x = _Squared.apply(layer(x)).tanh()  # type: ignore[no-untyped-call]
        return x


def custom(device: str, batch: int, width: int) -> Job:
    """`CustomNet` with Adam."""
    model = CustomNet(width).to(device)
    x = torch.randn(batch, width, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return _train(model, lambda: model(x).square().mean(), optimizer=optimizer)


class _Chain(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.depth = depth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.depth):
            x = torch.tanh(x * self.scale)
        return x


def chain(device: str, depth: int) -> Job:
    """Very many very small ops: what tracing costs, and nothing else."""
    model = _Chain(depth).to(device)
    x = torch.randn(8, 64, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _train(model, lambda: model(x).sum(), optimizer=optimizer)
