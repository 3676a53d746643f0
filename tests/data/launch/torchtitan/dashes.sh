exec torchrun --nproc-per-node 8 -m torchtitan.train --module qwen3 --config qwen3_8b \
  --parallelism.tensor-parallel-degree 4 --parallelism.no-enable-sequence-parallel \
  --training.local-batch-size 1 --parallelism.fsdp-reshard-after-forward never
