"""What a model's source says: which file it is in, how its vocabulary is padded, and what adapters it has."""

import re
from pathlib import Path

PADDED = "@vocab%"
"""Stands between the path of a config.json and the number that the size of its vocabulary is padded to a multiple
of."""

LORA = "@lora:"
"""Stands between the source of a model and its adapters, which are written as for --lora."""

_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def file_of(source: str) -> Path:
    """The file, or folder, of a source: a path, file.py:function, config.json@vocab%128, model.py@lora:r=16, or the id
    of a model whose config.json the Hugging Face cache of this machine holds. It need not be there."""
    name = _named(source)
    path = Path(name)
    if path.exists():
        return path
    if ".py:" in name:
        return Path(name.partition(".py:")[0] + ".py")
    return _in_cache(name) or path


def _named(source: str) -> str:
    return source.partition(LORA)[0].partition(PADDED)[0]


def with_adapters_of(model: str, source: str) -> str:
    """`model`, another path to the model of `source`, with the adapters that the source names, if it names none
    itself."""
    mark, said = source.partition(LORA)[1:]
    return model if LORA in model else f"{model}{mark}{said}"


def is_hub_name(source: str) -> bool:
    """Whether it may be the id of a Hugging Face model, organisation/name, rather than a path."""
    name = _named(source)
    of_file = name.endswith((".py", ".json")) or ".py:" in name
    return bool(_HUB_NAME.fullmatch(name)) and not of_file and not Path(name).parent.exists()


def not_in_cache(source: str) -> str:
    """What to do about a model that the Hugging Face cache does not hold; nothing is downloaded here."""
    name = _named(source)
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return f"if {name} is a model of the Hugging Face hub: pip install 'meshwright[hf]'"
    return (
        f"nor is {name} in the Hugging Face cache ({HF_HUB_CACHE}), and nothing is downloaded here: run `hf download "
        f"{name} config.json` where there is a network, or give the path of a config.json"
    )


def _in_cache(name: str) -> Path | None:
    if not is_hub_name(name):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
