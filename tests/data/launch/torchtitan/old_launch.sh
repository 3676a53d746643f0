#!/usr/bin/bash
NGPU=${NGPU:-"8"}
CONFIG_FILE=${CONFIG_FILE:-"./train_configs/llama3_8b.toml"}
overrides=""
if [ $# -ne 0 ]; then
    overrides="$*"
fi
torchrun --nproc_per_node=${NGPU} --rdzv_backend c10d --rdzv_endpoint="localhost:0" \
torchtitan/train.py --job.config_file ${CONFIG_FILE} --training.tensor_parallel_degree 2 $overrides
