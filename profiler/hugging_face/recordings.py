"""Recordings of speech, as feature extractors of Hugging Face models make them; and the CTC loss of heads that write
down what is said without being told when."""

from typing import TYPE_CHECKING, Any

from ..model.loaded import Batch, Loss, MakeBatch

if TYPE_CHECKING:
    import torch

SECONDS, _RATE, _LETTERS = 10, 16_000, 100
"""Seconds of a recording, samples in a second, and letters said in it. An assumption: as in sentences that are read
aloud."""

FRAMES_PER_S = 100
"""Frames of a spectrogram in a second: each is 10 ms after the one before."""

_STACKED = {"wav2vec2-bert": (2, 2), "granite_speech5_ctc": (4, 2)}
"""Type of model -> (width of a frame over the number of frequencies, number of 10 ms frames that make one). Both join
two neighbouring frames; Granite's also hold how these change."""

BINS = 80
"""Frequencies in a frame, if a configuration does not say."""

HEARD = ("input_values", "input_features")
"""Names of main inputs that are recordings, as they are or as spectrograms."""


def heard(size: int) -> "torch.Tensor":
    """[size, samples]: recordings as numbers over time."""
    import torch

    return torch.randn(size, SECONDS * _RATE)


def assumed(letters: bool) -> str:
    """What is assumed of recordings, in words. letters: also of what is said in them."""
    of = f"recordings of {SECONDS} s at {_RATE // 1000} kHz"
    return f"{of} in which {_LETTERS} letters are said" if letters else of


def ctc_batches(config: Any, main_input: str) -> MakeBatch:
    """Batches of recordings, with the letters that are said in them as targets; none of these is the blank."""

    def batch(size: int) -> Batch:
        import torch

        said = torch.randint(config.vocab_size - 1, (size, _LETTERS))
        sound = heard(size) if main_input == "input_values" else spectrogram(config, size)
        return {main_input: sound, "targets": said + (said >= _blank(config)).long()}

    return batch


def spectrogram(config: Any, size: int) -> "torch.Tensor":
    """[size, frames, width of a frame]: recordings as spectrograms."""
    import torch

    parts = (config, getattr(config, "encoder_config", None))
    told = (getattr(part, name, None) for part in parts for name in ("num_mel_bins", "input_feat_per_channel"))
    bins = next((number for number in told if isinstance(number, int)), BINS)
    times, frames = _STACKED.get(config.model_type, (1, 1))
    wide = getattr(config, "feature_projection_input_dim", None) or bins * times
    return torch.randn(size, SECONDS * FRAMES_PER_S // frames, wide)


def _blank(config: Any) -> int:
    return int(config.pad_token_id or 0)


def ctc_loss(config: Any) -> Loss:
    """The loss of transformers' CTC heads, with the targets' lengths from shapes. Their own asks for the targets'
    values."""

    def loss(output: Any, batch: Any) -> "torch.Tensor":
        import torch

        rows = output.logits.log_softmax(-1, dtype=torch.float32).transpose(0, 1)
        targets = batch["targets"]
        lengths = (rows.shape[0],) * rows.shape[1], (targets.shape[1],) * rows.shape[1]
        blank = _blank(config)
        each = torch.nn.functional.ctc_loss(rows, targets, *lengths, blank, reduction="none", zero_infinity=True)
        mean: torch.Tensor = each.mean() / targets.shape[1]
        return mean

    return loss
