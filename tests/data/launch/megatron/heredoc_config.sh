#!/bin/bash
cat > ds_config.json <<EOF
{
  "train_batch_size": 64, "--tensor-model-parallel-size": 99
}
EOF
CMD="pretrain_gpt.py --num-layers 24 --tensor-model-parallel-size 4 --micro-batch-size 2 \
  --global-batch-size 32 --seq-length 2048 --bf16"
echo "running: torchrun --tensor-model-parallel-size 16 $CMD"
eval "torchrun --nproc_per_node 8 $CMD"
