"""Plans for those who do not run dynapar's own loop: from lengths alone, and in others' forms."""
