"""Python's side of the plans: gathers what the core decides on. Knows nothing of how a plan is carried out."""
