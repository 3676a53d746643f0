NGPU=64
torchrun --nnodes 8 --nproc-per-node $((NGPU / 8)) -m torchtitan.train --module deepseek_v3 --config deepseek_v3_16b \
  --parallelism.expert_parallel_degree 8 --parallelism.data_parallel_shard_degree 64 \
  --training.local_batch_size 4 --parallelism.fsdp_reshard_after_forward always
