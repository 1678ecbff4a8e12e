"""Pipeline schedules as action lists: built, validated, simulated, lowered, executed."""
