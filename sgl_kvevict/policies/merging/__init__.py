"""Steps of a merge: the nearest kept token of every evicted one, and the weighted rows that compaction runs."""
