"""What users ask of a plan: why, why not, what if, why nothing fits, and what rules of thumb say."""
