"""The nouns every part shares: graph, placement, collective, cluster. No torch here."""
