"""What several test files share: models, profiles, plans, ranks and ways to run things."""
