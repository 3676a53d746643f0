#!/bin/bash
NUM_GPUS=$(nvidia-smi -L | wc -l)
GBS=$(python -c "print($NUM_GPUS * 8)")
torchrun --nproc_per_node $NUM_GPUS pretrain_gpt.py --num-layers 32 --micro-batch-size 1 \
  --global-batch-size $GBS --bf16 --tensor-model-parallel-size 2
