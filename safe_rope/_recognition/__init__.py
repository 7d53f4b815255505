"""Whether a module holds positions, what made them, how it answers, and how it is applied."""
