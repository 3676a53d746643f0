torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 40 --tensor-model-parallel-size 2 --micro-batch-size 1 \
    --global-batch-size 64 --bf16
