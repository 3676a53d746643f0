import nemo_run as run
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from nemo import lightning as nl
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_mixed


def trainer(tensor_parallelism: int = 2, num_nodes: int = 8) -> run.Config[nl.Trainer]:
    strategy = run.Config(
        nl.MegatronStrategy,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        pipeline_dtype=torch.bfloat16,
        virtual_pipeline_model_parallel_size=5,
        context_parallel_size=2,
        sequence_parallel=True,
        gradient_as_bucket_view=True,
        ddp=run.Config(
            DistributedDataParallelConfig,
            check_for_nan_in_grad=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
        ),
    )
    return run.Config(nl.Trainer, devices=8, num_nodes=num_nodes, plugins=bf16_mixed(), strategy=strategy)


def data():
    return run.Config(MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1)
