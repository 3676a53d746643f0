#!/bin/bash
#SBATCH -N 8
#SBATCH --gres=gpu:h100:8
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --use-distributed-optimizer
)
srun python pretrain_gpt.py --num-layers 32 --seq-length 4096 --bf16 \
    --micro-batch-size 1 --global-batch-size 256 \
    "${MOE_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}"
