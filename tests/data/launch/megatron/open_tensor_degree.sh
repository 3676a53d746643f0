#!/bin/bash
# TP and PP come from the job's environment
torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py \
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size $PP \
    --num-layers 32 --micro-batch-size 1 --global-batch-size 64 --bf16
