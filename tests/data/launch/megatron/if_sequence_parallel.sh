#!/bin/bash
TP=4
PP=1
CP=2
NNODES=2
if [ "$TP" -gt 1 ]; then
    SP_ARG="--sequence-parallel"
else
    SP_ARG=""
fi
if [[ $PP -gt 1 ]]; then
    PP_ARGS=(--num-layers-per-virtual-pipeline-stage 2)
else
    PP_ARGS=()
fi
ARGS=(
    --num-layers 32 --seq-length 32768
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"   # ring attention
    --cp-comm-type p2p
    $SP_ARG
    --use-distributed-optimizer
    --micro-batch-size 1
    --global-batch-size 128
    --bf16
)
torchrun --nproc-per-node=8 --nnodes="$NNODES" pretrain_gpt.py "${ARGS[@]}" "${PP_ARGS[@]}"
