"""Hugging Face models by their config.json, with micro-batches like those of their processor and a collator."""
