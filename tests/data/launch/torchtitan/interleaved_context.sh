TP=2; CP=2; PP=2
ARGS="--parallelism.tensor_parallel_degree $TP --parallelism.context_parallel_degree $CP \
 --parallelism.pipeline_parallel_degree $PP --parallelism.pipeline_parallel_schedule Interleaved1F1B \
 --parallelism.pipeline_parallel_layers_per_stage 8"
torchrun --nproc_per_node=8 --nnodes=${NNODES:-2} -m torchtitan.train --module llama3 --config llama3_8b $ARGS \
  --training.local_batch_size 4 --training.seq_len 32768
