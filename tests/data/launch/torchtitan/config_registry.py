import os

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.trainer import Trainer

from . import model_registry

LOCAL_BATCH = int(os.environ["LOCAL_BATCH"])
SHARDS = 8


def mymodel_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        checkpoint=CheckpointManager.Config(interval=500),
        activation_checkpoint=SelectiveAC.Config(),
    )


def mymodel_70b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("70B"),
        training=TrainingConfig(local_batch_size=8, seq_len=8192, steps=1000),
        parallelism=ParallelismConfig(tensor_parallel_degree=8, data_parallel_shard_degree=SHARDS),
        compile=CompileConfig(enable=True, components=["model", "loss"]),
        activation_checkpoint=FullAC.Config(),
    )


def mymodel_70b_pipelined() -> Trainer.Config:
    config = mymodel_70b()
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.data_parallel_shard_degree = 4
    config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    config.training.local_batch_size = 2 * 8
    return config


def mymodel_open() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=LOCAL_BATCH, seq_len=8192),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
    )


def mymodel_plain() -> Trainer.Config:
    config = mymodel_8b()
    config.activation_checkpoint = None
    config.parallelism = ParallelismConfig(data_parallel_replicate_degree=2, fsdp_reshard_after_forward="never")
    return config
