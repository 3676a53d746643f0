#!/bin/bash
LAYOUT='Et*7|t*9|t*9|t*7L'
torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py \
  --num-layers 32 --seq-length 4096 --bf16 \
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 \
  --pipeline-model-parallel-layout "$LAYOUT" \
  --micro-batch-size 1 --global-batch-size 64
