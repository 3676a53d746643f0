def pretrain_config(tp: int = 2, **kwargs):
    cfg = _common()
    cfg.model.tensor_model_parallel_size = tp
    cfg.train.micro_batch_size = 1
    return cfg
