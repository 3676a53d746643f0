#!/bin/bash
USE_MEGATRON_FSDP=1
SHARDING_STRATEGY=${SHARDING_STRATEGY:="optim_grads_params"}
DISTRIBUTED_ARGS=(--nproc_per_node 8 --nnodes 1)
PRETRAIN_ARGS=(
  --num-layers 32 --seq-length 8192 --bf16
  --micro-batch-size 1 --global-batch-size 64
  --tensor-model-parallel-size 1
)
if [ "${USE_MEGATRON_FSDP}" = 1 ]; then
    unset CUDA_DEVICE_MAX_CONNECTIONS
    PRETRAIN_ARGS=(
        "${PRETRAIN_ARGS[@]}"
        --use-megatron-fsdp
        --data-parallel-sharding-strategy ${SHARDING_STRATEGY}
        --no-gradient-accumulation-fusion
        --use-distributed-optimizer
    )
fi
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${PRETRAIN_ARGS[@]}"
