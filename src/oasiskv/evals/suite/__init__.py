"""Tasks x methods x budgets: run, keep, and show."""
