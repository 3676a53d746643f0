#!/bin/bash
set -x
function log() {
    echo "[$(date)] $*"
}
launch() {
  local nodes=$1
  log "on $nodes nodes"
}
launch 2
export TP_SIZE=8 PP_SIZE=1
NODE_ARGS="--nnodes=2 --nproc_per_node=8"
torchrun $NODE_ARGS \
    ./pretrain_gpt.py \
    --num-layers 32 \
    --tensor-model-parallel-size ${TP_SIZE} --pipeline-model-parallel-size ${PP_SIZE} \
    --data-path "0.5 /data/a 0.5 /data/b" \
    --use-tp-pp-dp-mapping --use-distributed-optimizer --num-distributed-optimizer-instances 2 \
    --micro-batch-size 1 --global-batch-size 32 --bf16 && log done
