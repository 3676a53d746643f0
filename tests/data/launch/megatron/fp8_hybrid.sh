#!/bin/bash
DTYPE_ARGS=(--bf16)
FP8=true
if [[ "$FP8" == "true" ]]; then
  DTYPE_ARGS+=(
     --fp8-format hybrid
     --fp8-amax-history-len 1024
     --fp8-amax-compute-algo max
  )
fi
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 32 --seq-length 8192 \
  --tensor-model-parallel-size 1 --context-parallel-size 2 --cp-comm-type a2a \
  --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 128 "${DTYPE_ARGS[@]}"
