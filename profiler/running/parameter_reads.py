"""Which parameters a forward reads. Ranks whose routers choose so that they read others would reduce other
gradients."""

import torch

from ..model.loaded import LoadedModel
from .fake import fake_model
from .forward_state import TensorsRead


def parameters_read(loaded: LoadedModel) -> set[str]:
    """Names of the parameters that one forward of one sample reads."""
    fake = fake_model(loaded, torch.bfloat16)
    batch = fake.batch(1, loaded.seq_len)
    read = TensorsRead(dict(fake.module.named_parameters()))
    with fake.running(), read:
        fake.loss(batch)
    return set(read.places)
