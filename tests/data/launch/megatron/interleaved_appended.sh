#!/bin/bash
export NCCL_DEBUG=WARN NVTE_FUSED_ATTN=1
MODEL_ARGS=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096)
PARALLEL_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel)
PARALLEL_ARGS+=(--pipeline-model-parallel-size 4)
PARALLEL_ARGS+=(--num-layers-per-virtual-pipeline-stage 2 --use-distributed-optimizer)
OPTIM_ARGS=(
  --optimizer adam --lr 3e-4 --min-lr 3e-5
  --micro-batch-size 1 --global-batch-size 128
)
torchrun --nnodes=4 --nproc_per_node=8 --rdzv_id=$RANDOM --rdzv_endpoint=$HOST:29400 \
  pretrain_gpt.py "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${OPTIM_ARGS[@]}" --bf16 \
  --recompute-activations >> train.log 2>&1 &
wait
