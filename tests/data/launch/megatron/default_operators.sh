#!/bin/bash
: "${TP:=4}"
: ${PP:=2}
: ${DP:=$((32 / (TP * PP)))}
MBS=${MBS-2}
ACC=${GRAD_ACC:-8}
ARGS="--tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \
      --micro-batch-size $MBS --global-batch-size $((MBS * ACC * DP)) ${EXTRA_ARGS:-}"
torchrun --nnodes=4 --nproc-per-node=8 pretrain_gpt.py --num-layers 32 --bf16 ${ARGS}
