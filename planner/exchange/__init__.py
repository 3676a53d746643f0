"""Plans as settings of other training frameworks, and their settings as plans."""
