"""Published training runs, priced with their own plans."""
