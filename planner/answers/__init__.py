"""Answers to what users ask: the best plan, why this one and not another, why nothing fits, what if."""
