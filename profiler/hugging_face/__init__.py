"""A Hugging Face config.json as a model, with micro-batches such as its processor and a collator make."""
