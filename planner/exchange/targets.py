"""Training frameworks that plans can be exported to and set-ups imported from, with the versions that this was checked
against.

Megatron-LM: megatron/training/arguments.py at commit 000c4ac2, and the dataclasses and layout parser of the wheel
megatron-core 0.16.1. torchtitan 0.3.0, Accelerate 1.15.0 and DeepSpeed 0.19.8: the dataclasses and parsers of the
released packages.
"""

from ..plan.frameworks import NAMES, TARGETS, Target

__all__ = ["NAMES", "TARGETS", "VERSIONS", "Target"]

VERSIONS: dict[Target, str] = {
    "megatron": "Megatron-LM core 0.16",
    "torchtitan": "torchtitan 0.3.0",
    "accelerate": "Accelerate 1.15.0",
    "deepspeed": "DeepSpeed 0.19.8",
}
