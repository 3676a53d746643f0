#!/bin/bash
# a script of 2020
python pretrain_gpt2.py --model-parallel-size 8 --num-layers 24 --hidden-size 1024 --batch-size 8 \
  --checkpoint-activations --fp16
