#!/bin/bash
for MBS in 1 2 4 8; do
  torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --tensor-model-parallel-size 2 \
     --micro-batch-size $MBS --global-batch-size 64 --bf16
done
