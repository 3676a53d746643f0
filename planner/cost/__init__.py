"""What things cost: pure functions from one operator, collective and parameter up to a stage; seconds and bytes."""
