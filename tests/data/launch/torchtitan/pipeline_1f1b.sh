torchrun --nnodes 2 --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b \
  --parallelism.pipeline_parallel_degree 4 --parallelism.pipeline_parallel_schedule 1F1B \
  --parallelism.pipeline_parallel_microbatch_size 1 --training.local_batch_size 8 --training.global_batch_size 32 \
  --parallelism.data_parallel_shard_degree 4
