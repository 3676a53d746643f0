torchrun --nproc_per_node=8 torchtitan/train.py --job.config_file ./train_configs/my_own.toml --training.batch_size 2
