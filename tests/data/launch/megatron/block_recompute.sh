torchrun --nproc_per_node=8 pretrain_gpt.py --num-layers=32 --hidden-size=4096 --seq-length=4096 \
  --tensor-model-parallel-size=2 --sequence-parallel --micro-batch-size=4 --global-batch-size=128 --bf16 \
  --recompute-granularity=full --recompute-method=block --recompute-num-layers=10 --use-distributed-optimizer
