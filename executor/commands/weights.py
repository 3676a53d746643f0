"""The command `plan export-weights`: a checkpoint's weights as others read them."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ...profiler.machine.units import counted
from ..reporting import terminal
from ..state.checkpoint_folder import latest_checkpoint, read_progress
from . import options
from .answers import at_work

weights_app = options.new_app()

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@weights_app.command()
def _weights_command(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="a run's folder (its last checkpoint), or one checkpoint")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="where they go")] = Path("weights"),
    kind: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="safetensors, or torch (a state_dict)")
    ] = "safetensors",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="fp32, bf16 or fp16 (default: as trained)"),
    ] = None,
    file_size: Annotated[float, typer.Option("--file-size", metavar="GB", min=1e-6, help="of a file, at most")] = 5.0,
    as_json: options.Json = False,
    quiet: options.QuietBar = False,
) -> None:
    """Write the weights of CHECKPOINT as Hugging Face stores them: safetensors with an index, a tensor at a time."""
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"--dtype {dtype}: give one of {', '.join(_DTYPES)}")
    if kind not in ("safetensors", "torch"):
        raise ValueError(f"--format {kind}: give safetensors or torch")
    found = latest_checkpoint(checkpoint)
    if found is None:
        raise ValueError(f"no checkpoint in {checkpoint}: give the folder that trainer.save() wrote to")
    if output.exists() and not output.is_dir():
        raise ValueError(f"-o {output}: it is a file; give a folder")
    with at_work(quiet or as_json):
        import torch

        from ..state.checksums import DamagedError
        from ..state.weight_files import export_checkpoint

        chosen = None if dtype is None else getattr(torch, _DTYPES[dtype])
        try:
            files = export_checkpoint(
                found, output, "torch" if kind == "torch" else "safetensors", chosen, int(file_size * 1e9)
            )
        except DamagedError as error:
            raise ValueError(f"{error}; nothing was exported. Give an earlier checkpoint of {checkpoint}") from None
        except OSError as error:
            raise ValueError(f"{output} cannot be written: {error.strerror or error}; choose another place") from None
    progress = read_progress(found)
    if as_json:
        written = [str(output / name) for name in sorted(files.files)]
        terminal.write_json(json.dumps({"checkpoint": str(found), "steps": progress.steps, "files": written}))
        return
    console = terminal.make_console()
    terminal.print_next(
        console,
        [f"{output}: {counted(len(files.files), 'file')} of the weights after {counted(progress.steps, 'step')}"],
        [],
    )
