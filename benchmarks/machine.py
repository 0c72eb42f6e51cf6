"""What the figures of a benchmark were measured on."""

import os
import platform
import subprocess
from typing import Any

import torch


def machine_facts() -> dict[str, Any]:
    """The hardware and versions that matter to a figure."""
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return facts


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
        return names[0]
    except (OSError, IndexError):
        return platform.processor()


def _commit() -> str:
    """Of what runs; who runs a copy says of which."""
    given = os.environ.get("LOWTIDE_COMMIT")
    if given:
        return given
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"
