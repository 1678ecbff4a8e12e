"""What things cost: hardware, clusters, compute, collectives, memory. Seconds and bytes."""
