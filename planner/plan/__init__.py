"""What is decided: the document, shapes, pins, what is legal, and which rank does what when."""
