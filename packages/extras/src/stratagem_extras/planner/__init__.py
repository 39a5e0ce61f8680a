"""Planning: what each strategy holds in memory, before anything is trained."""
