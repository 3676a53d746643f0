torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b \
   --parallelism.sequence_parallel_degree 2 --training.local_batch_size 1
