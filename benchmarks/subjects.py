"""Fifteen models as people train them: torchvision's with SGD, Hugging Face's with AdamW.

Random weights, nothing is downloaded. Each step copies a batch from pinned memory to the GPU, and
what a loop keeps until its next turn (the output with its logits, the loss) is kept here too.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Subject:
    """A model being trained: `step(batch)` trains on one batch of that many and gives the loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Entry:
    """How a subject is made, and the batch to train it with."""

    make: Callable[[], Subject]
    batch: int


def _vision(
    name: str,
    pixels: int = 224,
    classes: int = 1000,
    *,
    keeps: bool = True,
    bf16: bool = False,  # by autocast, and with channels last
) -> Callable[[], Subject]:
    def make() -> Subject:
        import torchvision

        family = (
            torchvision.models.segmentation if name.startswith("deeplab") else torchvision.models
        )
        extra: dict[str, Any] = {"weights": None}
        if name.startswith("deeplab"):
            extra["weights_backbone"] = None
        if name == "inception_v3":
            extra["init_weights"] = False
        with torch.device("cuda"):
            model = getattr(family, name)(**extra)
            if name == "vgg16" and pixels == 32:  # as it is trained on images of this size
                model.avgpool = nn.Identity()
                model.classifier = nn.Linear(512, classes)
        layout = torch.channels_last if bf16 else torch.contiguous_format
        if bf16:
            model.to(memory_format=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        kept: list[Any] = [None]
        batches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def step(batch: int) -> torch.Tensor:
            if batch not in batches:
                dense = (pixels, pixels) if name.startswith("deeplab") else ()
                batches[batch] = (
                    torch.randn(batch, 3, pixels, pixels).to(memory_format=layout).pin_memory(),
                    torch.randint(0, 21 if dense else classes, (batch, *dense)).pin_memory(),
                )
            images, labels = (part.to("cuda", non_blocking=True) for part in batches[batch])
            with torch.autocast("cuda", torch.bfloat16) if bf16 else nullcontext():
                output = model(images)
                if keeps:
                    kept[0] = output
                if name.startswith("deeplab"):
                    output = output["out"]
                if name == "inception_v3":
                    loss = F.cross_entropy(output.logits, labels)
                    loss = loss + 0.4 * F.cross_entropy(output.aux_logits, labels)
                else:
                    loss = F.cross_entropy(output, labels)
            if keeps:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not keeps:
                optimizer.zero_grad()
            return loss.detach()

        return Subject(model, optimizer, step)

    return make


def _language(
    build: Callable[[], nn.Module], length: int, vocabulary: int, *, keeps: bool = True
) -> Callable[[], Subject]:
    def make() -> Subject:
        with torch.device("cuda"):
            model = build()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        kept: list[Any] = [None]
        batches: dict[int, torch.Tensor] = {}

        def step(batch: int) -> torch.Tensor:
            if batch not in batches:
                batches[batch] = torch.randint(0, vocabulary, (batch, length)).pin_memory()
            tokens = batches[batch].to("cuda", non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16):
                output = model(input_ids=tokens, labels=tokens)
            loss: torch.Tensor = output.loss
            if keeps:
                kept[0] = output
                optimizer.zero_grad()
            del output
            loss.backward()
            optimizer.step()
            if not keeps:
                optimizer.zero_grad()
            return loss.detach()

        return Subject(model, optimizer, step)

    return make


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=24, n_embd=1024, n_head=16, bos_token_id=0, eos_token_id=0)
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096
        )
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=16,
            hidden_size=2048,
            intermediate_size=8192,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=32000,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=768, d_ff=3072, num_layers=12, num_heads=12, d_kv=64, decoder_start_token_id=0
        )
    )


SUBJECTS: dict[str, Entry] = {
    "VGG-16": Entry(_vision("vgg16"), 96),
    "ResNet-18": Entry(_vision("resnet18"), 320),
    "ResNet-50": Entry(_vision("resnet50"), 128),
    "ResNet-101": Entry(_vision("resnet101"), 96),
    "DenseNet-121": Entry(_vision("densenet121"), 96),
    "Inception-v3": Entry(_vision("inception_v3", 299), 128),
    "MobileNet-v3": Entry(_vision("mobilenet_v3_large"), 320),
    "EfficientNet-b0": Entry(_vision("efficientnet_b0"), 160),
    "ViT-B/16": Entry(_vision("vit_b_16"), 96),
    "Swin-T": Entry(_vision("swin_t"), 96),
    "DeepLabv3": Entry(_vision("deeplabv3_resnet50", 320), 24),
    "GPT-2 medium": Entry(_language(_gpt2, 1024, 50257), 8),
    "BERT-large": Entry(_language(_bert, 384, 30522), 16),
    "Llama-1B-like": Entry(_language(_llama, 2048, 32000), 2),
    "T5-base": Entry(_language(_t5, 512, 32128), 16),
}


# Loops that let go of everything at the end of a step: gradients, logits.
TIDY: dict[str, Entry] = {
    "GPT-2 medium 16x1024": Entry(_language(_gpt2, 1024, 50257, keeps=False), 16),
    "ResNet-50 256 tf32": Entry(_vision("resnet50", keeps=False), 256),
    "Llama-1B-like 4x2048": Entry(_language(_llama, 2048, 32000, keeps=False), 4),
    "VGG-16 32x32 100": Entry(_vision("vgg16", 32, 10, keeps=False), 100),
}
