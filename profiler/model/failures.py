"""Errors of a user's code, told in one sentence with the place in the code and the way out."""

import re
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

IN_LOSS = (
    "That is inside loss(output, batch), which is given what forward returns and all of what batch(size) gives: for "
    "example, def loss(output, batch): return torch.nn.functional.cross_entropy(output, batch[1])"
)
"""The note on an error that is raised in a loss."""

_SENTENCES = {
    re.compile(r"_apply\(\): Couldn't swap"): (
        "casts or moves the weights of a module in its forward ({place}), which are not there as a whole under "
        "sharding: do it once, where the model is built"
    ),
    re.compile("FlexAttention"): (
        "uses flex_attention ({place}), whose backward torch has on GPUs alone, and profiles are made without one: use "
        "scaled_dot_product_attention, with a mask"
    ),
    re.compile(r"shape_env must not be None|aten\._nested_"): (
        "makes nested tensors ({place}), whose ragged dim has no size that a profile could tell: pad the rows and mask "
        "them, or keep them in one tensor with their bounds"
    ),
    re.compile('is missing the required "forward" function'): (
        "has no forward: write one, whose result loss(output, batch) is given (training_step and others of Lightning "
        "are not called)"
    ),
    re.compile("HigherOrderOperator"): (
        "gives torch functions to call (torch.cond, while_loop: {place}), whose layers a profile does not see: choose "
        "by torch.where, and loop in Python"
    ),
    re.compile(r"no fake impl registered for <CustomOpDef\((?P<operator>.*?)\)>"): (
        "calls {operator} ({place}), an operator of its own, of which torch does not know the size of the result "
        "without running it: say so with its register_fake, a function that returns an empty tensor of that size"
    ),
}
"""Pattern in torch's message when a forward or backward does not run on fake tensors -> the sentence on the model."""


class ForwardError(ValueError):
    """A model does not run with its micro-batch. why: what was raised, and where."""

    def __init__(self, source: str, why: str, way_out: str) -> None:
        super().__init__(f"{source} does not run with its own micro-batch: {why}. {way_out}")
        self.why = why


def called(function: Callable[[], Any], what: str) -> Any:
    """Result of the user's code, whose failures are reported with their place in a sentence."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ValueError(failure_of(what, error)) from error


def failure_of(what: str, error: BaseException) -> str:
    """The sentence on an error of the user's code, which is named as its subject."""
    if isinstance(error, FileNotFoundError):
        return (
            f"{what} needs the file {error.filename}, which is not there ({place_of(error)}). A plan needs shapes, not "
            "data: make the tensors with torch.randn or torch.randint, and open files only when training"
        )
    if isinstance(error, ModuleNotFoundError):
        return (
            f"{what} imports what is not installed: {error} ({place_of(error)}); modules of your own are found beside "
            "the model file, in its package, and in folders that PYTHONPATH names"
        )
    if isinstance(error, ImportError):
        return f"{what} imports what is not there: {error} ({place_of(error)})"
    if isinstance(error, SyntaxError):
        return f"{what} is not valid Python: {error.msg} ({error.filename}:{error.lineno})"
    if isinstance(error, SystemExit):
        return (
            f"{what} ends the process by sys.exit({error.code!r}) ({place_of(error)}); put what runs a program or "
            'reads a command line below `if __name__ == "__main__":`'
        )
    if isinstance(error, ValueError) and is_ours(error):
        return f"{what}: {error}"
    if asks_for_gpu(error):
        return (
            f"{what} moves tensors to a GPU itself ({place_of(error)}), which is for the trainer to do: leave out "
            ".cuda() and .to('cuda'), and make new tensors where those that are there lie"
        )
    if isinstance(error, OSError) and "huggingface.co" in str(error):
        return (
            f"{what} asks for files of the Hugging Face hub that are not in its cache here ({place_of(error)}), and a "
            "plan needs no weights: make the model of its configuration (AutoModelForCausalLM.from_config), and give "
            "weights= to mw.parallelize"
        )
    return f"{what} raised {kind_of(error)} ({place_of(error)})"


def failed_run(source: str, attributes: Mapping[str, str], if_not_run: str, error: BaseException) -> ValueError:
    """The error to raise for one in a model's forward, loss or backward, with a sentence on it. attributes: name of
    each attribute that the constructor writes onto parameters -> the first parameter that has it. if_not_run: the way
    out if nothing else is known of the error."""
    import torch

    if isinstance(error, NameError | ArithmeticError | OSError | ImportError | SystemExit):  # which no batch can mend
        return ValueError(failure_of(f"the forward, loss or backward of {source}", error))
    place = place_of(error)
    name = error.name if isinstance(error, AttributeError) and isinstance(error.obj, torch.Tensor) else None
    if name is not None and name in attributes:
        return ValueError(
            f"the forward of {source} reads {name} of {attributes[name]} ({place}), in whose place another tensor "
            "stands under sharding and in mixed precision: keep it on the module"
        )
    for pattern, sentence in _SENTENCES.items():
        if found := pattern.search(str(error)):
            return ValueError(f"{source} {sentence.format(place=place, **found.groupdict())}")
    if asks_for_gpu(error):
        return ValueError(failure_of(source, error))
    way_out = IN_LOSS if IN_LOSS in getattr(error, "__notes__", ()) else if_not_run
    return ForwardError(source, f"{kind_of(error)} ({place})", way_out)


def asks_for_gpu(error: BaseException) -> bool:
    """Whether an error asks for a GPU that is not there. (An operator that no device has names CUDA among all others;
    that does not count.)"""
    return "cuda" in str(error).lower() and not isinstance(error, NotImplementedError)


def a_type(value: Any) -> str:
    """The type of a value with an article, as in "an int"; None is "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def kind_of(error: BaseException) -> str:
    """The type of an error, followed by its message, if there is one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def is_ours(error: BaseException) -> bool:
    """Whether an error was raised in a file of the profiler, so that its message is in our words."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return Path(innermost.f_code.co_filename).is_relative_to(_PROFILER)


_PROFILER = Path(__file__).parents[1]


def place_of(error: BaseException) -> str:
    """file:line of the innermost frame that is neither a library's nor ours; of a model that is a library's, of the
    innermost that is neither torch's nor Python's; of torch's own modules, of these. A library's file is named from its
    package on, what is typed into Python "<stdin>". Of a call that reached no line of the model: the call itself."""
    frames = [
        (file, _in_library(file), line)
        for file, line in ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
        if not Path(file).is_relative_to(_PROFILER) and (file in _TYPED or not file.startswith("<"))
    ]
    own = [frame for frame in frames if not frame[1]]
    models = [frame for frame in frames if not frame[1].startswith(("torch/", "python/"))]
    public = [frame for frame in frames if not frame[1].startswith(("torch/_", "torch/utils/"))]
    if not frames:
        return "in the call itself"
    file, inside, line = (own or models or public or frames)[-1]
    return f"{inside or file}:{line}"


_TYPED = ("<stdin>", "<string>")
"""What Python calls code that is typed in, or given by -c."""


def _in_library(file: str) -> str:
    """The path of a library's file as it is on every machine, such as torch/nn/functional.py; '' of others."""
    for folder in ("site-packages", "dist-packages"):
        _, found, inside = file.rpartition(f"/{folder}/")
        if found:
            return inside
    standard = Path(sysconfig.get_path("stdlib"))
    return f"python/{Path(file).relative_to(standard)}" if Path(file).is_relative_to(standard) else ""
