"""The points of a sweep, from its flags: numbers of GPUs, sequence lengths, and the global batch at each."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...planner.answers.fitting import grown
from ...planner.answers.sweep import LeftOut
from ...planner.plan.training import SAMPLES_PER_GPU
from ...profiler.machine.cluster import ClusterSpec
from ...profiler.machine.units import gpus_in_words
from . import inputs, options


def numbers_of(flag: str, text: str) -> list[int]:
    """Whole numbers between commas. Raises ValueError that names the wrong one."""
    return [inputs.whole_number(flag, word.strip(), "8,16,32") for word in text.split(",")]


def machines_of(machine: options.MachineOptions) -> list[ClusterSpec | LeftOut]:
    """The cluster of every point: as many GPUs as said, or parts of a cluster file; or why there is none.

    Raises ValueError where there is none at all.
    """
    gpus, file = machine.gpus, machine.cluster
    if file is None:
        if gpus is None:
            raise ValueError("say for how many GPUs, for example --gpus 8,16,32 (or give a --cluster file)")
        return _each(numbers_of("--gpus", gpus), lambda n: inputs.read_cluster(replace(machine, gpus=str(n))))
    whole = inputs.read_cluster(replace(machine, gpus=None))
    per_host, most = whole.devices_per_host, whole.num_devices
    alike = len({(group.device.name, group.devices_per_host, group.link) for group in whole.hosts}) == 1
    if gpus is None:
        doublings = [per_host << power for power in range(most.bit_length()) if per_host << power < most]
        counts = [*doublings, most] if alike else [most]
    else:
        counts = numbers_of("--gpus", gpus)

    def part(count: int) -> ClusterSpec:
        if count > most:
            raise ValueError(f"--gpus {count}, but {file} has {most} devices: ask for no more of them")
        if count != most and not alike:
            raise ValueError(
                f"--gpus {count}: the hosts of {file} differ, so which of its {most} devices are meant is open; leave "
                "out --gpus, or write a file for each part"
            )
        if count != most and count > per_host and count % per_host:
            raise ValueError(f"--gpus {count}: hosts of {file} have {per_host} devices each; give a multiple of that")
        return whole if count == most else grown(whole, count)

    return _each(counts, part)


def _each(counts: Sequence[int], of: Callable[[int], ClusterSpec]) -> list[ClusterSpec | LeftOut]:
    """The cluster of each count, or why it has none. Raises the first error where none has one."""
    found: list[ClusterSpec | LeftOut] = []
    errors = []
    for count in counts:
        try:
            found.append(of(count))
        except ValueError as error:
            errors.append(error)
            found.append(LeftOut(count, None, str(error)))
    if len(errors) == len(counts):
        raise errors[0]
    return found


def batches_of(
    text: str | None, counts: list[int], own: int | None, scale: bool = False
) -> tuple[list[int], list[str]]:
    """(global batch at each number of GPUs, what was assumed or must be said about it).

    own: the model file's. scale: the batch is that of the fewest GPUs, and grows with them. Raises ValueError where
    the numbers do not match those of GPUs.
    """
    if scale:
        return _scaled(text, counts, own)
    if text is None:
        batch = own or SAMPLES_PER_GPU * max(counts)
        whose = "the model file's own" if own else f"{SAMPLES_PER_GPU} samples per GPU of the largest"
        return [batch] * len(counts), [f"global batch {batch:,} at every point: {whose}; --global-batch changes it"]
    batches = numbers_of("--global-batch", text)
    if len(batches) == 1:
        return batches * len(counts), []
    if len(batches) != len(counts):
        raise ValueError(
            f"--global-batch {text} has {len(batches)} numbers, --gpus has {len(counts)}: give one, or as many"
        )
    return batches, _convergence(batches, counts)


def _scaled(text: str | None, counts: list[int], own: int | None) -> tuple[list[int], list[str]]:
    """(global batch at each number of GPUs, what must be said about it) for a batch that grows in proportion to the
    GPUs."""
    fewest = min(counts)
    numbers = numbers_of("--global-batch", text) if text else [own or SAMPLES_PER_GPU * fewest]
    if len(numbers) > 1:
        raise ValueError(f"--scale-batch takes the batch of the fewest GPUs; --global-batch {text} has several numbers")
    uneven = [count for count in counts if numbers[0] * count % fewest]
    if uneven:
        raise ValueError(
            f"--scale-batch: {numbers[0]} samples on {gpus_in_words(fewest)} are "
            f"{numbers[0] * uneven[0] / fewest:g} on {uneven[0]}, no whole number; give --global-batch as a multiple "
            f"of {fewest}"
        )
    batches = [numbers[0] * count // fewest for count in counts]
    return batches, _convergence(batches, counts)


def _convergence(batches: list[int], counts: list[int]) -> list[str]:
    """What must be said where the batch is not the same at all points."""
    if len(set(batches)) == 1:
        return []
    pairs = ", ".join(f"{batch:,} on {count:,}" for batch, count in zip(batches, counts, strict=True))
    return [
        f"the global batch changes with the GPUs ({pairs}): "
        "that changes convergence, so learning rate and number of steps must be tuned again, and tokens/s of different "
        "points do not compare as time to the same loss"
    ]
