"""How tensor parallelism may cut a model: found, and tried."""
