"""Plans as settings of other training frameworks, and settings of other frameworks as plans."""
