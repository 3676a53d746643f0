#!/bin/bash
DATA_PATH=my-gpt2_text_document
CHECKPOINT_PATH=checkpoints/gpt2_345m
GPUS_PER_NODE=8
NNODES=1

DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank 0 --master_addr localhost --master_port 6000"

GPT_ARGS="
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 2 \
    --sequence-parallel \
    --num-layers 24 \
    --hidden-size 1024 \
    --num-attention-heads 16 \
    --seq-length 1024 \
    --max-position-embeddings 1024 \
    --micro-batch-size 8 \
    --global-batch-size 64 \
    --lr 0.00015 \
    --train-iters 500000 \
    --fp16
"
OUTPUT_ARGS="--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10"

python -m torch.distributed.launch $DISTRIBUTED_ARGS \
       pretrain_gpt.py \
       $GPT_ARGS \
       $OUTPUT_ARGS \
       --data-path $DATA_PATH \
       --save $CHECKPOINT_PATH \
       --load $CHECKPOINT_PATH
