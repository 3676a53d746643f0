"""What is decided: the plan's document, shapes, pins, what is legal, and which rank does what in which order."""
