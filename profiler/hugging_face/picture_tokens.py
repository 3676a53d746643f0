"""How many tokens stand for a picture or a recording, by asking the Hugging Face model itself, on tensors without
memory."""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..model.failures import called
from ..model.loaded import Build

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..running.fake_modes import LeanFakeMode


class AskedModel:
    """A model that can be asked about its tokens; it is built when it is first asked."""

    def __init__(self, build: Build, source: str) -> None:
        self._build = build
        self._source = source

    def tokens(self, make: "Callable[[], Mapping[str, torch.Tensor]]", layout: Collection[str]) -> int:
        """Number of tokens that stand for the picture or recording in these tensors. layout: names of those whose
        numbers the model may look at, besides integers. Raises ValueError, with the model's answer, if it does not take
        them."""
        import torch
        from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

        from ..running.fake_modes import without_log
        from ..running.known_numbers import knowing_numbers, known

        module, mode = self._module
        with torch.random.fork_rng(devices=[]):
            tensors = make()
        ask = _that_takes(tensors, module)
        brought = {}
        with mode:
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and name not in layout:
                    brought[name] = torch.empty(tensor.shape, dtype=torch.bfloat16)
                else:
                    brought[name] = known(mode, tensor, torch.bfloat16 if tensor.is_floating_point() else None)
        try:
            with without_log(), knowing_numbers(mode), torch.no_grad():
                output = ask(**brought)
                features = _features(output)
                tokens = sum(each.numel() // each.shape[-1] for each in features)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(f"it decides by numbers that it computes, which are not known here ({error})") from error
        except Exception as error:  # any kind: a model raises it, given what may not fit
            raise ValueError(f"{type(error).__name__}: {error}") from error
        wide, of_words = features[0].shape[-1], self._embeddings.shape[1]
        if getattr(output, "pooler_output", None) is not None and wide != of_words:
            raise ValueError(f"it makes {wide:,} numbers for each token of a picture, and {of_words:,} for one of text")
        return tokens

    def takes(self, method: str) -> Collection[str]:
        """Names of the arguments of one of the model's methods; none if it has no such method."""
        found = [getattr(each, method) for each in _owners(self._module[0]) if hasattr(each, method)]
        return {name for each in found for name in inspect.signature(each).parameters}

    def tokens_heard(self, frames: int) -> int | None:
        """Number of tokens that stand for so many frames of a recording, by the part of the model that hears them; None
        if it does not say."""
        import torch

        towers = [getattr(each, "audio_tower", None) for each in _owners(self._module[0])]
        says = [getattr(tower, "_get_feat_extract_output_lengths", None) for tower in towers]
        say = next((each for each in says if each is not None), None)
        if say is None:
            return None
        found = say(torch.tensor([frames]))
        return int(found[-1] if isinstance(found, tuple) else found)

    @property
    def words(self) -> int:
        """Number of tokens in the vocabulary: those with an embedding."""
        return self._embeddings.shape[0]

    @property
    def _embeddings(self) -> "torch.Tensor":
        found: torch.Tensor = self._module[0].get_input_embeddings().weight  # type: ignore[operator]
        return found

    @cached_property
    def _module(self) -> "tuple[nn.Module, LeanFakeMode]":
        import torch

        from ..model.building import on_meta, replace_tensors
        from ..running.fake_modes import LeanFakeMode

        module, mode = called(lambda: on_meta(self._build), f"the model of {self._source}"), LeanFakeMode()

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")

        with mode:
            replace_tensors(module, fake)
        return module, mode


def _that_takes(tensors: "Mapping[str, torch.Tensor]", module: "nn.Module") -> Callable[..., Any]:
    for owner in _owners(module):
        for name in ("get_image_features", "get_video_features", "get_audio_features"):
            method = getattr(owner, name, None)
            if method is not None and tensors.keys() <= inspect.signature(method).parameters.keys():
                found: Callable[..., Any] = method
                return found
    raise ValueError(f"it has no get_image_features({', '.join(tensors)})")


def _owners(module: "nn.Module") -> "list[Any]":
    """A model with a head, and the models below its head."""
    return [module, getattr(module, "model", None), getattr(module, "base_model", None)]


def _features(output: Any) -> "tuple[torch.Tensor, ...]":
    """The features that a model puts in the places of tokens; one tensor, or one for each picture."""
    found = getattr(output, "pooler_output", None)
    if found is None and getattr(output, "deepstack_features", None) is not None:
        found = output.deepstack_features[0][1]
    if found is None:
        found = getattr(output, "last_hidden_state", output)
    return tuple(found) if isinstance(found, tuple | list) else (found,)
