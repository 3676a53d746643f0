#!/usr/bin/env bash
# usage: MODEL_SIZE=8b ./train.sh
MODEL_SIZE=${MODEL_SIZE:-70b}
case ${MODEL_SIZE} in
    8b|8B)
        NUM_LAYERS=32; HIDDEN=4096; TP=2; PP=1
        ;;
    70b|70B)
        NUM_LAYERS=80; HIDDEN=8192; TP=8; PP=2
        ;;
    *)
        echo "unknown size ${MODEL_SIZE}" >&2
        exit 1
        ;;
esac

options=" \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --num-layers ${NUM_LAYERS} \
    --hidden-size ${HIDDEN} \
    --micro-batch-size 2 --global-batch-size 256 \
    --seq-length 4096 --bf16 --use-distributed-optimizer"

run_cmd="python -u pretrain_gpt.py ${options}"
srun -N 4 --ntasks-per-node 8 sh -c "${run_cmd}"
