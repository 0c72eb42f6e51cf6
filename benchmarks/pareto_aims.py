"""What benchmarks/pareto.py measures, at which budgets, and what is aimed at."""

from dataclasses import dataclass

GIB = 2**30
FULL, ROOM = "100%", 1.05  # the budget that is not tight, over what plain training reserves
SHARES = (FULL, "80%", "66%", "50%", "40%", "33%", "25%")  # of the plain peak
METHODS = ("plain", "compile", "tide", "checkpoint", "selective", "offload_activations")
COMPILED = ("1.0", "0.5")  # torch._functorch.config.activation_memory_budget
PARTS = ("compiled", "points", "same")

# The step time over plain's that is aimed at, by the budget.
AIMS: dict[str, dict[str, float]] = {
    "GPT-2 medium 16x1024": {FULL: 1.01, "30GiB": 1.03, "14.9GiB": 1.10},
    "Llama-1B-like 4x2048": {"18GiB": 1.06, "12GiB": 1.30},
    "BERT-large 16x384": {},
    "ViT-B/16 256 tf32": {},
    "ResNet-50 256 tf32": {FULL: 1.01, "13.8GiB": 1.04, "8.9GiB": 1.12},
    "ResNet-50 256 bf16": {FULL: 1.03},
}
WORKS = tuple(AIMS)
BUDGETS = tuple(dict.fromkeys([*SHARES, *(label for aims in AIMS.values() for label in aims)]))
SAME: dict[str, tuple[int, float]] = {  # the batch, and the budget over the plain peak
    "GPT-2 medium 16x1024": (4, 0.6),
    "Llama-1B-like 4x2048": (1, 0.7),
    "BERT-large 16x384": (8, 0.6),
    "ViT-B/16 256 tf32": (32, 0.6),
    "ResNet-50 256 tf32": (64, 0.6),
    "ResNet-50 256 bf16": (64, 0.6),
}
TRACES = "LOWTIDE_TRACES"  # the variable with the folder that traced steps are written to
MEMORY = 125.0  # GiB of the GPU that works side by side may take


@dataclass(frozen=True)
class Known:
    """About what is known of a work: enough to say how long its tasks take."""

    seconds: float  # of a plain step
    peak: float  # GiB
    reserved: float
    watching: float  # seconds of the first steps under a budget, which are seen op by op
    offload: float  # GiB that are pinned first
    compiling: float  # seconds, for each of the two


KNOWN: dict[str, Known] = {
    "GPT-2 medium 16x1024": Known(0.237, 47.8, 50.0, 8.0, 34, 70),
    "Llama-1B-like 4x2048": Known(0.172, 33.3, 34.3, 5.0, 14, 50),
    "BERT-large 16x384": Known(0.066, 13.3, 14.7, 6.0, 9, 60),
    "ViT-B/16 256 tf32": Known(0.250, 32.0, 33.5, 4.0, 29, 40),
    "ResNet-50 256 tf32": Known(0.118, 20.9, 25.2, 3.0, 17, 40),
    "ResNet-50 256 bf16": Known(0.055, 11.0, 12.4, 3.0, 9, 40),
}
