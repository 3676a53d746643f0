"""`plan tune`: candidates raced on the real cluster, constants refitted to what they took, until both agree."""
